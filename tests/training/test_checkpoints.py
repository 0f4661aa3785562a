"""What is saved is what comes back: on any mesh, by name, and as many steps as are to be kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments.errors import UserError
from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from mtf_experiments.training import optimizers
from mtf_experiments.training.checkpoints import Checkpoints, list_checkpoints, to_numpy
from tests.training.saved import (
    OPTIMIZER,
    SHAPES,
    abstract,
    assert_same,
    make_params,
    make_state,
    place,
    run_python,
    save,
)


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
