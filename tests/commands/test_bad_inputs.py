"""Every bad input ends in seconds with code 2 and a message from which one knows what to do; golden/ holds them all.

UPDATE_GOLDEN=1 in the environment writes the messages anew, to be read and committed.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtf_experiments import config, experiment
from mtf_experiments.files import file_sha256
from tests.commands import runs

GOLDEN = Path(__file__).parent / "golden"
TEXT = """include 'tiny.gin'
data_dir = 'text'
LanguageModelTask.source = @TextSource()
TextSource.data_dir = %data_dir
TextSource.train = 'train.txt'
TextSource.validation = 'valid.txt'
"""


def words(lines: int) -> str:
    """So many lines of five words."""
    return "".join(" ".join(f"w{(7 * line + k * k) % 60}" for k in range(5)) + "\n" for line in range(lines))


def text(folder: Path) -> None:
    (folder / "text.gin").write_text(TEXT)
    # A source in the place of another leaves its settings unread.
    tiny = "".join(line for line in runs.TINY.splitlines(keepends=True) if "SyntheticSource" not in line)
    (folder / "tiny.gin").write_text(tiny)
    (folder / "text").mkdir()
    (folder / "text" / "train.txt").write_text(words(400))
    (folder / "text" / "valid.txt").write_text(words(20))


def empty_file(folder: Path) -> None:
    text(folder)
    (folder / "text" / "valid.txt").write_bytes(b"")


def no_file(folder: Path) -> None:
    text(folder)
    (folder / "text" / "valid.txt").unlink()


def not_utf8(folder: Path) -> None:
    text(folder)
    good = words(300).encode()
    (folder / "text" / "train.txt").write_bytes(good + b"caf\xe9 w1\n" + good)


def syntax(folder: Path) -> None:
    (folder / "broken.gin").write_text("include 'tiny.gin'\n\nd_ff = = 3\n")


def checkpoint(folder: Path) -> None:
    for name in ("params/_METADATA", "opt_state/_METADATA", "meta/metadata", "_CHECKPOINT_METADATA"):
        path = folder / "run" / "checkpoints" / "4" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("damaged")


def used(folder: Path) -> None:
    checkpoint(folder)
    try:
        experiment.load([str(folder / "tiny.gin")], ["d_ff=64", "Experiment.seed=7"])
        (folder / "run" / "config.gin").write_text(config.resolved())
    finally:
        config.clear()


def foreign_id(folder: Path) -> None:
    """A token store, whole by its own manifest, with an id that no vocabulary of the run has."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        experiment.load([str(folder / "tiny.gin")], []).task.prepare()
    finally:
        os.chdir(before)
        config.clear()
    (found,) = (folder / "cache" / "tokens").glob("tiny-train-*/manifest.json")
    store = found.parent
    tokens = np.load(store / "tokens.npy")
    tokens[100] = 60000
    np.save(store / "tokens.npy", tokens)
    manifest = json.loads((store / "manifest.json").read_text())
    size = (store / "tokens.npy").stat().st_size
    manifest["files"]["tokens.npy"] = {"bytes": size, "sha256": file_sha256(store / "tokens.npy")}
    (store / "manifest.json").write_text(json.dumps(manifest))


def nothing(folder: Path) -> None:
    pass


