"""Sampling with temperature, top-k and top-p, in the language; temperature 0 is greedy decoding.

The vocabulary may be split: the drawn token is the argmax of logits + Gumbel noise, whose bits depend on the position in
the whole tensor only, and top-p finds its threshold by bisection on sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from mtf_experiments import mtf
from mtf_experiments.data.tokenizer import EOS
from mtf_experiments.evaluation.hypotheses import NOTHING, Constraints, Hypotheses, write
from mtf_experiments.models.incremental import Decoder
from mtf_experiments.mtf import Dimension, NamedTensor, Random


@dataclass(frozen=True)
class Sampling:
    """`temperature` divides the logits (0: always the most probable token). Of the tokens only the `top_k` most probable
    are kept (0: all), and of them the smallest set of most probable ones whose probabilities sum to `top_p`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class _State(NamedTuple):
    position: NamedTensor
    cache: Any
    tokens: NamedTensor
    last: NamedTensor
    log_probs: NamedTensor
    lengths: NamedTensor
    finished: NamedTensor


def sample(decoder: Decoder, constraints: Constraints, sampling: Sampling, random: Random) -> Hypotheses:
    """`decoder.beam` samples of each sentence, in the order of their log-probability (of the model, temperature 1).

    `random` draws for `[batch, beam, vocab]`; `Random.window("batch", ...)` makes a sentence's samples independent of the
    batch it is in.
    """
    batch, beam, steps = decoder.batch, decoder.beam, decoder.steps
    limits = constraints.max_lengths

    def active(s: _State) -> NamedTensor:
        return mtf.logical_not(s.finished) & mtf.less(s.position, limits, output_shape=s.finished.shape)

    def step(s: _State) -> _State:
        logits, cache = decoder.step(s.cache, s.last, s.position)
        log_probs = mtf.log_softmax(logits, "vocab")
        allowed = constraints.possible(log_probs, s.position)
        if sampling.temperature > 0:
            noise = random.fold(s.position.array).uniform([batch, beam, decoder.vocab])
            gumbel = -mtf.log(-mtf.log(mtf.maximum(noise, jnp.finfo(jnp.float32).tiny)))
            allowed = restrict(allowed / sampling.temperature, sampling) + gumbel
        here = active(s)
        token = mtf.where(here, mtf.argmax(allowed, "vocab"), 0)
        gained = mtf.gather(log_probs, token, "vocab")
        return _State(
            position=s.position + 1,
            cache=cache,
            tokens=mtf.where(here, write(s.tokens, token, s.position), s.tokens, output_shape=s.tokens.shape),
            last=token,
            log_probs=s.log_probs + mtf.where(here, gained, 0.0),
            lengths=s.lengths + here.astype(jnp.int32),
            finished=s.finished | mtf.equal(token, EOS),
        )

    zeros = mtf.zeros([batch, beam], jnp.int32)
    start = _State(
        position=mtf.zeros([], jnp.int32),
        cache=decoder.start(),
        tokens=mtf.zeros([batch, beam, steps], jnp.int32),
        last=zeros,
        log_probs=mtf.zeros([batch, beam]),
        lengths=zeros,
        finished=mtf.full([batch, beam], False, jnp.bool_),
    )
    end = mtf.while_loop(lambda s: mtf.reduce_any(active(s)), step, start)
    order = mtf.top_k(end.log_probs, "beam", Dimension("n_best", beam.size))[1]

    def sorted_(x: NamedTensor) -> NamedTensor:
        return mtf.gather(x, order, "beam")

    log_probs = sorted_(end.log_probs)
    return Hypotheses(sorted_(end.tokens), sorted_(end.lengths), sorted_(end.finished), log_probs, log_probs)


def restrict(logits: NamedTensor, sampling: Sampling) -> NamedTensor:
    """`logits` `[..., vocab]`, NOTHING for tokens that top-k and then top-p leave out. Equals stay or go together."""
    vocab = logits.shape.find("vocab")
    if 0 < sampling.top_k < vocab.size:
        kept = mtf.top_k(logits, vocab, Dimension("kept", sampling.top_k))[0]
        logits = mtf.where(mtf.less(logits, mtf.index(kept, "kept", sampling.top_k - 1)), NOTHING, logits)
    if sampling.top_p < 1.0:
        probabilities = mtf.softmax(logits, vocab)
        logits = mtf.where(mtf.less(probabilities, _threshold(probabilities, sampling.top_p)), NOTHING, logits)
    return logits


def _threshold(probabilities: NamedTensor, top_p: float) -> NamedTensor:
    """The largest value such that the probabilities along `vocab` not below it sum to at least `top_p`.

    By bisection on the bits, which order non-negative floats: 31 sums find it exactly, and no sorting of a split dimension
    is needed.
    """
    low = mtf.reduce_max(probabilities, "vocab") * 0.0
    bits = mtf.NamedTensor(lax.bitcast_convert_type(low.array, jnp.int32), low.shape)

    def value(bits: NamedTensor) -> NamedTensor:
        return mtf.NamedTensor(lax.bitcast_convert_type(bits.array, jnp.float32), bits.shape)

    for bit in reversed(range(30)):  # bit 30 is only set in floats of 2 and more
        higher = bits + (1 << bit)
        kept = mtf.where(mtf.greater_equal(probabilities, value(higher)), probabilities, 0.0)
        bits = mtf.where(mtf.greater_equal(mtf.reduce_sum(kept, "vocab"), top_p), higher, bits)
    return value(bits)
