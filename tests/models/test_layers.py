"""Norm, feed-forward and embedding against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.layers import Embedding, FeedForward, rms_norm
from tests.mtf.helpers import close, dims, integers, run, tensor

BATCH, LENGTH, D_MODEL, D_FF, VOCAB, POSITIONS = dims("batch:4 length:6 d_model:16 d_ff:32 vocab:64 positions:8")
X = tensor([BATCH, LENGTH, D_MODEL])
LAYOUTS = [("all:1", ""), ("rows:2;cols:2", "batch:rows;d_model:cols")]


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_rms_norm_divides_by_the_root_mean_square_over_d_model(mesh, layout):
    scale = tensor([D_MODEL], seed=1)
    x = np.asarray(X.array, np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale.array)
    close(run(rms_norm, mesh, layout, X, scale), expected, 1e-6)


def test_rms_norm_of_zeros_is_finite_and_so_is_its_gradient():
    zeros, ones = mtf.zeros([D_MODEL]), mtf.full([D_MODEL], 1.0)
    slope = jax.grad(lambda x: mtf.reduce_sum(rms_norm(x, ones)).array)(zeros)
    assert not np.asarray(rms_norm(zeros, ones).array).any()
    np.testing.assert_allclose(slope.array, 1000.0, rtol=1e-5)  # 1 / sqrt(epsilon)


def test_rms_norm_of_bfloat16_is_computed_in_float32_and_rounded_once():
    # Squares summed in bf16 stop growing: 256 + 1 is 256 there.
    wide = mtf.Dimension("d_model", 4096)
    x = tensor([wide]).astype(jnp.bfloat16)
    y = rms_norm(x, mtf.full([wide], 1.0))
    exact = np.asarray(x.array, np.float64)
    exact = exact / np.sqrt((exact**2).mean() + 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y.array, np.float64), exact, rtol=2**-8)


@pytest.mark.parametrize(("mesh", "layout"), [*LAYOUTS, ("cols:4", "d_ff:cols")])
@pytest.mark.parametrize("noisy", [False, True])
def test_feed_forward_is_two_products_around_relu_and_dropout(mesh, layout, noisy):
    structure, params = parameters.split(FeedForward(D_MODEL, D_FF, 0.5, mtf.Random(jax.random.key(0))))
    key = jax.random.key(9)

    def program(params, x):
        return parameters.merge(structure, params)(x, mtf.Random(key) if noisy else None)

    wi, wo = np.asarray(params["wi_wo"].array, np.float64)
    hidden = np.maximum(np.asarray(X.array, np.float64) @ wi, 0)
    if noisy:  # one noise for all positions of a row
        noise = mtf.Random(key).fold("relu").uniform([BATCH, D_FF])
        hidden = hidden * np.where(np.asarray(noise.array) < 0.5, 2.0, 0.0)[:, None, :]
    close(run(program, mesh, layout, params, X), hidden @ wo.T, 1e-5)


@pytest.mark.parametrize(("mesh", "layout"), [*LAYOUTS, ("cols:2;planes:2", "vocab:cols;positions:planes")])
def test_embedding_adds_the_rows_of_token_and_position_unscaled(mesh, layout):
    structure, params = parameters.split(Embedding(VOCAB, POSITIONS, D_MODEL, mtf.Random(jax.random.key(0))))
    ids, positions = integers([BATCH, LENGTH], 64), integers([BATCH, LENGTH], 8, seed=1)

    def program(params, ids, positions):
        return parameters.merge(structure, params)(ids, positions, jnp.float32)

    tokens, places = (np.asarray(params[name].array) for name in ("tokens", "positions"))
    expected = tokens[np.asarray(ids.array)] + places[np.asarray(positions.array)]
    np.testing.assert_array_equal(run(program, mesh, layout, params, ids, positions).array, expected)


def test_tokens_and_positions_are_drawn_apart():
    same = mtf.Dimension("positions", VOCAB.size)
    _, params = parameters.split(Embedding(VOCAB, same, D_MODEL, mtf.Random(jax.random.key(0))))
    assert not np.isclose(params["tokens"].array, params["positions"].array).any()
    assert functools.reduce(np.union1d, [np.asarray(p.array) for p in params.values()]).size > 2000
