import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mtf_experiments.errors import UserError
from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from mtf_experiments.training import optimizers
from mtf_experiments.training.checkpoints import Checkpoints, flatten, list_checkpoints, to_numpy
from mtf_experiments.training.optimizers import Adafactor

ROOT = Path(__file__).parents[2]
SHAPES = {
    "decoder/qkv": Shape([Dimension("layers", 2), Dimension("heads", 8), Dimension("d_model", 16)]),
    "decoder": Shape([Dimension("d_model", 16)]),  # a name that is a folder of another one
    "softmax": Shape([Dimension("d_model", 16), Dimension("vocab", 24)]),
}
LAYOUT = {"heads": "cols", "vocab": "cols", "d_model": "rows"}
OPTIMIZER = Adafactor(min_dim_size_to_factor=4, beta1=0.9)


def place(rows, cols):
    devices = np.array(jax.devices()[: rows * cols]).reshape(rows, cols)
    mesh = jax.sharding.Mesh(devices, ("rows", "cols"))
    return lambda dims: NamedSharding(mesh, PartitionSpec(*(LAYOUT.get(d.name) for d in dims)))


def make_params(seed=0, sharding_of=None):
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in SHAPES.items():
        array = jnp.asarray(rng.standard_normal(shape.sizes), jnp.bfloat16 if name == "decoder" else jnp.float32)
        params[name] = NamedTensor(array if sharding_of is None else jax.device_put(array, sharding_of(shape)), shape)
    return params


def make_state(step, sharding_of=None):
    """Parameters and an optimizer state as after `step` updates, without doing them."""
    params = make_params(step, sharding_of)
    tx = OPTIMIZER.transformation(params)
    state = optimizers.init(
        tx, params, None if sharding_of is None else optimizers.state_shardings(tx, params, sharding_of)
    )
    return params, jax.tree.map(lambda x: jnp.int32(step) if x.dtype == jnp.int32 else x + step / 7, state)


def abstract(params, sharding_of):
    shaped = lambda p, s: jax.ShapeDtypeStruct(p.array.shape, p.array.dtype, sharding=s)  # noqa: E731
    tx = OPTIMIZER.transformation(params)
    shardings = optimizers.state_shardings(tx, params, sharding_of)
    arrays = {n: p.array for n, p in params.items()}
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(tx.init, arrays), shardings
    )
    return {n: NamedTensor(shaped(p, sharding_of(p.shape)), p.shape) for n, p in params.items()}, state


def plain_state(step, seed=None):
    """A small state without an optimizer's structure: quick to make and to save."""
    shape = Shape([Dimension("d", 4)])
    value = jnp.full(4, float(step if seed is None else seed))
    return {"w": NamedTensor(value, shape)}, {"count": jnp.int32(step), "v": value * 2}


def save(checkpoints, step, **kwargs):
    params, state = plain_state(step)
    checkpoints.save(step, params, state, {"step": step}, **kwargs)


def run_python(code, *args, wait=True, **env):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)} | env
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if not wait:
        return process
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def assert_same(one, two):
    one, two = flatten(one), flatten(two)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(two[name]), err_msg=name)


@pytest.fixture(scope="module")
def saved_on_2x4(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    params, state = make_state(7, place(2, 4))
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(7, params, state, {"tokens": 123}, metrics={"loss": 2.5})
    return directory, params, state


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (8, 1), (1, 8), (4, 1), (4, 2)], ids=str)
def test_checkpoint_of_one_mesh_restores_bit_for_bit_on_another(saved_on_2x4, mesh):
    directory, params, state = saved_on_2x4
    wanted = abstract(params, place(*mesh))
    with Checkpoints(directory, read_only=True) as checkpoints:
        new_params, new_state = checkpoints.restore(7, *wanted)
    assert_same(new_params, params)
    assert_same(new_state, state)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert new_params["softmax"].array.sharding == place(*mesh)(SHAPES["softmax"])
    assert new_params["softmax"].shape == SHAPES["softmax"]


