"""A run from start to end, stopped at any moment and resumed, evaluated, repeated, and on another number of devices."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from mtf_experiments.reporting.metrics import read_metrics
from mtf_experiments.training.checkpoints import list_checkpoints, to_numpy
from tests.commands import runs

# One layer is compiled the same way under all layouts, but sums run in another order.
TOLERANCE = 1e-4
ONE = ("--gin_file=tiny.gin",)
# Nothing but steps until the end.
QUIET = (*ONE, "--gin_param=Training.eval_every=0", "--gin_param=Training.checkpoint_every=0")


def values(run: Path, key: str) -> dict[int, float]:
    return {row["step"]: row["value"] for row in read_metrics(run / "metrics.jsonl") if row["key"] == key}


def steps(run: Path) -> list[int]:
    folder = run / "checkpoints"
    return [row["step"] for row in list_checkpoints(folder)] if folder.is_dir() else []


def result(run: Path, step: int, scale: float = 1.0) -> float:
    content = json.loads((run / "eval" / f"tiny-validation-{step}.json").read_text())
    (found,) = (row for row in content["scales"] if row["logit_scale"] == scale)
    return found["nll_per_token"]


@pytest.fixture(scope="module")
def finished(here, env):
    """A run of eight steps in a directory where a bad start was refused before."""
    refused = runs.run("train", *ONE, "--model_dir=run", "--gin_param=vocab_size=128", cwd=here, env=env)
    assert refused.code == 2, refused
    done = runs.run("train", *ONE, "--model_dir=run", cwd=here, env=env)
    assert done.code == 0, done
    return here / "run", done


def test_run_writes_what_it_promises_and_says_where(finished):
    run, done = finished
    assert done.out.rstrip("\n").split("\n")[-1] == f"wrote {run}"
    assert "Traceback" not in done.err
    assert {"config.gin", "environment.json", "tokenizer.model", "plan.json", "metrics.jsonl"} <= runs.files_below(run)
    assert {f"eval/tiny-validation-{step}.json" for step in (0, 4, 8)} <= runs.files_below(run)
    assert steps(run) == [4, 8]
    for part in (
        "parameters",
        "memory per device",
        "no communication",
        "step 8/8",
        "tokens/s",
        "FLOP/s",
        "ETA",
        "ppl/word",
    ):
        assert part in done.out


def test_metrics_have_loss_rate_and_speed_of_every_step(finished):
    run, _ = finished
    for key in ("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens"):
        assert list(values(run, key)) == list(range(1, 9))
    # The first step's time went into compiling: it has no speed.
    for key in ("speed/tokens/s", "speed/positions/s", "speed/FLOP/s"):
        assert list(values(run, key)) == list(range(2, 9)) and min(values(run, key).values()) > 0
    assert list(values(run, "validation/nll_per_token")) == [0, 4, 8]


def test_environment_names_seed_mesh_devices_versions_and_data(finished):
    run, _ = finished
    recorded = json.loads((run / "environment.json").read_text())
    assert recorded["seed"] == 0 and recorded["devices"]["count"] == 1 and recorded["mesh_shape"] == "rows:-1;cols:1"
    assert recorded["versions"]["jax"] and len(recorded["data"]["splits"]["train"]["tokens_sha256"]) == 64
    assert "mesh_shape = 'rows:-1;cols:1'" in (run / "config.gin").read_text()


def test_finished_run_started_again_changes_nothing_and_evaluates(finished, here, env):
    run, _ = finished
    before, parameters = read_metrics(run / "metrics.jsonl"), to_numpy(run / "checkpoints" / "8")
    again = runs.run("train", *ONE, "--model_dir=run", cwd=here, env=env)
    assert again.code == 0 and "resuming after step 8" in again.out and "evaluation after step 8" in again.out
    assert "step 8/8" not in again.out
    assert read_metrics(run / "metrics.jsonl") == before and steps(run) == [4, 8]
    after = to_numpy(run / "checkpoints" / "8")
    assert all(np.array_equal(after[name], value) for name, value in parameters.items())


def test_saved_config_alone_repeats_the_run_bit_for_bit(finished, here, env):
    run, _ = finished
    done = runs.run("train", f"--gin_file={run / 'config.gin'}", "--model_dir=repeated", cwd=here, env=env)
    assert done.code == 0, done
    assert values(here / "repeated", "train/loss") == values(run, "train/loss")
    assert (here / "repeated" / "config.gin").read_text() == (run / "config.gin").read_text()


def test_eight_devices_give_the_curve_of_one(finished, here, env):
    run, _ = finished
    mesh = "--gin_param=mesh_shape='rows:4;cols:2'"
    done = runs.run("train", *ONE, "--model_dir=eight", "--devices=8", mesh, cwd=here, env=env)
    assert done.code == 0 and "4 x 2 (rows:4;cols:2), 8 devices" in done.out, done
    one, eight = values(run, "train/loss"), values(here / "eight", "train/loss")
    assert list(eight) == list(one)
    np.testing.assert_allclose(list(eight.values()), list(one.values()), rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("which", "expected"),
    [("best", [8]), ("all", [4, 8]), ("4", [4])],
    ids=["best", "all", "step"],
)
def test_evaluation_of_chosen_checkpoints_repeats_that_of_training(which, expected, finished, here, env):
    run, _ = finished
    during = values(run, "validation/nll_per_token")
    assert min(during, key=lambda step: during[step]) == 8  # what "best" has to find
    done = runs.run("evaluate", "--model_dir=run", f"--checkpoint={which}", cwd=here, env=env)
    assert done.code == 0, done
    wrote = re.findall(r"^wrote (.*)$", done.out, re.MULTILINE)
    assert wrote == [str(run / "eval" / f"tiny-validation-{step}.json") for step in expected]
    assert "different from" not in done.out
    for step in expected:
        assert result(run, step) == pytest.approx(during[step], rel=1e-6)


def test_evaluation_uses_an_override_and_tells_the_difference(finished, here, env):
    run, _ = finished
    scales = "--gin_param=Evaluation.logit_scales=(0.5, 1.0)"
    mesh = "--gin_param=mesh_shape='rows:2;cols:1'"
    done = runs.run("evaluate", "--model_dir=run", "--devices=2", scales, mesh, cwd=here, env=env)
    assert done.code == 0, done
    assert f"different from {run / 'config.gin'}:" in done.out
    assert "(0.5, 1.0)" in done.out and "rows:2;cols:1" in done.out and "logits x 0.5" in done.out
    assert result(run, 8, 0.5) > 0
    assert result(run, 8) == pytest.approx(values(run, "validation/nll_per_token")[8], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model_dir=run", "--checkpoint=5"], ["checkpoint '5'", "4, 8"]),
        (["--model_dir=nowhere"], ["nowhere does not exist"]),
        (["--model_dir=run", "--gin_param=d_ff=64"], ["decoder/feed_forward/wi_wo", "d_ff", "32", "64"]),
        (["--model_dir=run", "--split=dev"], ["no dev split", "train, validation"]),
    ],
    ids=["no_such_step", "no_such_run", "another_architecture", "no_such_split"],
)
def test_evaluation_of_what_is_not_there_is_refused(arguments, parts, finished, here, env):
    done = runs.run("evaluate", *arguments, cwd=here, env=env)
    assert done.code == 2 and done.err.startswith("error: ") and "Traceback" not in done.err, done
    assert [part for part in parts if part not in done.err] == []


def test_stopped_and_resumed_run_equals_one_that_was_not_stopped(here, env):
    forever = "--gin_param=train_steps=1000000"
    twice = [signal.SIGTERM] * 2
    stopped = runs.stop_at("step 3/", "train", *QUIET, "--model_dir=stopped", forever, cwd=here, env=env, signals=twice)
    assert stopped.code == 143, stopped
    run = here / "stopped"
    (at,) = steps(run)
    assert at >= 3 and f"stopped by SIGTERM after step {at}" in stopped.out
    assert max(values(run, "train/loss")) == at  # the last finished step, none after it
    assert not list((run / "eval").glob("*")) and not list((run / "checkpoints").glob("*tmp*"))

    total = f"--gin_param=train_steps={at + 5}"
    resumed = runs.run("train", *QUIET, "--model_dir=stopped", total, cwd=here, env=env)
    whole = runs.run("train", *QUIET, "--model_dir=whole", total, cwd=here, env=env)
    assert resumed.code == whole.code == 0, (resumed, whole)
    assert f"resuming after step {at}" in resumed.out
    for key in ("train/loss", "train/learning_rate", "train/grad_norm", "validation/nll_per_token"):
        assert values(run, key) == values(here / "whole", key)
    assert list(values(run, "train/loss")) == list(range(1, at + 6))
    one, other = (to_numpy(folder / "checkpoints" / str(at + 5)) for folder in (run, here / "whole"))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_keyboard_interrupt_saves_the_last_step(here, env):
    arguments = (*QUIET, "--gin_param=train_steps=1000000", "--model_dir=interrupted")
    stopped = runs.stop_at("step 3/", "train", *arguments, cwd=here, env=env, signals=[signal.SIGINT])
    assert stopped.code == 130 and "Traceback" not in stopped.err, stopped
    (at,) = steps(here / "interrupted")
    assert f"stopped by SIGINT after step {at}" in stopped.out


def test_sigterm_while_compiling_ends_the_run(here):
    # Nothing compiled is at hand here: after the data comes a compilation of seconds.
    cold = runs.environment()
    early = runs.stop_at("data", "train", *ONE, "--model_dir=cold", cwd=here, env=cold)
    assert early.code == 143 and "Traceback" not in early.err, early
    assert steps(here / "cold") == [] and not list((here / "cold").glob("eval/*"))


def test_sigterm_during_start_up_ends_the_run_and_leaves_nothing_in_the_way(here, env):
    early = runs.stop_at("run", "train", *ONE, "--model_dir=early", cwd=here, env=env)
    assert early.code == 143 and "Traceback" not in early.err, early
    done = runs.run("train", *ONE, "--model_dir=early", cwd=here, env=env)
    assert done.code == 0 and steps(here / "early") == [4, 8], done


def test_sigterm_during_evaluation_saves_the_last_step_and_no_result(here, env):
    long = "--gin_param=SyntheticSource.validation_lines=60000"
    total = "--gin_param=train_steps=5"
    arguments = (*QUIET, "--model_dir=evaluating", long, total)
    stopped = runs.stop_at("step 5/5", "train", *arguments, cwd=here, env=env)
    assert stopped.code == 143 and "stopped by SIGTERM after step 5" in stopped.out, stopped
    assert steps(here / "evaluating") == [5]
    assert not list((here / "evaluating" / "eval").glob("*"))
    assert values(here / "evaluating", "validation/nll_per_token") == {}


def test_loss_that_is_not_finite_ends_with_its_own_code_and_keeps_the_checkpoint(here, env):
    bad = [*ONE, "--gin_param=Constant.learning_rate=1e30", "--gin_param=Training.checkpoint_every=1"]
    done = runs.run("train", *bad, "--model_dir=diverged", cwd=here, env=env)
    assert done.code == 3 and "Traceback" not in done.err, done
    kept = steps(here / "diverged")
    assert kept and f"the checkpoint of step {max(kept)} is untouched" in done.err
    assert re.search(r"step \d+ \(batch \d+ of data seed 0\): loss", done.err)
    assert all(np.isfinite(p).all() for p in to_numpy(here / "diverged" / "checkpoints" / str(max(kept))).values())


@pytest.mark.parametrize(
    "settings",
    [
        {"train_steps": 1},
        {"Training.log_every": 0, "Training.eval_every": 0, "Training.checkpoint_every": 0},
        {"batch_size": 64, "SyntheticSource.train_lines": 3, "SyntheticSource.validation_lines": 1},
    ],
    ids=["one_step", "nothing_on_the_way", "batch_larger_than_the_data"],
)
def test_smallest_runs_end_well(settings, here, env, request):
    name = request.node.callspec.id
    params = [f"--gin_param={key}={value}" for key, value in settings.items()]
    unknown = "--gin_param=LanguageModelTask.unknown_limit=1.0"
    done = runs.run("train", *ONE, *params, unknown, f"--model_dir={name}", cwd=here, env=env)
    assert done.code == 0 and "nan" not in done.out, done
    total = settings.get("train_steps", 8)
    assert total in steps(here / name) and total in values(here / name, "train/loss")
    assert "ETA 0s" in done.out


def test_dry_run_of_the_largest_model_needs_no_devices(here, env):
    done = runs.run("train", "--gin_file=lm_4.9b.gin", "--dry_run", cwd=here, env=env)
    assert done.code == 0, done
    for part in ("4.90B", "16 x 32", "512 devices", "memory per device", "GiB", "allreduce", "rows", "cols"):
        assert part in done.out
    before = runs.files_below(here)
    refused = runs.run("train", "--gin_file=lm_4.9b.gin", "--model_dir=large", cwd=here, env=env)
    assert refused.code == 2 and "512" in refused.err and "1 device" in refused.err and "lm_4.9b.gin:5" in refused.err
    assert runs.files_below(here) == before
