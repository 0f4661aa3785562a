import json
import os

import jax
import pytest

from mtf_experiments.errors import UserError
from mtf_experiments.files import write_text
from mtf_experiments.reporting import run_directory
from mtf_experiments.reporting.run_directory import RunDirectory, changed, describe_environment

CONFIG = """
mesh_shape = 'rows:2;cols:4'
layout = 'batch:rows'
d_model = 64
train_steps = 100
data_dir = '/a'
Adafactor.beta1 = 0.0
Evaluation.batch_size = 8
Experiment.d_model = %d_model
Experiment.mesh_shape = %mesh_shape
Experiment.optimizer = @Adafactor()
Experiment.seed = 0
Training.log_every = 10
Training.label_smoothing = 0.0
TextSource.data_dir = %data_dir
"""
ENVIRONMENT = {"seed": 0, "data": {"vocabulary": "abc", "train": {"lines": 3}}}


def with_values(**values):
    lines = CONFIG
    for name, value in values.items():
        name = name.replace("__", ".")
        old = next(line for line in CONFIG.split("\n") if line.startswith(f"{name} ="))
        lines = lines.replace(old, f"{name} = {value}")
    return lines


def used_run(path):
    run = RunDirectory.create(path)
    run.record(CONFIG, ENVIRONMENT)
    (run.checkpoints / "5").mkdir(parents=True)
    return run


def test_layout_mesh_steps_and_logging_may_change_between_starts(tmp_path):
    run = used_run(tmp_path / "run")
    text = with_values(
        mesh_shape="'rows:1'",
        layout="''",
        train_steps=200,
        data_dir="'/b'",
        Evaluation__batch_size=4,
        Training__log_every=1,
    )
    run.record(text, {**ENVIRONMENT, "layout": ""})
    assert run.config.read_text() == text
    saved = json.loads(run.environment.read_text())
    assert saved["layout"] == "" and saved["earlier_starts"] == [ENVIRONMENT]


def test_another_model_optimizer_or_seed_is_refused_and_every_difference_listed(tmp_path):
    run = used_run(tmp_path / "run")
    before = run.config.read_text(), run.environment.read_text()
    text = with_values(
        d_model=128, Experiment__seed=1, Adafactor__beta1=0.9, Training__label_smoothing=0.1, layout="''"
    )
    with pytest.raises(UserError) as caught:
        run.record(text, ENVIRONMENT)
    message = str(caught.value)
    for line in (
        "d_model: 64 -> 128",
        "Experiment.seed: 0 -> 1",
        "Adafactor.beta1: 0.0 -> 0.9",
        "Training.label_smoothing: 0.0 -> 0.1",
    ):
        assert f"\n  {line}\n" in message
    assert message.count(" -> ") == 5  # those, and "(there -> now)"
    assert str(run.path) in message
    assert (run.config.read_text(), run.environment.read_text()) == before


def test_data_that_changed_under_the_same_configuration_is_refused(tmp_path):
    run = used_run(tmp_path / "run")
    with pytest.raises(UserError, match='data vocabulary: "abc" -> "xyz"\n'):
        run.record(CONFIG, {"seed": 0, "data": {"vocabulary": "xyz", "train": {"lines": 3}}})
    assert json.loads(run.environment.read_text())["data"] == ENVIRONMENT["data"]


def test_added_and_dropped_bindings_are_differences():
    extra = CONFIG + "WarmupCosine.peak = 0.1\n"
    assert changed(CONFIG, extra) == ["WarmupCosine.peak: (not set) -> 0.1"]
    assert changed(extra, CONFIG) == ["WarmupCosine.peak: 0.1 -> (not set)"]


def test_names_that_merely_end_like_a_free_one_are_not_free():
    before, after = "embedding_layout = 1\n", "embedding_layout = 2\n"
    assert changed(before, after) == ["embedding_layout: 1 -> 2"]


def test_directory_without_checkpoints_may_start_anew_with_another_configuration(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.record(CONFIG, ENVIRONMENT)
    run.record(with_values(d_model=128), {"seed": 0, "data": {}})
    assert "d_model = 128" in run.config.read_text()


def test_directory_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run cannot be written"):
        RunDirectory.create(tmp_path / "file" / "run")


def test_opening_what_is_no_run_says_so(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no config.gin"):
        RunDirectory.open(tmp_path)
    used_run(tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").evaluation("lm", "test", 7).name == "lm-test-7.json"


def test_processes_that_do_not_write_leave_no_file(tmp_path):
    run = RunDirectory.create(tmp_path / "run", writer=False)
    run.record(CONFIG, ENVIRONMENT)
    assert not run.path.exists()


def test_damaged_environment_file_is_named(tmp_path):
    run = used_run(tmp_path / "run")
    run.environment.write_text("{")
    with pytest.raises(UserError, match="environment.json is damaged"):
        run.record(CONFIG, ENVIRONMENT)


def test_interrupted_write_leaves_the_old_file_and_no_leftover(tmp_path, monkeypatch):
    path = tmp_path / "config.gin"
    write_text(path, "old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory.os, "fsync", fail)
    with pytest.raises(UserError, match="cannot write .*config.gin: No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.gin"]


def test_written_files_have_ordinary_permissions(tmp_path):
    write_text(tmp_path / "a", "text")
    (tmp_path / "b").write_text("text")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_environment_names_devices_versions_seed_and_data():
    environment = describe_environment(3, "rows:8", "batch:rows", {"vocabulary": "abc"}, note="x")
    assert environment["devices"]["count"] == jax.device_count() == 8
    assert environment["versions"]["jax"] == jax.__version__
    assert (environment["seed"], environment["mesh_shape"], environment["layout"]) == (3, "rows:8", "batch:rows")
    assert environment["data"] == {"vocabulary": "abc"} and environment["note"] == "x"
    json.dumps(environment)
