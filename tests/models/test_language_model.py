"""The language model against a reference in plain numpy, what packing must not do, and how parameters start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.loss import scaled_token_nll, token_nll
from tests.layouts import tiny

MAX_LENGTH = 32
CONFIG = tiny.model(row_length=MAX_LENGTH)
STRUCTURE, _ = CONFIG.abstract_parameters()


@functools.cache
def params():
    """Parameters as initialised, but for norm scales: those are all 1 then, and would hide a missing or swapped one."""
    _, made = parameters.split(CONFIG.build(mtf.Random(jax.random.key(3))))
    scales = made["decoder/norm_scales"]
    varied = 1.0 + 0.3 * np.random.default_rng(0).standard_normal(scales.shape.sizes).astype(np.float32)
    return made | {"decoder/norm_scales": mtf.NamedTensor(jnp.asarray(varied), scales.shape)}


@functools.cache
def _model(rows, length):
    shape = mtf.Shape([mtf.Dimension("batch", rows), mtf.Dimension("length", length)])

    def run(params, arrays):
        batch = {name: mtf.NamedTensor(array, shape) for name, array in arrays.items()}
        logits = parameters.merge(STRUCTURE, params)(batch)
        return logits.array, token_nll(logits, batch["targets"]).array

    return jax.jit(run)


def logits_and_nll(rows):
    """Logits `[rows, length, vocab]` and NLL `[rows, length]` of packed rows, without dropout."""
    return [np.asarray(x) for x in _model(*rows["targets"].shape)(params(), rows)]


def reference(weights, rows):
    """The paper's model, written down again in float64 and for one position after the other. `[rows, length, vocab]`"""
    w = {name: np.asarray(p.array, np.float64) for name, p in weights.items()}
    qkvo, wi_wo = w["decoder/attention/qkvo"], w["decoder/feed_forward/wi_wo"]
    scales = iter(w["decoder/norm_scales"])

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    x = w["embedding/tokens"][rows["inputs"]] + w["embedding/positions"][rows["positions"]]
    for layer in range(len(qkvo)):
        wq, wk, wv, wo = qkvo[layer]
        normed = norm(x, next(scales))
        q, k, v = (np.einsum("bld,hdk->bhlk", normed, m) for m in (wq, wk, wv))
        attended = np.zeros_like(q)
        for b, heads, i in np.ndindex(q.shape[:3]):
            seen = [j for j in range(i + 1) if rows["segments"][b, j] == rows["segments"][b, i]]
            scores = np.exp(k[b, heads, seen] @ q[b, heads, i])
            attended[b, heads, i] = scores @ v[b, heads, seen] / scores.sum()
        x = x + np.einsum("bhlk,hdk->bld", attended, wo)
        wi, wo = wi_wo[layer]
        x = x + np.maximum(norm(x, next(scales)) @ wi, 0) @ wo.T
    return norm(x, next(scales)) @ w["softmax"]