def test_update_after_restore_equals_the_uninterrupted_one(saved_on_2x4):
    directory, params, state = saved_on_2x4
    with Checkpoints(directory, read_only=True) as checkpoints:
        restored = checkpoints.restore(7, *abstract(params, place(1, 1)))
    tx = OPTIMIZER.transformation(params)
    step = jax.jit(lambda g, s, p: optimizers.apply(tx, g, s, p, 0.1))
    straight, _ = step(make_params(99, place(2, 4)), state, params)
    resumed, _ = step(make_params(99, place(1, 1)), restored[1], restored[0])
    for name, p in straight.items():
        np.testing.assert_allclose(*(np.asarray(x.array, np.float32) for x in (resumed[name], p)), rtol=1e-6, atol=1e-6)


def test_listing_and_numpy_export_need_one_device_and_no_model(saved_on_2x4):
    directory, params, _ = saved_on_2x4
    code = """
import sys, jax
from mtf_experiments.training.checkpoints import list_checkpoints, to_numpy
assert jax.device_count() == 1
row, = list_checkpoints(sys.argv[1])
arrays = to_numpy(sys.argv[1] + "/7")
assert not any(m.startswith("mtf_experiments.models") for m in sys.modules)
total = float(arrays["softmax"].sum())
print(row["step"], row["parameters"], row["metrics"], sorted(arrays), total, arrays["decoder"].dtype)
"""
    code, out, err = run_python(code, directory)
    assert code == 0, err
    count = sum(s.elements for s in SHAPES.values())
    total = float(np.asarray(params["softmax"].array).sum())
    assert out.strip() == f"7 {count} {{'loss': 2.5}} ['decoder', 'decoder/qkv', 'softmax'] {total} bfloat16"


def test_numpy_export_equals_the_saved_parameters(saved_on_2x4):
    directory, params, _ = saved_on_2x4
    arrays = to_numpy(directory / "7")
    assert_same(arrays, {n: p.array for n, p in params.items()})


def test_meta_and_dimensions_come_back(saved_on_2x4):
    directory, _, _ = saved_on_2x4
    with Checkpoints(directory, read_only=True) as checkpoints:
        assert checkpoints.meta(7) == {"tokens": 123}
        assert checkpoints.metrics(7) == {"loss": 2.5}
    (row,) = list_checkpoints(directory)
    assert row["step"] == 7 and row["bytes"] > 1000


def test_every_parameter_that_does_not_fit_is_named(saved_on_2x4):
    directory, params, _ = saved_on_2x4
    other = dict(params)
    del other["decoder/qkv"]
    other["decoder/kv"] = params["decoder/qkv"]
    other["decoder"] = params["decoder"].astype(jnp.float32)
    swapped = Shape(reversed(SHAPES["softmax"]))
    other["softmax"] = NamedTensor(params["softmax"].array.T, swapped)
    with Checkpoints(directory, read_only=True) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore_params(7, other)
    message = str(caught.value)
    assert str(directory / "7") in message
    assert "decoder/qkv: in the checkpoint, but not in this model" in message
    assert "decoder/kv: in this model, but not in the checkpoint" in message
    assert "decoder: bfloat16[d_model=16] in the checkpoint, float32[d_model=16] in this model" in message
    saved, wanted = "float32[d_model=16, vocab=24]", "float32[vocab=24, d_model=16]"
    assert f"softmax: {saved} in the checkpoint, {wanted} in this model" in message


def test_equal_sizes_with_other_dimension_names_do_not_fit(saved_on_2x4):
    directory, params, _ = saved_on_2x4
    renamed = SHAPES["softmax"].renamed({"vocab": "d_ff"})
    other = params | {"softmax": NamedTensor(params["softmax"].array, renamed)}
    with Checkpoints(directory, read_only=True) as checkpoints, pytest.raises(UserError, match="vocab=24.*d_ff=24"):
        checkpoints.restore_params(7, other)


