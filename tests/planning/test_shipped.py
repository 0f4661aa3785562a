"""Golden numbers of every shipped run file: what its training step holds, computes and communicates.

UPDATE_GOLDEN=1 in the environment writes them anew, to be read and committed.
"""

import json
import os
from pathlib import Path

import pytest

from mtf_experiments import experiment, mtf
from mtf_experiments.planning.forecast import forecast
from mtf_experiments.planning.plan import on_accelerators

FOLDER = Path(__file__).parents[2] / "gin"
FILES = sorted(path.name for path in FOLDER.glob("*.gin"))
GOLDEN = Path(__file__).with_name("golden") / "shipped.json"
# Table 2 of the paper and its Table 3, in billions, as far as they print them.
PRINTED = {"lm_0.14b": 0.14, "lm_4.9b": 4.90, "wmt_ende_2.89b": 2.89, "wmt_enfr_0.42b": 0.42, "lm_1.28b": 1.28}


def numbers(name):
    exp = on_accelerators(experiment.load([name], []))
    mesh = exp.dry_mesh(8 if "-1" in exp.mesh_shape else None)
    found = forecast(exp.programs(mtf.abstract_mesh(mesh)))
    elements = found.ledger.elements_by_mesh_dimension()
    return {
        "mesh": str(mesh),
        "parameters": found.parameter_count,
        "parameter_bytes": found.parameter_bytes,
        "optimizer_bytes": found.optimizer_bytes,
        "flops": found.ledger.flops,
        "elements": {";".join(axes): n for axes, n in sorted(elements.items())},
    }


@pytest.mark.parametrize("name", FILES)
def test_shipped_run_file_plans_as_before(name):
    found = numbers(name)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        golden = {**golden, name: found}
        GOLDEN.write_text(json.dumps(dict(sorted(golden.items())), indent=1) + "\n")
    assert found == golden[name]
    if (printed := PRINTED.get(name.removesuffix(".gin"))) is not None:
        assert found["parameters"] / 1e9 == pytest.approx(printed, abs=0.006)


def test_golden_numbers_are_of_shipped_files():
    assert sorted(json.loads(GOLDEN.read_text())) == FILES
