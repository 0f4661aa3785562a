"""The stack of layers: what is recomputed or unrolled changes nothing, and every dropout has noise of its own."""

import functools

import jax
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.attention import causal_bias
from mtf_experiments.models.transformer import Transformer, Widths
from tests.mtf.helpers import dims, tensor

ROWS = dims("batch:2 length:4")
X = tensor([*ROWS, mtf.Dimension("d_model", 8)])
SEGMENTS = mtf.NamedTensor(np.array([[1, 1, 2, 2], [1, 1, 1, 0]], np.int32), ROWS)


def widths(dropout=0.3, layers=2, **changes):
    return Widths(
        d_model=8,
        d_ff=16,
        num_heads=2,
        d_kv=4,
        num_layers=layers,
        attention_dropout=dropout,
        relu_dropout=dropout,
        residual_dropout=dropout,
        **changes,
    )


def stack(config):
    return parameters.split(Transformer(config, mtf.Random(jax.random.key(0))))


def value_and_gradients(config):
    structure, params = stack(config)

    def loss(params, x):
        y = parameters.merge(structure, params)(x, causal_bias(SEGMENTS), mtf.Random(jax.random.key(2)))
        return mtf.reduce_sum(mtf.square(y) * X).array, y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, X)
    return y, gradients


@functools.cache
def plain():
    return value_and_gradients(widths(unroll=1))


@pytest.mark.parametrize(
    "changes", [{"unroll": 2}, {"unroll": 1, "remat": "full"}, {"unroll": 2, "remat": "communication"}]
)
def test_unrolling_and_recomputing_change_nothing_dropout_included(changes):
    for actual, expected in zip(
        jax.tree.leaves(value_and_gradients(widths(**changes))), jax.tree.leaves(plain()), strict=True
    ):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * scale)


def test_layers_start_with_different_weights():
    _, params = stack(widths())
    for name in ("attention/qkvo", "feed_forward/wi_wo"):
        first, second = np.asarray(params[name].array)
        assert not np.isclose(first, second).any(), name


def test_each_layer_and_each_place_drops_something_else(monkeypatch):
    noises = {}
    draw = mtf.Random.uniform

    def spied(self, shape, *bounds):
        values = draw(self, shape, *bounds)
        jax.debug.callback(lambda v: noises.setdefault(v.shape, []).append(np.array(v)), values.array)
        return values

    structure, params = stack(widths(layers=3, unroll=3))
    monkeypatch.setattr(mtf.Random, "uniform", spied)
    model = parameters.merge(structure, params)
    jax.jit(lambda x: model(x, causal_bias(SEGMENTS), mtf.Random(jax.random.key(2))).array)(X).block_until_ready()
    jax.effects_barrier()
    # In each of three layers [batch, memory_length, heads] and [batch, d_ff], and [batch, d_model] after attention and
    # after feed-forward; this once more at the end. Length is shared.
    assert {shape: len(drawn) for shape, drawn in noises.items()} == {(2, 8): 7, (2, 4, 2): 3, (2, 16): 3}
    for drawn in noises.values():
        assert len({d.tobytes() for d in drawn}) == len(drawn)
        assert all(not np.array_equal(*d) for d in drawn), "two rows were given the same noise"


def test_without_randomness_nothing_is_dropped():
    structure, params = stack(widths(dropout=0.9, unroll=1))
    kept = parameters.merge(structure, params)(X, causal_bias(SEGMENTS), None)
    undropped, _ = stack(widths(dropout=0.0, unroll=1))
    never = parameters.merge(undropped, params)(X, causal_bias(SEGMENTS), mtf.Random(jax.random.key(2)))
    np.testing.assert_array_equal(kept.array, never.array)


def test_final_norm_and_each_sublayer_use_their_own_scale():
    structure, params = stack(widths(dropout=0.0, unroll=1))

    @jax.jit
    def out(scales):
        changed = params | {"norm_scales": mtf.NamedTensor(scales, params["norm_scales"].shape)}
        return parameters.merge(structure, changed)(X, causal_bias(SEGMENTS), None).array

    scales = np.ones(params["norm_scales"].shape.sizes, np.float32)
    before, outputs = out(scales), []
    for i in range(len(scales)):
        changed = scales.copy()
        changed[i] = 2.0
        outputs.append(np.asarray(out(changed)))
    # The last scale doubles the output, the others reach it through a sublayer each.
    np.testing.assert_allclose(outputs[-1], 2 * before, rtol=1e-6)
    for a, b in np.ndindex(len(outputs), len(outputs)):
        assert a == b or np.abs(outputs[a] - outputs[b]).max() > 1e-3, (a, b)