def test_another_optimizer_is_refused_by_name(saved_on_2x4):
    directory, params, _ = saved_on_2x4
    state = optimizers.init(optimizers.AdamW().transformation(params), params)
    with (
        Checkpoints(directory, read_only=True) as checkpoints,
        pytest.raises(UserError, match="(?s)optimizer state:.* 0/mu/softmax"),
    ):
        checkpoints.restore(7, params, state)


def test_donated_buffers_do_not_reach_an_unfinished_save(tmp_path):
    shape = Shape([Dimension("rows", 512), Dimension("columns", 1024)])
    step = jax.jit(lambda w, s: (w * 1.5 + 1.0, {"count": s["count"] + 1, "v": s["v"] + w}), donate_argnums=(0, 1))
    expected, w, s = {}, jnp.ones(shape.sizes), {"count": jnp.int32(0), "v": jnp.zeros(shape.sizes)}
    with Checkpoints(tmp_path / "c", keep=5) as checkpoints:
        for t in range(1, 5):
            w, s = step(w, s)
            expected[t] = (np.array(w), np.array(s["v"]))
            checkpoints.save(t, {"w": NamedTensor(w, shape)}, s, {})  # the next step overwrites what this one saves
        checkpoints.wait()
        for t, (weights, moment) in expected.items():
            params, state = checkpoints.restore(t, {"w": NamedTensor(w, shape)}, s)
            np.testing.assert_array_equal(np.asarray(params["w"].array), weights)
            np.testing.assert_array_equal(np.asarray(state["v"]), moment)


def test_kept_are_the_newest_the_best_and_every_pinned_step(tmp_path):
    losses = {1: 5.0, 9: 4.0, 10: 1.0, 30: float("nan"), 40: 3.0, 50: 2.0, 90: 2.5, 100: None}
    with Checkpoints(tmp_path / "c", keep=2, keep_every=40, metric="loss") as checkpoints:
        for step, loss in losses.items():
            save(checkpoints, step, metrics=None if loss is None else {"loss": loss})
        checkpoints.wait()
        assert checkpoints.steps() == [10, 40, 90, 100]
        assert (checkpoints.latest(), checkpoints.best()) == (100, 10)
    with Checkpoints(tmp_path / "c", keep=2, keep_every=40, metric="loss") as reopened:
        assert (reopened.latest(), reopened.best()) == (100, 10)
        save(reopened, 120, metrics={"loss": 9.0})
        reopened.wait()
        assert reopened.steps() == [10, 40, 100, 120]


def test_largest_metric_can_be_the_best(tmp_path):
    with Checkpoints(tmp_path / "c", keep=1, metric="bleu", mode="max") as checkpoints:
        for step, bleu in {1: 10.0, 2: 30.0, 3: 20.0}.items():
            save(checkpoints, step, metrics={"bleu": bleu})
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best()) == ([2, 3], 2)


def test_exactly_the_saved_steps_are_there(tmp_path):
    with Checkpoints(tmp_path / "c", keep=10) as checkpoints:
        for step in range(1, 10):
            if step % 3 == 0:
                save(checkpoints, step)
        checkpoints.wait()
        assert checkpoints.steps() == [3, 6, 9]


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


def test_a_checkpoint_is_chosen_by_word_or_step_and_an_absent_one_is_refused_with_what_exists(tmp_path):
    with Checkpoints(tmp_path / "c", keep=3, metric="loss") as checkpoints:
        with pytest.raises(UserError, match="'latest'.*there are none"):
            checkpoints.choose("latest")
        for step, loss in {9: 1.0, 10: 2.0, 100: 3.0}.items():
            save(checkpoints, step, metrics={"loss": loss})
        checkpoints.wait()
        chosen = {which: checkpoints.choose(which) for which in ("latest", "best", "all", "10")}
        assert chosen == {"latest": [100], "best": [9], "all": [9, 10, 100], "10": [10]}
        for wrong in ("11", "newest", "-1"):
            with pytest.raises(UserError, match=f"'{wrong}'.*there are 9, 10, 100"):
                checkpoints.choose(wrong)
