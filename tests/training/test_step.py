"""The training step on one device and a few: what it minimises, what it reports, and which row goes where."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.training import optimizers
from mtf_experiments.training.feed import device_batch
from mtf_experiments.training.schedules import InverseSquareRootToZero
from tests.layouts import tiny

ROWS = tiny.ragged_rows()
REAL = ROWS["targets"] != 0
SILENT = {"attention_dropout": 0.0, "relu_dropout": 0.0, "residual_dropout": 0.0}
SMOOTHING = 0.1


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def schedule():
    return InverseSquareRootToZero(train_steps=12, warmup_steps=4, final_steps=3)


@functools.cache
def made(**settings):
    """One layer on one device."""
    silent = settings.pop("silent", False)
    config = tiny.model(num_layers=1, **(SILENT if silent else {}))
    return tiny.programs("all:1", "", config=config, schedule=schedule(), **settings)


@functools.cache
def started(**settings):
    # Initial parameters do not depend on dropout or label smoothing.
    state = started(label_smoothing=SMOOTHING)[1] if settings.get("silent") else made(**settings).initialise()
    return made(**settings), state, tiny.feed(made(**settings), ROWS, training=True)


def gradients(programs, params, batch, step=0, seed=7):
    found, metrics = programs.gradient_program(params, batch, jax.random.key(seed), jnp.int32(step))
    return found, tiny.numpy(metrics)


def log_probs(programs, params):
    """log p of every id of the vocabulary, `[rows, length, vocab]`, in float64."""
    batch = tiny.feed(programs, ROWS)
    logits = jax.jit(lambda p: parameters.merge(programs.structure, p)(batch).array)(params)
    wide = np.asarray(logits, np.float64)
    top = wide.max(-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))


def test_loss_is_the_mean_over_real_tokens_with_and_without_smoothing():
    programs, state, batch = started(silent=True, label_smoothing=SMOOTHING)
    _, metrics = gradients(programs, state.params, batch)
    log_p = log_probs(programs, state.params)
    nll = -np.take_along_axis(log_p, ROWS["targets"][..., None], -1)[..., 0][REAL].mean()
    spread = -log_p.mean(-1)[REAL].mean()
    assert metrics["tokens"] == REAL.sum()
    np.testing.assert_allclose(metrics["nll"], nll, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], (1 - SMOOTHING) * nll + SMOOTHING * spread, rtol=1e-6)


def test_training_and_evaluation_agree_on_the_loss_of_the_same_rows():
    programs, state, batch = started(silent=True, label_smoothing=SMOOTHING)
    _, metrics = gradients(programs, state.params, batch)
    scored = tiny.nll(programs, state.params, ROWS)[0]
    np.testing.assert_allclose(scored.sum() / REAL.sum(), metrics["nll"], rtol=1e-6)
    assert not scored[~REAL].any()


def test_evaluation_knows_no_dropout_and_no_label_smoothing():
    params = started(label_smoothing=SMOOTHING)[1].params
    plain = tiny.nll(made(silent=True), params, ROWS)
    for settings in ({"label_smoothing": SMOOTHING}, {"label_smoothing": SMOOTHING, "silent": True}):
        np.testing.assert_array_equal(tiny.nll(made(**settings), params, ROWS), plain)


def test_gradients_are_slopes_of_the_loss_that_is_reported():
    # Central differences along random directions, dropout and smoothing on; in f32 they are good to about a percent.
    programs, state, batch = started(label_smoothing=SMOOTHING)
    found, _ = gradients(programs, state.params, batch)
    rng = np.random.default_rng(0)
    for name, parameter in state.params.items():
        gradient = np.asarray(found[name].array, np.float64)
        direction = gradient / np.linalg.norm(gradient) + 0.3 * rng.standard_normal(gradient.shape) / gradient.size**0.5
        step = 0.02 / np.linalg.norm(direction)
        losses = []
        for sign in (1, -1):
            moved = mtf.NamedTensor(
                parameter.array + jnp.float32(sign * step) * direction.astype(np.float32), parameter.shape
            )
            losses.append(float(gradients(programs, state.params | {name: moved}, batch)[1]["loss"]))
        slope = (losses[0] - losses[1]) / (2 * step)
        np.testing.assert_allclose(slope, (gradient * direction).sum(), rtol=0.02, err_msg=name)


def test_a_batch_of_nothing_but_padding_is_no_division_by_zero():
    programs, state, _ = started(label_smoothing=SMOOTHING)
    empty = tiny.feed(programs, {name: np.zeros_like(array) for name, array in ROWS.items()}, training=True)
    found, metrics = gradients(programs, state.params, empty)
    assert metrics["loss"] == metrics["nll"] == metrics["tokens"] == 0
    assert all(not np.asarray(g.array).any() for g in found.values())


def test_dropout_follows_from_seed_and_step_and_from_nothing_else():
    programs, state, batch = started(label_smoothing=SMOOTHING)
    losses = {key: float(gradients(programs, state.params, batch, *key)[1]["loss"]) for key in ((0, 7), (1, 7), (0, 8))}
    assert len(set(losses.values())) == 3
    assert losses[1, 7] == float(gradients(programs, state.params, batch, 1, 7)[1]["loss"])


@functools.cache
def four_updates():
    programs, state, batch = started(label_smoothing=SMOOTHING)
    update, state = programs.compiled_update(), jax.tree.map(jnp.copy, state)
    states, seen = [state], []
    for _ in range(4):
        state, metrics = update(state, batch)
        states.append(state)
        seen.append(tiny.numpy(metrics))
    return states, seen


def test_step_optimizer_and_schedule_count_the_same_updates():
    states, seen = four_updates()
    rates = [float(metrics["learning_rate"]) for metrics in seen]
    assert rates == [float(schedule()(t)) for t in range(4)] and rates[0] == 0 < rates[1] < rates[2]
    assert int(states[-1].step) == optimizers.updates_done(states[-1].opt_state) == 4


def test_first_update_has_the_rate_of_step_zero_and_the_next_ones_descend():
    _, seen = four_updates()
    losses = [float(metrics["loss"]) for metrics in seen]
    assert losses[3] < losses[1]


def test_state_given_to_an_update_is_used_up_and_no_leaf_is_shared():
    states, _ = four_updates()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states[0]) if leaf.size > 1)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(states[-1]))
    assert optimizers.aliased(states[-1]) == [] == optimizers.aliased(started(label_smoothing=SMOOTHING)[1])


def test_gradient_norm_is_that_of_all_parameters_together():
    _, seen = four_updates()
    programs, state, batch = started(label_smoothing=SMOOTHING)
    found, _ = gradients(programs, state.params, batch)
    squares = sum((np.asarray(g.array, np.float64) ** 2).sum() for g in found.values())
    np.testing.assert_allclose(seen[0]["grad_norm"], squares**0.5, rtol=1e-5)


@pytest.mark.parametrize(("mesh", "layout", "microbatches"), [("all:1", "", 4), ("rows:2;cols:4", "batch:rows", 2)])
def test_row_g_is_row_g_mod_n_of_microbatch_g_div_n_and_split_within_it(mesh, layout, microbatches):
    shape = mtf.Shape(
        [
            mtf.Dimension("microbatches", microbatches),
            mtf.Dimension("batch", 8 // microbatches),
            mtf.Dimension("length", 2),
        ]
    )
    features, asked = ("inputs", "targets"), []

    def rows(numbers):
        asked.extend(numbers.tolist())
        return {name: np.stack([10 * numbers, 10 * numbers + 1], axis=1) for name in features}

    batch = device_batch(rows, dict.fromkeys(features, shape), lambda s: mtf.sharding(s, layout, tiny.mesh(mesh)))
    for tensor in batch.values():
        assert tensor.shape == shape and tensor.dtype == np.int32
        for m, i in np.ndindex(microbatches, 8 // microbatches):
            np.testing.assert_array_equal(tensor.array[m, i], [10 * (m * 8 // microbatches + i)] * 2 + np.arange(2))
        # Over rows, each processor has its part of every microbatch.
        local = tensor.array.addressable_shards[-1].data
        assert local.shape == (microbatches, 8 // microbatches // (2 if layout else 1), 2)
        np.testing.assert_array_equal(np.asarray(local)[-1, -1], [70, 71])
    assert sorted(asked) == list(range(8)), "a row was made twice or not at all"


def test_microbatches_smaller_than_the_processors_are_refused_before_anything_is_compiled():
    with pytest.raises(mtf.LayoutError, match=r"batch.*4.*rows.*8|batch.*rows"):
        tiny.programs("rows:8", "batch:rows", microbatches=2)
