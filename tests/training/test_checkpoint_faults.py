"""Kills, full disks, damage and races: the last whole checkpoint stays usable, and nothing is lost silently."""

import logging
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments.errors import UserError
from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from mtf_experiments.training.checkpoints import Checkpoints
from tests.training.saved import (
    plain_state,
    run_python,
    save,
)


def test_one_whole_checkpoint_exists_at_every_instant(tmp_path):
    seen, done = [], threading.Event()
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        with Checkpoints(tmp_path / "c", read_only=True) as other:

            def watch():
                while not done.is_set():
                    seen.append(other.latest())

            watcher = threading.Thread(target=watch)
            watcher.start()
            for step in range(2, 8):
                save(checkpoints, step)
            checkpoints.wait()
            done.set()
            watcher.join()
        assert checkpoints.steps() == [7]
    assert None not in seen and len(set(seen)) > 1


def test_a_step_deleted_while_the_directory_is_read_is_not_the_last_word(tmp_path, monkeypatch, caplog):
    """Another process writes step 2 and then deletes step 1, after step 1 was listed here."""
    with Checkpoints(tmp_path / "c", keep=1) as writer:
        save(writer, 1)
        writer.wait()
        with Checkpoints(tmp_path / "c", read_only=True) as reader:
            listed = reader._listed

            def list_then_lose_it():
                steps = listed()
                if steps == [1]:
                    save(writer, 2)
                    writer.wait()
                return steps

            monkeypatch.setattr(reader, "_listed", list_then_lose_it)
            assert reader.latest() == 2
    assert "incomplete" not in caplog.text


KILLED = """
import sys, jax.numpy as jnp
from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from mtf_experiments.training.checkpoints import Checkpoints
shape = Shape([Dimension("d", 100_000)])
checkpoints = Checkpoints(sys.argv[1], keep=2)
step = (checkpoints.latest() or 0)
print("start", step, flush=True)
while True:
    step += 1
    w = jnp.full(shape.sizes, float(step))
    checkpoints.save(step, {"w": NamedTensor(w, shape)}, {"count": jnp.int32(step), "v": w * 2}, {"step": step})
    print("saved", step - 1, flush=True)  # the save before this one is whole
"""


def test_kill_at_random_moments_of_a_save_leaves_the_last_whole_step_usable(tmp_path):
    shape = Shape([Dimension("d", 100_000)])
    rng = random.Random(0)
    whole = 0
    for _ in range(3):
        process = run_python(KILLED, tmp_path / "c", wait=False)
        lines = iter(process.stdout.readline, "")
        assert int(next(lines).split()[1]) >= whole  # the restart resumes without help from the last whole step
        for _ in range(rng.randint(1, 3)):
            whole = int(next(lines).split()[1])
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        whole = max([whole, *(int(line.split()[1]) for line in lines)])
        process.wait()
    with Checkpoints(tmp_path / "c") as checkpoints:
        step = checkpoints.latest()
        assert step >= whole > 0
        like = {"w": NamedTensor(jax.ShapeDtypeStruct((100_000,), jnp.float32), shape)}
        params, state = checkpoints.restore(
            step, like, {"count": jax.ShapeDtypeStruct((), jnp.int32), "v": like["w"].array}
        )
        assert (np.asarray(params["w"].array) == step).all() and (np.asarray(state["v"]) == 2 * step).all()
        assert checkpoints.meta(step) == {"step": step}
        assert not [p for p in checkpoints.directory.iterdir() if "tmp" in p.name]
        checkpoints.save(step + 1, params, dict(state, count=jnp.int32(step + 1)), {})
        checkpoints.wait()
        assert checkpoints.latest() == step + 1


@pytest.mark.parametrize("lost", ["_CHECKPOINT_METADATA", "meta/metadata", "params/_METADATA", "opt_state/_METADATA"])
def test_incomplete_newest_step_is_skipped_aloud(tmp_path, caplog, lost):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 100)
        save(checkpoints, 120)
    (tmp_path / "c" / "120" / lost).unlink()
    with Checkpoints(tmp_path / "c", read_only=True) as checkpoints, caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == 100
        assert f"checkpoint {tmp_path}/c/120 is incomplete (no {lost}): ignored" in caplog.text
        with pytest.raises(UserError, match=f"{tmp_path}/c/120 is incomplete"):
            checkpoints.restore(120, *plain_state(120))
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() == 100
        assert "renamed to 120.incomplete" in caplog.text
        save(checkpoints, 120)
        checkpoints.wait()
        assert checkpoints.steps() == [100, 120]
        assert checkpoints.restore(120, *plain_state(0))[0]["w"].array[0] == 120


def test_directory_with_only_an_incomplete_step_starts_fresh_aloud(tmp_path, caplog):
    (tmp_path / "c" / "120" / "params").mkdir(parents=True)
    with caplog.at_level(logging.WARNING), Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() is None
        assert "120 is incomplete" in caplog.text
        save(checkpoints, 3)
        checkpoints.wait()
        assert checkpoints.steps() == [3]


def test_leftover_temporary_directories_do_not_stop_later_saves(tmp_path, caplog):
    for name in ("30.tmp-0", "30.orbax-checkpoint-tmp", "30.orbax-checkpoint-tmp-1700000000"):
        (tmp_path / "c" / name / "params").mkdir(parents=True)
    with caplog.at_level(logging.WARNING), Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() is None
        assert "removing" in caplog.text
        for step in (29, 30, 31):
            save(checkpoints, step)
        checkpoints.wait()
        assert checkpoints.steps() == [30, 31]
        assert sorted(p.name for p in checkpoints.directory.iterdir()) == ["30", "30.tmp-0", "31"]


