"""Attention and its mask against brute force."""

import functools

import jax
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.attention import MASKED, Attention, causal_bias
from tests.mtf.helpers import close, dims, integers, run, tensor

SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 4, 4, 4, 0]], np.int32)
D_MODEL, HEADS, D_KV, *ROWS = dims("d_model:16 heads:4 d_kv:8 batch:3 length:8")


def test_mask_keeps_to_the_segment_and_the_past():
    bias = causal_bias(mtf.NamedTensor(SEGMENTS, ROWS))
    assert bias.shape == mtf.Shape([*ROWS, mtf.Dimension("memory_length", 8)])
    for row, i, j in np.ndindex(bias.shape.sizes):
        allowed = j <= i and SEGMENTS[row, i] == SEGMENTS[row, j]
        assert bias.array[row, i, j] == (0.0 if allowed else MASKED)


def test_masked_positions_get_a_weight_of_exactly_nothing():
    # Exactly 0, or a neighbour in the row would leak in by a bit; and all of it may be finite, however large the logits.
    logits = np.array([1e4, -1e4, 0.0], np.float32)
    weights = mtf.softmax(
        mtf.NamedTensor(logits + np.array([MASKED, 0, 0], np.float32), dims("memory_length:3")), "memory_length"
    )
    np.testing.assert_array_equal(weights.array, [0.0, 0.0, 1.0])


@pytest.fixture(scope="module")
def attention():
    """Structure and parameters of a lone attention layer."""
    random = mtf.Random(jax.random.key(0))
    return parameters.split(Attention(D_MODEL, HEADS, D_KV, 0.5, random))


def apply(structure, params, x, segments, key=None):
    random = None if key is None else mtf.Random(key)
    return parameters.merge(structure, params)(x, causal_bias(segments), random)


def brute_force(qkvo, x, keep=None):
    """Attention of one position after the other. `keep`: what multiplies the weights, `[batch, heads, memory_length]`."""
    wq, wk, wv, wo = np.asarray(qkvo, np.float64)
    x = np.asarray(x, np.float64)
    q, k, v = (np.einsum("bld,hdk->bhlk", x, w) for w in (wq, wk, wv))
    y = np.zeros(x.shape)
    for b, h, i in np.ndindex(*q.shape[:3]):
        seen = [j for j in range(i + 1) if SEGMENTS[b, j] == SEGMENTS[b, i]]
        weights = np.exp(k[b, h, seen] @ q[b, h, i])
        weights /= weights.sum()
        if keep is not None:
            weights = weights * keep[b, h, seen]
        y[b, i] += wo[h] @ (weights @ v[b, h, seen])
    return y


LAYOUTS = [
    ("all:1", ""),
    ("cols:4", "heads:cols"),
    ("rows:2;cols:2", "length:rows;d_model:cols"),
    ("cols:8", "d_kv:cols"),
]


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_attention_is_a_softmax_without_a_scale_at_run_time(attention, mesh, layout):
    structure, params = attention
    x = tensor([*ROWS, D_MODEL])
    program = functools.partial(apply, structure)
    y = run(program, mesh, layout, params, x, mtf.NamedTensor(SEGMENTS, ROWS))
    close(y, brute_force(params["qkvo"].array, x.array), 1e-5)


def test_dropout_falls_on_weights_and_is_one_for_all_queries(attention):
    structure, params = attention
    x, key = tensor([*ROWS, D_MODEL]), jax.random.key(5)
    y = jax.jit(functools.partial(apply, structure))(params, x, mtf.NamedTensor(SEGMENTS, ROWS), key)
    noise = mtf.Random(key).fold("attention").uniform([ROWS[0], mtf.Dimension("memory_length", 8), HEADS])
    keep = np.where(np.asarray(noise.array) < 0.5, 2.0, 0.0).swapaxes(1, 2)
    assert 0.3 < (keep > 0).mean() < 0.7
    close(y, brute_force(params["qkvo"].array, x.array, keep), 1e-5)


def test_bfloat16_rows_have_their_logits_and_softmax_in_float32(attention):
    structure, params = attention
    x = tensor([*ROWS, D_MODEL])
    segments = integers(ROWS, 2, low=1)
    traced = jax.make_jaxpr(functools.partial(apply, structure))(params, x.astype("bfloat16"), segments)
    exponentials = [str(e.outvars[0].aval.dtype) for e in _equations(traced.jaxpr) if e.primitive.name == "exp"]
    assert exponentials and set(exponentials) == {"float32"}
    assert traced.out_avals[0].dtype == "bfloat16"


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
