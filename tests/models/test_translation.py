"""The translation model against a reference in plain numpy, and what packing pairs into one row must not do."""

import functools

import jax
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.translation import TranslationModelConfig
from tests.layouts import tiny

CONFIG = TranslationModelConfig(**tiny.MODEL)
STRUCTURE, _ = CONFIG.abstract_parameters()
SOURCES, TARGETS = [[5, 6, 17, 1], [40, 41, 42, 43, 1]], [[7, 8, 1], [50, 51, 52, 1]]


def pairs(sources, targets, rows=1, length=tiny.LENGTH):
    """All pairs in one row, the others empty."""
    source, target = tiny.packed(sources, rows, length), tiny.packed(targets, rows, length)
    renamed = {"sources": "targets", "source_segments": "segments", "source_positions": "positions"}
    return {name: source[old] for name, old in renamed.items()} | target


@functools.cache
def params():
    """Parameters as initialised, but for norm scales: those are all 1 then, and would hide a missing or swapped one."""
    _, made = parameters.split(CONFIG.build(mtf.Random(jax.random.key(3))))
    rng = np.random.default_rng(0)
    for name in ("encoder/norm_scales", "decoder/norm_scales"):
        shape = made[name].shape
        made[name] = mtf.NamedTensor(1 + 0.3 * rng.standard_normal(shape.sizes).astype(np.float32), shape)
    return made


@functools.cache
def _model(rows, length):
    def run(params, arrays):
        dims = {name: mtf.Dimension(name, length) for name in ("inputs_length", "length")}
        batch = {
            name: mtf.NamedTensor(array, [mtf.Dimension("batch", rows), dims[CONFIG.FEATURES[name]]])
            for name, array in arrays.items()
        }
        return parameters.merge(STRUCTURE, params)(batch).array

    return jax.jit(run)


def logits(rows):
    return np.asarray(_model(*rows["targets"].shape)(params(), rows))