def test_logits_and_likelihoods_are_those_of_the_reference():
    rows = tiny.ragged_rows()
    expected = reference(params(), rows)
    logits, nll = logits_and_nll(rows)
    real = rows["targets"] != 0
    np.testing.assert_allclose(logits[real], expected[real], rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    log_z = np.log(np.exp(expected).sum(-1))
    expected_nll = log_z - np.take_along_axis(expected, rows["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(nll[real], expected_nll[real], rtol=1e-5, atol=1e-5)
    assert not nll[~real].any(), "padding was scored"


A, B = [5, 6, 17, 9, 1], [40, 41, 1]


def test_packed_rows_restart_positions_and_shift_within_each_example():
    rows = tiny.packed([[5, 6, 1], [7, 8, 1]], length=8)
    np.testing.assert_array_equal(rows["inputs"], [[0, 5, 6, 0, 7, 8, 0, 0]])
    np.testing.assert_array_equal(rows["positions"], [[0, 1, 2, 0, 1, 2, 0, 0]])
    np.testing.assert_array_equal(rows["segments"], [[1, 1, 1, 2, 2, 2, 0, 0]])


def test_an_example_does_not_see_its_neighbours_in_the_row_by_a_single_bit():
    rows = tiny.packed([A, B, A, B])
    other = tiny.packed([[100, 101, 102, 103, 1], B, [7, 8, 9, 10, 1], B])
    for result, changed in zip(logits_and_nll(rows), logits_and_nll(other), strict=True):
        for start in (len(A), 2 * len(A) + len(B)):
            np.testing.assert_array_equal(result[0, start : start + len(B)], changed[0, start : start + len(B)])
        assert not np.array_equal(result[0, : len(A)], changed[0, : len(A)])


def test_packed_examples_are_as_likely_as_alone():
    packed = tiny.packed([A, B], rows=2)
    separate = {name: np.concatenate([tiny.packed([A])[name], tiny.packed([B])[name]]) for name in packed}
    _, alone = logits_and_nll(separate)
    _, together = logits_and_nll(packed)
    np.testing.assert_allclose(together[0, : len(A)], alone[0, : len(A)], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(together[0, len(A) : len(A) + len(B)], alone[1, : len(B)], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(together.sum(), alone.sum(), rtol=1e-6)


def test_a_copy_of_the_example_before_it_is_no_easier():
    _, nll = logits_and_nll(tiny.packed([A, A], rows=2))
    np.testing.assert_allclose(nll[0, len(A) : 2 * len(A)], nll[0, : len(A)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [10, MAX_LENGTH])
def test_length_of_the_row_and_its_padding_do_not_matter(length):
    expected, _ = logits_and_nll(tiny.packed([A, B], rows=2))
    padded, nll = logits_and_nll(tiny.packed([A, B], rows=2, length=length))
    used = len(A) + len(B)
    np.testing.assert_allclose(padded[0, :used], expected[0, :used], rtol=1e-5, atol=1e-5)
    assert not nll[0, used:].any() and not nll[1].any()


def test_whatever_stands_in_padding_is_ignored():
    rows = tiny.packed([A, B], rows=2)
    used = len(A) + len(B)
    dirty = {name: array.copy() for name, array in rows.items()}
    dirty["inputs"][0, used:], dirty["positions"][0, used:] = 99, 5
    for clean, changed in zip(logits_and_nll(rows), logits_and_nll(dirty), strict=True):
        np.testing.assert_array_equal(changed[0, :used], clean[0, :used])


def test_later_tokens_do_not_matter_and_earlier_ones_do():
    sentence = [*range(20, 35), 1]
    rows = tiny.packed([sentence], rows=2)
    expected, _ = logits_and_nll(rows)
    for position in (1, 7, 14):
        changed = {name: array.copy() for name, array in rows.items()}
        changed["inputs"][0, position] = 200
        logits, _ = logits_and_nll(changed)
        np.testing.assert_array_equal(logits[0, :position], expected[0, :position])
        assert (np.abs(logits[0, position:] - expected[0, position:]).max(-1) > 1e-4).all()


def test_logit_scales_multiply_logits_before_the_softmax():
    shape = mtf.Shape([mtf.Dimension("length", 5), mtf.Dimension("vocab", 7)])
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32) * 3
    targets = mtf.NamedTensor(np.array([3, 6, 1, 0, 0], np.int32), shape[:1])
    found = scaled_token_nll(mtf.NamedTensor(values, shape), targets, (1.0, 0.9, 2.0))
    assert found.shape[0] == mtf.Dimension("scales", 3)
    for scale, nll in zip((1.0, 0.9, 2.0), np.asarray(found.array), strict=True):
        logits = values.astype(np.float64) * scale
        expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(5), np.asarray(targets.array)]
        np.testing.assert_allclose(nll, np.where(np.arange(5) < 3, expected, 0), rtol=1e-5)


def test_bf16_activations_still_score_in_float32():
    # In bf16 a logit near 40 is a multiple of 1/4, and so would be its loss.
    config = tiny.model(activations="bfloat16", vocab_size=tiny.VOCAB)
    structure, made = parameters.split(config.build(mtf.Random(jax.random.key(3))))
    softmax = made["softmax"]
    made["softmax"] = mtf.NamedTensor(softmax.array * 12.0, softmax.shape)
    shape = mtf.Shape([mtf.Dimension("batch", tiny.ROWS), mtf.Dimension("length", tiny.LENGTH)])
    batch = {name: mtf.NamedTensor(jnp.asarray(array), shape) for name, array in tiny.ragged_rows().items()}

    @jax.jit
    def run(params, targets):
        logits = parameters.merge(structure, params)(batch)
        return logits.array, jax.value_and_grad(
            lambda a: mtf.reduce_sum(token_nll(mtf.NamedTensor(a, logits.shape), targets)).array
        )(logits.array)

    logits, (total, slope) = run(made, batch["targets"])
    assert logits.dtype == total.dtype == slope.dtype == jnp.float32
    assert np.abs(logits).max() > 40
    wide, targets = np.asarray(logits, np.float64), np.asarray(batch["targets"].array)[..., None]
    real = targets[..., 0] != 0
    top = wide.max(-1, keepdims=True)
    log_probs = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    np.testing.assert_allclose(total, -np.take_along_axis(log_probs, targets, -1)[real].sum(), rtol=1e-6)
    expected_slope = np.exp(log_probs)
    np.put_along_axis(expected_slope, targets, np.take_along_axis(expected_slope, targets, -1) - 1, -1)
    np.testing.assert_allclose(slope, expected_slope * real[..., None], rtol=0.01, atol=1e-6)
    assert (np.asarray(logits) != np.asarray(logits.astype(jnp.bfloat16), np.float32)).mean() > 0.9


def test_parameters_start_as_the_published_configurations_say():
    d_model, d_ff, heads, d_kv, vocab = 128, 512, 8, 32, 2048
    config = tiny.model(d_model=d_model, d_ff=d_ff, num_heads=heads, d_kv=d_kv, vocab_size=vocab, row_length=512)
    made = jax.jit(lambda key: parameters.split(config.build(mtf.Random(key)))[1])(jax.random.key(0))
    arrays = {name: np.asarray(p.array, np.float64) for name, p in made.items()}
    qkvo = arrays.pop("decoder/attention/qkvo").swapaxes(0, 1)
    wi_wo = arrays.pop("decoder/feed_forward/wi_wo").swapaxes(0, 1)
    assert (arrays.pop("decoder/norm_scales") == 1).all()
    arrays |= dict(zip("qkvo", qkvo, strict=True)) | dict(zip(("wi", "wo"), wi_wo, strict=True))
    expected = {
        "embedding/tokens": 1.0,
        "embedding/positions": 1.0,
        "softmax": d_model**-0.5,
        "q": d_model**-0.5 * d_kv**-0.25,
        "k": d_model**-0.5 * d_kv**-0.25,
        "v": d_model**-0.5,
        "o": (d_model * heads) ** -0.5,
        "wi": (d_ff * d_model) ** -0.25,
        "wo": (d_ff * d_model) ** -0.25,
    }
    assert set(arrays) == set(expected)
    for name, stddev in expected.items():
        values = arrays[name].ravel()
        # The standard error of a standard deviation of n normals is 1/sqrt(2 n) of it, here at most 0.3 %.
        assert values.size >= 2**16, name
        assert abs(values.std() / stddev - 1) < 0.012, name
        assert abs(values.mean()) < 0.02 * stddev, name
        # A uniform distribution has kurtosis 1.8, a normal one cut at two standard deviations 2.4.
        assert abs(((values / values.std()) ** 4).mean() - 3) < 0.15, name
    flat = [values.ravel()[:1000] / expected[name] for name, values in arrays.items()]
    correlations = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlations).max() < 0.2, "two parameters were drawn from one key"
