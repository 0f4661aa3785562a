"""Decoding with remembered keys and values gives, token for token, what the whole forward pass gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.evaluation.beam_search import beam_search
from mtf_experiments.evaluation.hypotheses import NOTHING, Constraints
from mtf_experiments.models import parameters
from mtf_experiments.models.incremental import CachedDecoder, UncachedDecoder, encode
from mtf_experiments.models.loss import token_nll
from mtf_experiments.models.translation import TranslationModelConfig
from mtf_experiments.mtf import Dimension, NamedTensor
from tests.layouts import tiny

VOCAB, ROWS, WIDTH, STEPS = 12, 8, 6, 8
SIZES = tiny.MODEL | {"vocab_size": VOCAB, "num_layers": 2, "row_length": STEPS}
CONFIG = TranslationModelConfig(**SIZES)
LANGUAGE_MODEL = tiny.model(**SIZES)
BATCH, STEPS_DIM = Dimension("batch", ROWS), Dimension("steps", STEPS)


def made(config):
    _, params = parameters.split(config.build(mtf.Random(jax.random.key(5))))
    softmax = params["softmax"]  # sharper than at the start of training, so that hypotheses are far from equal
    return params | {"softmax": NamedTensor(softmax.array * 3, softmax.shape)}


def sources(seed=0):
    rng = np.random.default_rng(seed)
    ids = np.zeros((ROWS, WIDTH), np.int32)
    for row in range(ROWS):
        length = rng.integers(1, WIDTH + 1)
        ids[row, :length] = [*rng.integers(3, VOCAB, length - 1), 1]
    return NamedTensor(ids, [BATCH, Dimension("inputs_length", WIDTH)])


LIMITS = NamedTensor(np.array([STEPS, 3, STEPS, 1, 5, STEPS, 2, STEPS], np.int32), [BATCH])
# EOS is kept off until late, so that sequences are long enough to branch and to be reordered.
MIN_LENGTH = 6


@functools.cache
def search(kind, beam, translation=True, mesh=None, layout=None):
    config = CONFIG if translation else LANGUAGE_MODEL
    structure, _ = config.abstract_parameters()

    def program(params, sources, limits):
        model = parameters.merge(structure, params)
        memory = encode(model, sources) if translation else None
        decoder = kind(model, BATCH, Dimension("beam", beam), STEPS_DIM, memory)
        return beam_search(decoder, Constraints(limits, VOCAB, MIN_LENGTH), 0.6, beam)

    run = jax.jit(program) if mesh is None else mtf.spmd(program, tiny.mesh(mesh), layout)
    found = run(made(config), sources(), LIMITS)
    return type(found)(*(np.asarray(x.array) for x in found))


@pytest.mark.parametrize("translation", [True, False], ids=["translation", "language model"])
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_cached_is_uncached_token_for_token(beam, translation):
    cached, whole = search(CachedDecoder, beam, translation), search(UncachedDecoder, beam, translation)
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(cached, name), getattr(whole, name))
    np.testing.assert_allclose(cached.scores, whole.scores, rtol=1e-5, atol=1e-5)
    assert cached.lengths.max() >= MIN_LENGTH


def test_beams_do_change_places():
    """Otherwise the test above would not see a cache that stays behind: the best hypotheses share no first tokens' beam."""
    tokens = search(CachedDecoder, 4).tokens
    assert any(len({tuple(h[:3]) for h in row}) > 1 for row in tokens)
    assert any(len({tuple(h[:1]) for h in row}) < 4 for row in tokens)


def test_every_score_is_that_of_the_text_when_it_is_forced():
    found = search(CachedDecoder, 4)
    structure, _ = CONFIG.abstract_parameters()
    params, ids = made(CONFIG), sources()
    segments = mtf.not_equal(ids, 0).astype(jnp.int32)

    @jax.jit
    def forced(targets):
        length = Dimension("length", STEPS)
        targets = NamedTensor(targets, [BATCH, length])
        real = mtf.not_equal(targets, 0).astype(jnp.int32)
        batch = {
            "sources": ids,
            "source_segments": segments,
            "source_positions": segments * mtf.arange(ids.shape[1]),
            "inputs": mtf.shift(targets, 1, length) * real,
            "targets": targets,
            "segments": real,
            "positions": real * mtf.arange(length),
        }
        return mtf.reduce_sum(token_nll(parameters.merge(structure, params)(batch), targets), length).array

    compared = 0
    for h in range(4):
        exists = found.scores[:, h] > NOTHING / 2
        np.testing.assert_allclose(
            found.log_probs[exists, h], -forced(found.tokens[:, h])[exists], rtol=1e-4, atol=1e-4
        )
        compared += exists.sum()
    assert compared >= 3 * ROWS


MODEL = "vocab:cols;d_ff:cols;heads:cols"


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("rows:8", "batch:rows"),
        ("cols:4", MODEL),
        ("rows:2;cols:4", f"batch:rows;{MODEL}"),
        ("rows:2;cols:2;planes:2", f"batch:rows;{MODEL};d_model:planes"),
        ("rows:2;cols:2;planes:2", f"batch:rows;{MODEL};inputs_length:planes"),
    ],
)
def test_every_layout_decodes_the_same(mesh, layout):
    split, alone = search(CachedDecoder, 4, True, mesh, layout), search(CachedDecoder, 4)
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(split, name), getattr(alone, name))
    np.testing.assert_allclose(split.scores, alone.scores, rtol=1e-5, atol=1e-5)
