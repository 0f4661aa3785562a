"""What the documents name exists: commands, flags, targets, Gin files; and every shipped Gin file says what it is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtf_experiments import cli, config, experiment
from mtf_experiments.models import parameters

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = sorted(
    p for p in REPOSITORY.glob("**/*.md") if not {".venv", "runs"} & set(p.relative_to(REPOSITORY).parts)
)
GIN = sorted((REPOSITORY / "gin").rglob("*.gin"))
RUNS = [path for path in GIN if path.parent.name == "gin"]
MACROS = ("mesh_shape", "layout", "d_model", "d_ff", "num_heads", "d_kv", "num_layers", "batch_size", "train_steps")
# Table 2 of the paper: width of the feed-forward layer and heads, by billions of parameters.
TABLE_2 = {
    "0.14b": (4096, 4),
    "0.22b": (8192, 8),
    "0.37b": (16384, 16),
    "0.67b": (32768, 32),
    "1.28b": (65536, 64),
    "2.48b": (131072, 128),
    "4.9b": (262144, 256),
}


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """The commands (module, flags) that a document shows, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", text)
    shown = re.findall(r"python3? -m mtf_experiments\.(\w+)([^\n`|]*)", text)
    return [(module, re.findall(r"(--\w+)", rest)) for module, rest in shown]


@pytest.fixture(autouse=True)
def fresh_configuration():
    yield
    config.clear()


@pytest.fixture(scope="module")
def flags_of():
    """The flags that a command's --help names."""
    known: dict[str, set[str]] = {}

    def flags(module: str) -> set[str]:
        if module not in known:
            argv = [sys.executable, "-m", f"mtf_experiments.{module}", "--help"]
            shown = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60)
            known[module] = set(re.findall(r"--\w+", shown.stdout))
        return known[module]

    return flags


def test_there_is_something_to_check():
    assert REPOSITORY / "README.md" in DOCUMENTS and len(RUNS) >= len(TABLE_2)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_and_flags_in_a_document_exist(document, flags_of):
    for module, flags in commands_of(document.read_text(encoding="utf-8")):
        assert (REPOSITORY / "mtf_experiments" / f"{module}.py").is_file(), module
        assert [flag for flag in flags if flag not in flags_of(module)] == [], module


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_make_targets_in_a_document_exist(document):
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = re.findall(r"(?:^|`)make ([\w-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert [target for target in shown if target not in targets] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_gin_files_in_a_document_exist(document):
    for file in re.findall(r"[\w./-]+\.gin\b", document.read_text(encoding="utf-8")):
        if "/" in file or file.startswith(("lm_", "wiki_", "wmt_", "mt_")):
            assert (REPOSITORY / file).is_file() or config.find(file).is_file()


def test_the_makefile_runs_a_shipped_gin_file():
    used = re.findall(r"--gin_file=(\S+)", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    assert used and all(config.find(file).is_file() for file in used)


def test_list_of_commands_shows_all_that_are_there():
    shown = cli.list_commands()
    there = [command for command in cli.COMMANDS if (REPOSITORY / "mtf_experiments" / f"{command}.py").is_file()]
    assert there and all(f"mtf_experiments.{command} " in shown for command in there)


@pytest.mark.parametrize("path", GIN, ids=name)
def test_gin_file_begins_by_saying_what_it_is(path):
    first = path.read_text(encoding="utf-8").split("\n")[0]
    assert re.match(r"# \w.{20,}", first), first


@pytest.mark.parametrize("path", RUNS, ids=name)
def test_run_file_loads_and_can_be_changed_by_its_macros(path):
    loaded = experiment.load([str(path)], [])
    text = config.resolved()
    assert [macro for macro in MACROS if not re.search(rf"^{macro} =", text, re.MULTILINE)] == []
    config.clear()
    changed = experiment.load([str(path)], ["mesh_shape='rows:4;cols:2'", "train_steps=7"])
    assert changed.mesh(8) == {"rows": 4, "cols": 2} and changed.train_steps == 7
    assert changed.model == loaded.model


@pytest.mark.parametrize("size", TABLE_2)
@pytest.mark.parametrize(
    ("data", "row_length", "vocabulary"), [("lm", 256, 32768), ("wiki", 1024, 131072)], ids=["lm1b", "wikipedia"]
)
def test_run_files_of_table_2_have_its_widths(data, row_length, vocabulary, size):
    model = experiment.load([f"{data}_{size}.gin"], []).model
    assert (model.d_ff, model.num_heads) == TABLE_2[size]
    assert (model.d_model, model.d_kv, model.num_layers) == (1024, 256, 6)
    assert model.row_length == row_length and model.padded_vocab_size == vocabulary


# Table 3: width of the feed-forward layer, heads and their size; the last row is the Transformer of Vaswani et al. 2017.
TABLE_3 = {
    "0.15b": (2048, 4, 128, 0.155),
    "0.24b": (4096, 8, 128, 0.244),
    "0.42b": (8192, 16, 128, 0.420),
    "0.77b": (16384, 32, 128, 0.772),
    "1.48b": (32768, 64, 128, 1.477),
    "2.89b": (65536, 128, 128, 2.886),
    "0.21b": (4096, 16, 64, 0.210),
}


@pytest.mark.parametrize("pair", ["ende", "enfr"])
@pytest.mark.parametrize("size", TABLE_3)
def test_run_files_of_table_3_have_its_widths_and_parameters(pair, size):
    exp = experiment.load([f"wmt_{pair}_{size}.gin"], [])
    model = exp.model
    *widths, billions = TABLE_3[size]
    assert [model.d_ff, model.num_heads, model.d_kv] == widths and (model.d_model, model.num_layers) == (1024, 6)
    _, shapes = model.abstract_parameters()
    assert round(parameters.count(shapes) / 1e9, 3) == billions
    assert exp.task.lengths == {"inputs_length": 256, "length": 256} and exp.batch_size == 128
    assert exp.task.source.languages == ("en", pair[2:]) and exp.training.label_smoothing == 0.1
    assert (exp.decoding.beam, exp.decoding.alpha) == (4, 0.6)
    steps, last = (154_000, 51_400) if pair == "enfr" else (19_200, 6_400)
    assert (exp.train_steps, exp.schedule.final_steps) == (steps, last)


@pytest.mark.parametrize("layout", sorted((REPOSITORY / "gin" / "layouts").glob("*.gin")), ids=lambda path: path.stem)
def test_layout_files_suit_a_run_file(layout):
    mesh = "mesh_shape='rows:2;cols:2;planes:2'"
    loaded = experiment.load(["lm_tiny.gin", str(layout)], [mesh])
    from mtf_experiments import mtf

    assert loaded.programs(mtf.abstract_mesh(loaded.mesh(8))).mesh_shape.processors == 8