FULL_DISK = """
import resource, signal, sys
import jax, jax.numpy as jnp
from mtf_experiments.errors import UserError
from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from mtf_experiments.training.checkpoints import Checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def save(checkpoints, step, size):
    w = jax.random.normal(jax.random.key(0), (size,))
    checkpoints.save(step, {"w": NamedTensor(w, [Dimension("d", size)])}, {"count": jnp.int32(step)}, {})

def run(directory, saves_again):
    with Checkpoints(directory, keep=1) as checkpoints:
        save(checkpoints, 1, 10)
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        save(checkpoints, 2, 1_000_000)
        if saves_again:
            try:
                save(checkpoints, 3, 10)
            finally:
                print("left", checkpoints.steps(), checkpoints.latest())

for directory in sys.argv[1:]:
    try:
        run(directory, directory.endswith("again"))
        print("nothing was noticed")
    except UserError as error:
        print("error:", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_failed_background_save_surfaces_at_close_and_at_the_next_save_with_path_and_cause(tmp_path):
    code, out, err = run_python(FULL_DISK, tmp_path / "once", tmp_path / "again")
    assert code == 0, out + err
    at_close, left, at_next_save = out.strip().split("\n")
    assert left == "left [1] 1"
    for line, name in ((at_close, "once"), (at_next_save, "again")):
        assert line.startswith(f"error: checkpoint {tmp_path}/{name}/2 could not be saved")
        assert "File too large" in line or "EFBIG" in line
        with Checkpoints(tmp_path / name) as checkpoints:
            assert checkpoints.steps() == [1]
            like = {"w": NamedTensor(jax.ShapeDtypeStruct((10,), jnp.float32), [Dimension("d", 10)])}
            assert checkpoints.restore_params(1, like)["w"].array.shape == (10,)


def test_damaged_data_is_an_error_with_the_path(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 5)
    for item, read in (("params", "restore_params"), ("opt_state", "restore")):
        for file in [p for p in (tmp_path / "c" / "5" / item).rglob("*") if p.is_file() and p.parent.name == "d"]:
            file.write_bytes(file.read_bytes()[:10])
        params, state = plain_state(5)
        with Checkpoints(tmp_path / "c", read_only=True) as checkpoints:
            with pytest.raises(UserError, match=f"{tmp_path}/c/5 cannot be read"):
                getattr(checkpoints, read)(5, *((params,) if read == "restore_params" else (params, state)))
    (tmp_path / "c" / "5" / "meta" / "metadata").write_text("{")
    with (
        Checkpoints(tmp_path / "c", read_only=True) as checkpoints,
        pytest.raises(UserError, match="c/5 cannot be read"),
    ):
        checkpoints.meta(5)


def test_absent_step_is_refused_with_the_steps_that_exist(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        save(checkpoints, 5)
        checkpoints.wait()
        with pytest.raises(UserError, match="c/6; there are 5"):
            checkpoints.meta(6)
    with pytest.raises(UserError, match="does not exist"):
        Checkpoints(tmp_path / "nowhere", read_only=True)


def test_step_that_is_not_later_is_refused_unless_forced(tmp_path):
    with Checkpoints(tmp_path / "c", keep=5) as checkpoints:
        for step in (1, 2, 3):
            save(checkpoints, step)
        for step in (2, 3):
            with pytest.raises(UserError, match=f"step {step} not saved.*already has step 3"):
                save(checkpoints, step)
        params, state = plain_state(2, seed=22)
        checkpoints.save(2, params, state, {}, force=True)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.restore_params(2, params)["w"].array[0] == 22


def test_step_that_disagrees_with_the_optimizer_is_refused(tmp_path):
    params, state = plain_state(4)
    with (
        Checkpoints(tmp_path / "c") as checkpoints,
        pytest.raises(ValueError, match="counts 4 updates, but the step is 5"),
    ):
        checkpoints.save(5, params, state, {})


def test_directory_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/checkpoints cannot be written"):
        Checkpoints(tmp_path / "file" / "checkpoints")


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[3]))
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from mtf_experiments.training.checkpoints import Checkpoints
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
split, whole = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())
with Checkpoints(sys.argv[1], keep=5) as checkpoints:
    for step in range(1, 10):
        if step % 3 == 0:
            w = jax.make_array_from_callback((8,), split, lambda i: np.arange(8.0, dtype=np.float32)[i] * step)
            count = jax.make_array_from_callback((), whole, lambda i: np.int32(step))
            checkpoints.save(step, {"w": NamedTensor(w, [Dimension("d", 8)])}, {"count": count}, {"step": step})
"""


def test_two_processes_save_exactly_the_asked_steps_and_one_process_restores_them(tmp_path):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [run_python(TWO_PROCESSES, tmp_path / "c", port, i, wait=False) for i in range(2)]
    for process in processes:
        try:
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, err
    with Checkpoints(tmp_path / "c", keep=5) as checkpoints:
        assert checkpoints.steps() == [3, 6, 9]
        like = {"w": NamedTensor(jax.ShapeDtypeStruct((8,), jnp.float32), [Dimension("d", 8)])}
        params, _ = checkpoints.restore(9, like, {"count": jax.ShapeDtypeStruct((), jnp.int32)})
        np.testing.assert_array_equal(np.asarray(params["w"].array), np.arange(8) * 9)
