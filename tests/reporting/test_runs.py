"""What a run directory says is read off as it is; damaged ones are told."""

import pytest

from mtf_experiments.errors import UserError
from mtf_experiments.reporting.runs import Run, read_runs
from tests.reporting import fake_runs


def test_sizes_curves_and_results(tmp_path):
    run = Run.read(fake_runs.write(tmp_path, "a", heads=4, seed=3, parameters=7, nll=(6.0, 4.0)))
    assert (run.setting("num_heads"), run.setting("d_ff"), run.seed, run.parameters) == (4, 512, 3, 7)
    assert run.task == "toy" and not run.translates and run.finished and run.step == run.total_steps == 40
    assert run.curve("validation/nll_per_token").steps == (20, 40)
    assert run.curve("validation/nll_per_token").values == (6.0, 4.0)
    assert run.evaluation()["step"] == 40 and run.evaluation("test") is None
    assert run.tokens == 40 * 1000 and run.train_tokens == 100_000 and run.seconds == 20.0


def test_an_unfinished_run_says_so(tmp_path):
    run = Run.read(fake_runs.write(tmp_path, "a", steps=80, reached=40))
    assert not run.finished and (run.step, run.total_steps) == (40, 80)


def test_runs_and_folders_of_runs_are_found_once_and_sorted_by_size(tmp_path):
    sweep = tmp_path / "sweep"
    fake_runs.write(sweep, "large", parameters=9)
    fake_runs.write(sweep, "small", parameters=1)
    fake_runs.write(tmp_path / "other", "small", parameters=5)
    runs = read_runs([sweep, sweep / "small", tmp_path / "other"])
    assert [r.name for r in runs] == ["sweep/small", "other/small", "large"]


def test_runs_that_differ_in_the_seed_alone_have_the_rest_in_common(tmp_path):
    a, b, c = (Run.read(fake_runs.write(tmp_path, f"{h}-{s}", heads=h, seed=s)) for h, s in ((1, 0), (1, 1), (2, 0)))
    assert a.without_seed == b.without_seed != c.without_seed


def test_what_is_no_run_or_damaged_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(UserError, match="neither the directory of a run"):
            read_runs([path])
    run = fake_runs.write(tmp_path, "a")
    (run / "eval" / "toy-validation-40.json").write_text('{"task": "to')
    with pytest.raises(UserError, match="toy-validation-40.json is damaged"):
        read_runs([run])
