"""Beam search against brute force over all sequences, on random models that are tables of next-token logits."""

import functools
import itertools

import jax
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.data.tokenizer import EOS
from mtf_experiments.evaluation.beam_search import beam_search, length_penalty
from mtf_experiments.evaluation.hypotheses import NOTHING, Constraints
from mtf_experiments.mtf import Dimension, NamedTensor, Shape

MODELS, STEPS, VOCAB = 200, 5, 4  # ids: 0 padding, 1 EOS, 2 and 3 words
WORDS = (2, 3)
BATCH, STEPS_DIM, VOCAB_DIM = Dimension("batch", MODELS), Dimension("steps", STEPS), Dimension("vocab", VOCAB)
HISTORY = Dimension("history", VOCAB**STEPS)


class TableDecoder:
    """The next token's logits are a random function of all tokens before it."""

    def __init__(self, table, beam):
        self.table, self.beam = table, Dimension("beam", beam)
        self.batch, self.steps, self.vocab = table.shape.find("batch"), STEPS_DIM, VOCAB_DIM

    def start(self):
        return mtf.zeros([self.batch, self.beam], np.int32)

    def follow(self, cache, parents):
        return mtf.gather(mtf.rename(cache, beam="parent"), parents, "parent")

    def step(self, cache, tokens, position):
        history = cache * VOCAB + tokens
        return mtf.gather(self.table, history, "history"), history


def random_table(seed=0, eos=0.0):
    logits = 2 * np.random.default_rng(seed).standard_normal((MODELS, HISTORY.size, VOCAB))
    logits[..., EOS] += eos
    return logits.astype(np.float32)


TABLE = random_table()
ROUNDING = 2e-6  # of logsumexp of logits up to about 8 in f32
LIMITS = np.random.default_rng(1).integers(1, STEPS + 1, MODELS).astype(np.int32)


@functools.cache
def compiled(beam, alpha, n_best, min_length=1, layout=None, mesh=None):
    def search(table, limits):
        constraints = Constraints(limits, VOCAB, min_length)
        return beam_search(TableDecoder(table, beam), constraints, alpha, n_best)

    return jax.jit(search) if layout is None else mtf.spmd(search, mtf.make_mesh(mesh, jax.devices()[:4]), layout)


def search(beam, alpha, n_best=1, min_length=1, table=TABLE, limits=LIMITS, **on):
    shape = Shape([Dimension("batch", len(table)), HISTORY, VOCAB_DIM])
    arguments = NamedTensor(table, shape), NamedTensor(limits, shape[:1])
    found = compiled(beam, alpha, n_best, min_length, **on)(*arguments)
    return type(found)(*(np.asarray(x.array) for x in found))


def log_prob(table, model, tokens):
    total, history, last = 0.0, 0, 0
    for token in tokens:
        history = history * VOCAB + last
        logits = table[model, history].astype(np.float64)
        total += logits[token] - np.log(np.exp(logits).sum())
        last = token
    return total


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def finished_sequences(limit, min_length=1):
    for length in range(min_length, limit + 1):
        for words in itertools.product(WORDS, repeat=length - 1):
            yield (*words, EOS)