MESH = "--gin_param=mesh_shape='rows:1;cols:8'"
CASES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "misspelt_layout_rule": (nothing, ["--gin_param=layout='batch:rows;heds:cols'"]),
    "unknown_mesh_dimension": (nothing, ["--gin_param=layout='batch:rows;heads:columns'"]),
    "size_that_does_not_divide": (nothing, ["--devices=8", MESH, "--gin_param=num_heads=12"]),
    "batch_that_does_not_divide": (
        nothing,
        ["--devices=8", "--gin_param=mesh_shape='rows:8;cols:1'", "--gin_param=batch_size=12"],
    ),
    "two_dimensions_on_one_mesh_dimension": (
        nothing,
        ["--devices=8", MESH, "--gin_param=layout='d_ff:cols;d_model:cols'"],
    ),
    "two_rules_for_one_dimension": (nothing, ["--gin_param=layout='heads:rows;heads:cols'"]),
    "mesh_of_too_many_devices": (nothing, ["--devices=8", "--gin_param=mesh_shape='rows:4;cols:4'"]),
    "mesh_of_too_few_devices": (nothing, ["--devices=8", "--gin_param=mesh_shape='rows:2;cols:2'"]),
    "unused_macro": (nothing, ["--gin_param=tokens_per_batch=65536", "--gin_param=num_head=4"]),
    "wrong_type": (nothing, ["--gin_param=d_ff='large'"]),
    "value_out_of_range": (nothing, ["--gin_param=num_heads=0"]),
    "missing_gin_file": (nothing, ["--gin_file=tinny.gin"]),
    "broken_gin_file": (syntax, ["--gin_file=broken.gin"]),
    "missing_data_file": (no_file, ["--gin_file=text.gin"]),
    "missing_data_folder": (text, ["--gin_file=text.gin", "--gin_param=data_dir='texts'"]),
    "empty_data_file": (empty_file, ["--gin_file=text.gin"]),
    "text_that_is_not_utf8": (not_utf8, ["--gin_file=text.gin"]),
    "vocabulary_larger_than_the_model": (nothing, ["--gin_param=vocab_size=128"]),
    "id_outside_the_vocabulary": (foreign_id, []),
    "damaged_checkpoint": (checkpoint, []),
    "directory_of_another_run": (used, []),
    "directory_below_a_file": (nothing, ["--model_dir=tiny.gin/run"]),
    "text_without_inner_quotes": (nothing, ["--gin_param=mesh_shape=rows:4"]),
    "empty_directory_name": (nothing, ["--model_dir="]),
    "flag_of_another_command": (nothing, ["--beam_size=4"]),
    "typographic_dash": (nothing, ["\u2013\u2013devices=8"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_with_a_message_that_helps(name, tmp_path, env):
    prepare, arguments = CASES[name]
    (tmp_path / "tiny.gin").write_text(runs.TINY)
    prepare(tmp_path)
    run_directory = tmp_path / "run"
    before = runs.files_below(run_directory)
    given = [argument.partition("=")[0] for argument in arguments]
    defaults = [f for f in ("--gin_file=tiny.gin", "--model_dir=run") if f.partition("=")[0] not in given]
    result = runs.run("train", *defaults, *arguments, cwd=tmp_path, env=env, limit=60)
    assert result.code == 2, result
    message = result.err.replace(str(tmp_path), "<here>").replace(str(runs.REPOSITORY), "<repository>")
    message = message.split("usage: ")[0]  # how argparse breaks its lines depends on the version of Python
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(message, encoding="utf-8")
    assert message == golden.read_text(encoding="utf-8")
    assert message.startswith("error: ") and "Traceback" not in result.out + message
    new = runs.files_below(run_directory) - before
    assert new <= {"config.gin", "environment.json", "plan.json", "tokenizer.model"}  # all written anew by a good run
    if name not in ("damaged_checkpoint", "id_outside_the_vocabulary"):
        assert not new
    print(f"{name}: {result.seconds:.1f} s")


@pytest.mark.parametrize(
    ("name", "parts"),
    {
        "size_that_does_not_divide": ["decoder/attention/qkvo", "heads", "12", "cols", "8", "data_model.gin:2"],
        "batch_that_does_not_divide": ["batch", "12", "rows", "8"],
        "mesh_of_too_many_devices": ["16", "8 devices", "--gin_param"],
        "mesh_of_too_few_devices": ["4", "8 devices"],
        "text_that_is_not_utf8": ["train.txt", "line 301"],
        "id_outside_the_vocabulary": ["60000", "example", "train split", "383"],
        "unused_macro": ["num_head ", "num_heads", "tokens_per_batch"],
    }.items(),
)
def test_message_names_all_that_matters(name, parts):
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert [part for part in parts if part not in text] == []
