"""Samples have the model's distribution, restricted as asked, and do not depend on batch or layout."""

import functools

import jax
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.data.tokenizer import EOS
from mtf_experiments.evaluation.hypotheses import NOTHING, Constraints
from mtf_experiments.evaluation.sampling import Sampling, restrict, sample
from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from tests.evaluation.test_beam_search import STEPS, VOCAB, VOCAB_DIM, TableDecoder, log_prob, random_table

TABLE = random_table(seed=4)
HISTORY = Dimension("history", VOCAB**STEPS)


@functools.cache
def compiled(sampling, samples, vocab_size, min_length, layout, mesh):
    def run(table, limits, key, first):
        random = mtf.Random(key).window("batch", first, 1 << 20)
        return sample(TableDecoder(table, samples), Constraints(limits, vocab_size, min_length), sampling, random)

    return jax.jit(run) if layout is None else mtf.spmd(run, mtf.make_mesh(mesh, jax.devices()[:4]), layout)


def draw(sampling, table=TABLE, samples=1, seed=0, first=0, limit=STEPS, min_length=1, layout=None, mesh=None):
    shape = Shape([Dimension("batch", len(table)), HISTORY, VOCAB_DIM])
    limits = NamedTensor(np.full(len(table), limit, np.int32), shape[:1])
    run = compiled(sampling, samples, VOCAB, min_length, layout, mesh)
    found = run(NamedTensor(table, shape), limits, jax.random.key(seed), np.int32(first))
    return type(found)(*(np.asarray(x.array) for x in found))


def test_greedy_takes_the_most_probable_token_until_the_end():
    found = draw(Sampling(temperature=0.0))
    for model, row in enumerate(found.tokens[:, 0]):
        history, last, expected = 0, 0, []
        while len(expected) < STEPS and last != EOS:
            history = history * VOCAB + last
            last = int(np.argmax(np.where(np.arange(VOCAB) == 0, -np.inf, TABLE[model, history])))
            expected.append(last)
        assert row.tolist() == expected + [0] * (STEPS - len(expected))
        assert found.lengths[model, 0] == len(expected) and found.finished[model, 0] == (last == EOS)
        np.testing.assert_allclose(found.log_probs[model, 0], log_prob(TABLE, model, expected), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.3, 0.2]),
        (Sampling(temperature=0.5), np.square([0.5, 0.3, 0.2]) / 0.38),
        (Sampling(top_k=2), [0.625, 0.375, 0.0]),
        (Sampling(top_p=0.5), [1.0, 0.0, 0.0]),
        (Sampling(top_p=0.6), [0.625, 0.375, 0.0]),
        (Sampling(top_p=0.9), [0.5, 0.3, 0.2]),
    ],
)
def test_frequencies_are_those_of_the_restricted_distribution(sampling, expected):
    """Of the first token of 200 sentences of 64 samples: 12,800 draws have a standard error below 0.0045."""
    table = np.full((200, HISTORY.size, VOCAB), -30.0, np.float32)
    table[:, 0, 1:] = np.log([0.5, 0.3, 0.2])
    found = draw(sampling, table, samples=64, limit=1)
    counts = np.bincount(found.tokens[..., 0].ravel(), minlength=VOCAB)
    np.testing.assert_allclose(counts[1:] / counts.sum(), expected, atol=0.02)
    assert counts[0] == 0


def test_samples_are_as_probable_as_the_model_says_and_best_first():
    found = draw(Sampling(temperature=2.0), samples=4)
    for model in range(0, 200, 10):
        for h in range(4):
            tokens = found.tokens[model, h, : found.lengths[model, h]].tolist()
            np.testing.assert_allclose(found.log_probs[model, h], log_prob(TABLE, model, tokens), rtol=1e-5, atol=2e-6)
    assert (np.diff(found.log_probs, axis=1) <= 0).all()
    assert len({tuple(t) for t in found.tokens[:, 0].tolist()}) > 10


def test_seed_decides_and_batches_do_not():
    whole = draw(Sampling())
    np.testing.assert_array_equal(draw(Sampling()).tokens, whole.tokens)
    assert (draw(Sampling(), seed=1).tokens != whole.tokens).any()
    for first in (0, 100):
        part = draw(Sampling(), TABLE[first : first + 100], first=first)
        np.testing.assert_array_equal(part.tokens, whole.tokens[first : first + 100])


@pytest.mark.parametrize(
    ("mesh", "layout"), [("rows:4", "batch:rows"), ("cols:4", "vocab:cols"), ("rows:2;cols:2", "batch:rows;vocab:cols")]
)
def test_every_layout_draws_the_same(mesh, layout):
    sampling = Sampling(temperature=1.5, top_k=3, top_p=0.9)
    whole, split = draw(sampling, samples=2), draw(sampling, samples=2, mesh=mesh, layout=layout)
    np.testing.assert_array_equal(split.tokens, whole.tokens)


def test_no_end_before_the_least_length():
    found = draw(Sampling(), min_length=4)
    assert found.lengths.min() == 4


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_has_it(top_p):
    """Against sorting; two of the probabilities are equal, and go together."""
    probabilities = np.random.default_rng(0).dirichlet(np.ones(16), size=50).astype(np.float32)
    probabilities[:, 3] = probabilities[:, 7]
    logits = NamedTensor(np.log(probabilities), [Dimension("batch", 50), Dimension("vocab", 16)])
    kept = np.asarray(restrict(logits, Sampling(top_p=top_p)).array) > NOTHING / 2
    for row, chosen in zip(probabilities / probabilities.sum(1, keepdims=True), kept, strict=True):
        assert row[chosen].sum() >= top_p - 1e-6
        smallest = row[chosen].min()
        assert row[row > smallest].sum() < top_p + 1e-6 and chosen[row >= smallest].all()