def test_length_penalty_counts_eos_and_is_a_table():
    lengths = NamedTensor(np.array([1, 7, 13]), [Dimension("n", 3)])
    np.testing.assert_allclose(length_penalty(lengths, 1.0).array, [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(length_penalty(lengths, 0.6).array, [1, 2**0.6, 3**0.6], rtol=1e-6)
    np.testing.assert_array_equal(length_penalty(lengths, 0.0).array, [1, 1, 1])


@pytest.mark.parametrize("min_length", [1, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
def test_a_beam_that_holds_everything_finds_the_best_of_all_sequences(alpha, min_length):
    """2^5 hypotheses hold all sequences of two words; 200 random models, each with a greatest length of its own."""
    found = search(2**STEPS, alpha, min_length=min_length)
    for model, limit in enumerate(LIMITS):
        if limit < min_length:  # nothing can finish: the most probable sequence, cut
            assert not found.finished[model, 0] and found.lengths[model, 0] == limit
            everything = itertools.product(WORDS, repeat=limit)
        else:
            everything = finished_sequences(limit, min_length)
        scores = {s: log_prob(TABLE, model, s) / penalty(len(s), alpha) for s in everything}
        best = max(scores, key=scores.__getitem__)
        length = found.lengths[model, 0]
        assert tuple(found.tokens[model, 0, :length]) == best
        np.testing.assert_allclose(found.scores[model, 0], scores[best], rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_every_returned_hypothesis_is_scored_with_its_own_length_and_ends_once(beam, alpha):
    found = search(beam, alpha, n_best=beam)
    for model, limit in enumerate(LIMITS):
        seen = set()
        for h in range(beam):
            if found.scores[model, h] < NOTHING / 2:
                continue
            length, row = found.lengths[model, h], found.tokens[model, h]
            tokens = tuple(row[:length])
            assert 1 <= length <= limit and not row[length:].any()
            assert (tokens[-1] == EOS) == found.finished[model, h] and EOS not in tokens[:-1] and 0 not in tokens
            assert found.finished[model, h] or length == limit
            expected = log_prob(TABLE, model, tokens)
            np.testing.assert_allclose(found.log_probs[model, h], expected, rtol=1e-5, atol=ROUNDING)
            np.testing.assert_allclose(
                found.scores[model, h], expected / penalty(length, alpha), rtol=1e-5, atol=ROUNDING
            )
            seen.add(tokens)
        assert len(seen) == (found.scores[model] > NOTHING / 2).sum() > 0
        finished = found.finished[model]
        assert (np.diff(finished.astype(int)) <= 0).all(), "an unfinished hypothesis before a finished one"
        ranked = found.scores[model][finished]
        assert (np.diff(ranked) <= 1e-6).all()


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
def test_the_best_does_not_depend_on_how_many_are_asked_for(alpha):
    one, three = search(4, alpha), search(4, alpha, n_best=3)
    for name in ("tokens", "lengths", "finished", "scores"):
        np.testing.assert_array_equal(getattr(one, name)[:, 0], getattr(three, name)[:, 0])


def test_a_longer_hypothesis_that_is_better_normalised_is_waited_for():
    """The end is likely at once, then impossible until four words later: probability 0.4 against 0.6 * 0.9^4."""
    table = np.full((1, HISTORY.size, VOCAB), -30.0, np.float32)
    history, last = 0, 0
    for position, (token, probability) in enumerate([(2, 0.6), (2, 0.9), (2, 0.9), (2, 0.9), (EOS, 0.9)]):
        history = history * VOCAB + last
        table[0, history, token] = np.log(probability)
        table[0, history, EOS if position == 0 else 3] = np.log(1 - probability)
        last = token
    limits = np.array([STEPS], np.int32)
    late, early = 0.6 * 0.9**4, 0.4
    assert np.log(late) / penalty(5, 1.0) > np.log(early)
    assert np.log(late) < np.log(early)
    for alpha, length in [(0.0, 1), (1.0, 5)]:
        found = search(2, alpha, table=table, limits=limits)
        assert found.lengths[0, 0] == length and found.finished[0, 0]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_sentence_of_exactly_the_greatest_length_is_complete_and_a_longer_one_cut_and_flagged(limit):
    table = np.full((2, HISTORY.size, VOCAB), -30.0, np.float32)
    history, last = 0, 0
    for position in range(limit):
        history = history * VOCAB + last
        end = position == limit - 1
        table[0, history, EOS if end else 2] = 0.0  # model 0 ends exactly at the limit, model 1 never does
        table[1, history, 2:] = 0.0, -5.0  # the two continuations that a beam of 1 looks at
        last = 2
    found = search(1, 0.6, table=table, limits=np.full(2, limit, np.int32))
    assert found.finished[:, 0].tolist() == [True, False]
    assert found.lengths[:, 0].tolist() == [limit, limit]
    assert found.tokens[0, 0].tolist() == [2] * (limit - 1) + [EOS] + [0] * (STEPS - limit)
    assert found.tokens[1, 0].tolist() == [2] * limit + [0] * (STEPS - limit)


def test_rows_that_only_fill_a_batch_generate_nothing():
    limits = LIMITS.copy()
    limits[::2] = 0
    found, whole = search(4, 0.6, limits=limits), search(4, 0.6)
    assert not found.tokens[::2].any() and not found.lengths[::2].any()
    np.testing.assert_array_equal(found.tokens[1::2], whole.tokens[1::2])


def test_neither_order_nor_company_matter():
    order = np.random.default_rng(3).permutation(MODELS)
    mixed, whole = search(4, 0.6, table=TABLE[order], limits=LIMITS[order]), search(4, 0.6)
    np.testing.assert_array_equal(mixed.tokens, whole.tokens[order])
    few = search(4, 0.6, table=TABLE[:7], limits=LIMITS[:7])
    np.testing.assert_array_equal(few.tokens, whole.tokens[:7])
    np.testing.assert_allclose(few.scores, whole.scores[:7], rtol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "layout"), [("rows:4", "batch:rows"), ("cols:4", "vocab:cols"), ("rows:2;cols:2", "batch:rows;vocab:cols")]
)
def test_every_layout_finds_the_same(mesh, layout):
    split, whole = search(4, 0.6, n_best=2, mesh=mesh, layout=layout), search(4, 0.6, n_best=2)
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(split, name), getattr(whole, name))
    np.testing.assert_allclose(split.scores, whole.scores, rtol=1e-5)


def test_a_prescribed_beginning_is_kept():
    prefix = np.zeros((MODELS, STEPS), np.int32)
    prefix[::2, :2] = [3, 2]
    limits = np.full(MODELS, STEPS, np.int32)

    def constrained(table, limits, prefix):
        return beam_search(TableDecoder(table, 32), Constraints(limits, VOCAB, 1, prefix), 0.6)

    shape = Shape([BATCH, HISTORY, VOCAB_DIM])
    found = jax.jit(constrained)(
        NamedTensor(TABLE, shape), NamedTensor(limits, shape[:1]), NamedTensor(prefix, [BATCH, STEPS_DIM])
    )
    tokens, lengths = np.asarray(found.tokens.array)[:, 0], np.asarray(found.lengths.array)[:, 0]
    np.testing.assert_array_equal(tokens[::2, :2], np.broadcast_to([3, 2], (MODELS // 2, 2)))
    for model in range(0, 20, 2):
        scores = {
            s: log_prob(TABLE, model, s) / penalty(len(s), 0.6) for s in finished_sequences(STEPS) if s[:2] == (3, 2)
        }
        assert tuple(tokens[model, : lengths[model]]) == max(scores, key=scores.__getitem__)
    np.testing.assert_array_equal(tokens[1::2], search(32, 0.6, limits=limits).tokens[1::2, 0])