def reference(weights, rows):
    """The paper's model, written down again in float64 and for one position after the other. `[rows, length, vocab]`"""
    w = {name: np.asarray(p.array, np.float64) for name, p in weights.items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def attention(x, memory, qkvo, segments, memory_segments, causal):
        wq, wk, wv, wo = qkvo
        q = np.einsum("bld,hdk->bhlk", x, wq)
        k, v = (np.einsum("bld,hdk->bhlk", memory, m) for m in (wk, wv))
        attended = np.zeros_like(q)
        for b, h, i in np.ndindex(q.shape[:3]):
            seen = memory_segments[b] == segments[b, i]
            if causal:
                seen &= np.arange(len(seen)) <= i
            if seen.any():  # padding may have nothing to look at
                scores = np.exp(k[b, h, seen] @ q[b, h, i])
                attended[b, h, i] = scores @ v[b, h, seen] / scores.sum()
        return np.einsum("bhlk,hdk->bld", attended, wo)

    def stack(side, x, segments, causal, memory=None):
        scales = iter(w[f"{side}/norm_scales"])
        for layer in range(CONFIG.num_layers):
            y = norm(x, next(scales))
            x = x + attention(y, y, w[f"{side}/attention/qkvo"][layer], segments, segments, causal)
            if memory is not None:
                qkvo, y = w[f"{side}/encoder_attention/qkvo"][layer], norm(x, next(scales))
                x = x + attention(y, memory, qkvo, segments, rows["source_segments"], False)
            wi, wo = w[f"{side}/feed_forward/wi_wo"][layer]
            x = x + np.maximum(norm(x, next(scales)) @ wi, 0) @ wo.T
        return norm(x, next(scales))

    def embed(ids, positions):
        return w["embedding/tokens"][ids] + w["embedding/positions"][positions]

    memory = stack("encoder", embed(rows["sources"], rows["source_positions"]), rows["source_segments"], False)
    x = stack("decoder", embed(rows["inputs"], rows["positions"]), rows["segments"], True, memory)
    return x @ w["softmax"]


def test_logits_are_those_of_the_reference():
    rows = pairs(SOURCES, TARGETS, rows=2)
    real = rows["targets"] != 0
    expected = reference(params(), rows)[real]
    np.testing.assert_allclose(logits(rows)[real], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_pair_does_not_see_its_neighbour_in_the_row_by_a_single_bit(side):
    rows = pairs(SOURCES, TARGETS)
    changed = pairs([[99, 98, 97, 1], SOURCES[1]], TARGETS) if side == "source" else None
    changed = changed or pairs(SOURCES, [[99, 98, 1], TARGETS[1]])
    first, second = len(TARGETS[0]), len(TARGETS[0]) + len(TARGETS[1])
    before, after = logits(rows), logits(changed)
    np.testing.assert_array_equal(after[0, first:second], before[0, first:second])
    assert np.abs(after[0, :first] - before[0, :first]).max() > 1e-3


def test_packed_pairs_have_the_logits_of_pairs_alone():
    packed, first = logits(pairs(SOURCES, TARGETS)), len(TARGETS[0])
    for number, part in enumerate([slice(0, first), slice(first, first + len(TARGETS[1]))]):
        alone = logits(pairs(SOURCES[number : number + 1], TARGETS[number : number + 1]))
        np.testing.assert_allclose(packed[0, part], alone[0, : len(TARGETS[number])], rtol=1e-5, atol=1e-5)


def test_every_source_token_is_seen_and_no_later_target():
    rows = pairs(SOURCES[:1], TARGETS[:1])
    expected = logits(rows)
    for position in range(len(SOURCES[0])):
        changed = {name: array.copy() for name, array in rows.items()}
        changed["sources"][0, position] = 200
        assert np.abs(logits(changed)[0, 0] - expected[0, 0]).max() > 1e-4
    changed = {name: array.copy() for name, array in rows.items()}
    changed["inputs"][0, 2] = 200
    np.testing.assert_array_equal(logits(changed)[0, :2], expected[0, :2])


def test_padding_of_the_source_does_not_matter():
    short, long = pairs(SOURCES, TARGETS), pairs(SOURCES, TARGETS, length=2 * tiny.LENGTH)
    model = TranslationModelConfig(**tiny.MODEL | {"row_length": 2 * tiny.LENGTH})
    assert model.row_length >= long["positions"].max()
    real = short["targets"] != 0
    np.testing.assert_allclose(logits(long)[:, : tiny.LENGTH][real], logits(short)[real], rtol=1e-5, atol=1e-5)


# Table 3 of the paper, in billions, by the recipe to three digits (it prints 0.15 for the first row).
TABLE_3 = {
    (2048, 4, 128): 0.155,
    (4096, 8, 128): 0.244,
    (8192, 16, 128): 0.420,
    (16384, 32, 128): 0.772,
    (32768, 64, 128): 1.477,
    (65536, 128, 128): 2.886,
}


VASWANI = (4096, 16, 64)


@pytest.mark.parametrize(("d_ff", "heads", "d_kv"), [*TABLE_3, VASWANI])
def test_parameters_are_those_of_table_3(d_ff, heads, d_kv):
    shared = (d_ff, heads, d_kv) == VASWANI  # one matrix for embeddings and softmax
    sizes = dict(d_model=1024, d_ff=d_ff, num_heads=heads, d_kv=d_kv, num_layers=6)
    _, shapes = TranslationModelConfig(
        vocab_size=32768, row_length=256, shared_softmax=shared, **sizes
    ).abstract_parameters()
    count = parameters.count(shapes)
    # 4 attention matrices in an encoder layer and 8 in a decoder layer, a feed-forward in both; embedding and softmax.
    layers = 6 * 1024 * (12 * heads * d_kv + 4 * d_ff)
    assert count == layers + (1 if shared else 2) * 32768 * 1024 + 256 * 1024 + (13 + 19) * 1024
    if shared:
        assert round(count / 1e9, 2) == 0.21
    else:
        assert round(count / 1e9, 3) == TABLE_3[d_ff, heads, d_kv]


def test_a_shared_softmax_is_the_embedding_over_the_root_of_d_model():
    config = TranslationModelConfig(**tiny.MODEL | {"shared_softmax": True})
    structure, _ = config.abstract_parameters()
    shared = {name: p for name, p in params().items() if name != "softmax"}
    tokens = shared["embedding/tokens"]
    apart = params() | {
        "softmax": mtf.transpose(tokens * tokens.shape.find("d_model").size ** -0.5, ["d_model", "vocab"])
    }
    batch = {
        name: mtf.NamedTensor(array, [mtf.Dimension("batch", 1), mtf.Dimension(CONFIG.FEATURES[name], tiny.LENGTH)])
        for name, array in pairs(SOURCES, TARGETS).items()
    }
    one, two = parameters.merge(structure, shared)(batch), parameters.merge(STRUCTURE, apart)(batch)
    np.testing.assert_allclose(one.array, two.array, rtol=1e-5, atol=1e-5)


def test_model_flops_are_those_of_the_matrix_products_traced():
    """Of one forward and backward pass, without dropout; attention's own products over all positions, masked or not."""
    made = tiny.programs("all:1", "", config=CONFIG, inputs_length=tiny.LENGTH, abstract=True)
    ledger = mtf.trace_ledger(made.gradient_program, *made.abstract_gradient_arguments())
    lengths = {"inputs_length": tiny.LENGTH, "length": tiny.LENGTH}
    assert ledger.flops == CONFIG.flops_per_row(lengths) * tiny.ROWS
