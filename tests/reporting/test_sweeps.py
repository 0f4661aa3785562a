"""Sweeps: which members there are, what they are called and started with, and how far their directories say they are."""

import json
import shlex

import pytest

from mtf_experiments.errors import UserError
from mtf_experiments.reporting.sweeps import Sweep, progress

AXES = {
    "heads": {1: ["num_heads=1", "d_ff=128"], 2: ["num_heads=2", "layouts/none.gin"]},
    "seed": {0: ["Experiment.seed=0"], 1: ["Experiment.seed=1"]},
}


def sweep(**changes):
    return Sweep(**{"title": "toy", "base": ["lm_tiny.gin"], "axes": AXES, **changes})


def test_members_are_all_combinations_the_last_axis_fastest():
    members = sweep().members()
    assert [m.name for m in members] == ["heads=1,seed=0", "heads=1,seed=1", "heads=2,seed=0", "heads=2,seed=1"]
    assert members[0].values == {"heads": 1, "seed": 0}


def test_bindings_and_files_are_told_apart():
    member = sweep().members()[-1]
    assert member.gin_files == ["lm_tiny.gin", "layouts/none.gin"]
    assert member.gin_params(["data_dir='x'"]) == ["num_heads=2", "Experiment.seed=1", "data_dir='x'"]


def test_patterns_leave_members_out():
    names = [m.name for m in sweep(leave_out=["heads=2,*"]).members()]
    assert names == ["heads=1,seed=0", "heads=1,seed=1"]
    with pytest.raises(UserError, match="'heads=3,\\*' names no member; there are heads=1,seed=0"):
        sweep(leave_out=["heads=3,*"]).members()
    with pytest.raises(UserError, match="has no members"):
        sweep(leave_out=["*"]).members()


def test_names_that_no_directory_can_have_are_refused():
    with pytest.raises(UserError, match="cannot name a directory"):
        sweep(axes={"mesh": {"rows:8": ["mesh_shape='rows:8'"]}}).members()


def test_commands_train_and_then_evaluate(tmp_path):
    member = sweep(splits=["test"], devices=4).members()[0]
    train, evaluate = member.commands(tmp_path, python="python")
    assert train == [
        *[
            "python",
            "-m",
            "mtf_experiments.train",
            "--gin_file=lm_tiny.gin",
            "--gin_param=num_heads=1",
            "--gin_param=d_ff=128",
        ],
        *["--gin_param=Experiment.seed=0", f"--model_dir={tmp_path}/heads=1,seed=0", "--devices=4"],
    ]
    assert evaluate[2:] == ["mtf_experiments.evaluate", train[-2], "--split=test", "--devices=4"]


def test_a_shell_reads_the_printed_line_as_it_is_meant(tmp_path):
    member = sweep().members()[0]
    line = member.shell(tmp_path / "a folder", ["data_dir='it''s'"])
    assert shlex.split(line) == member.commands(tmp_path / "a folder", ["data_dir='it''s'"], python="python")[0]


def test_progress_is_read_off_the_run_directory(tmp_path):
    member = sweep(splits=["test"]).members()[0]
    assert progress(member, tmp_path, 20) == progress(member, tmp_path / "elsewhere", 20)
    assert not progress(member, tmp_path, 20).done and progress(member, tmp_path, 20).missing_splits == ("test",)
    run = tmp_path / member.name
    (run / "eval").mkdir(parents=True)
    rows = [{"step": s, "key": "train/loss", "value": 5.0 - s / 10, "time": 100.0 + s} for s in (5, 10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = progress(member, tmp_path, 20)
    assert (found.step, found.loss, found.rate, found.trained) == (10, 4.0, 1.0, False)
    (run / "checkpoints" / "20").mkdir(parents=True)
    (run / "eval" / "tiny-validation-20.json").write_text("{}")
    assert progress(member, tmp_path, 20).trained and not progress(member, tmp_path, 20).done
    (run / "eval" / "tiny-test-20.json").write_text("{}")
    assert progress(member, tmp_path, 20).done
    assert not progress(member, tmp_path, 40).trained  # of a run that is to go on
