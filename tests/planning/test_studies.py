"""Studies: cases become points, the widest model that fits is found, and all is written."""

import json
from pathlib import Path

import pytest

from mtf_experiments import config, experiment
from mtf_experiments.planning import studies

SHIPPED = sorted((Path(__file__).parents[2] / "gin" / "planning").glob("*.gin"))
BASE = {"title": "A study", "base": ["lm_tiny.gin"], "hardware": "hardware/tpu_v2.gin", "x": "cores"}


def points(**settings):
    study = studies.Study(**{**BASE, **settings})
    return study, studies.run(study, experiment.load_all, experiment.Experiment)


@pytest.fixture(autouse=True)
def fresh_configuration():
    yield
    config.clear()


def test_every_case_is_a_point(tmp_path):
    cases = {"data": {n: [f"mesh_shape='rows:{n}'", "layout='batch:rows'"] for n in (2, 4)}}
    study, found = points(cases=cases, log_x=True)
    assert [(p.series, p.x, p.processors) for p in found] == [("data", 2, 2), ("data", 4, 4)]
    assert found[1].seconds < found[0].seconds and all(0 < p.efficiency < 1 and p.fits for p in found)
    paths = studies.write(study, "toy", found, tmp_path)
    assert [path.name for path in paths] == ["toy.json", "toy.md", "toy.png"] and all(p.is_file() for p in paths)
    assert json.loads(paths[0].read_text())["points"][0]["seconds"] == found[0].seconds
    assert "--study=planning/toy.gin" in paths[1].read_text()
    assert studies.markdown(study, "toy", found) == paths[1].read_text()


def test_names_on_the_axis_are_drawn_too(tmp_path):
    cases = {"all": {"one": ["mesh_shape='rows:1;cols:1'"], "two": ["mesh_shape='rows:2;cols:1'"]}}
    study, found = points(cases=cases, metric="seconds")
    studies.draw(study, found, tmp_path / "names.png")
    assert (tmp_path / "names.png").stat().st_size > 5_000


def test_the_widest_model_is_found_by_bisection():
    case = ["mesh_shape='rows:8;cols:1'", "Hardware.memory=20e6"]
    _, found = points(cases={"data": {0: case}}, widths={"d_ff": 64, "num_heads": 1})
    fitting, failing = [p.x for p in found if p.fits], [p.x for p in found if not p.fits]
    assert [p.x for p in found] == sorted(p.x for p in found) and fitting and failing
    assert max(fitting) < min(failing) <= max(64 + max(fitting), max(fitting) * 9 / 8)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_studies_are_legal_experiments(path):
    (study,) = experiment.load_all([str(path)], [], [studies.Study])
    config.clear()
    for series, cases in study.cases.items():
        bindings = list(cases.values())[-1]
        if study.widths:
            bindings = [*bindings, *(f"{m}={n * study.steps.get(series, 1)}" for m, n in study.widths.items())]
        files = [study.hardware, *study.base, *(b for b in bindings if b.endswith(".gin"))]
        exp, profile = experiment.load_all(
            files, [b for b in bindings if not b.endswith(".gin")], [experiment.Experiment, studies.Hardware]
        )
        mesh = exp.dry_mesh(None)
        profile.check(mesh)
