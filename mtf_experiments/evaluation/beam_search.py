"""Beam search with a length penalty (Wu et al. 2016), in the language: any layout, fixed shapes, one loop.

At each position every hypothesis that goes on is continued by every token; of the 2 * beam best continuations those
that end in EOS join the `beam` best finished hypotheses, and the `beam` best others go on. A sentence is done when none
that goes on can still beat what is finished, or at its greatest length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from mtf_experiments import mtf
from mtf_experiments.data.tokenizer import EOS
from mtf_experiments.evaluation.hypotheses import NOTHING, Constraints, Hypotheses, write
from mtf_experiments.models.incremental import Decoder
from mtf_experiments.mtf import Dimension, NamedTensor


def length_penalty(lengths: NamedTensor, alpha: float) -> NamedTensor:
    """((5 + length) / 6)^alpha, where the length counts EOS; scores are log-probabilities divided by it."""
    return ((lengths.astype(jnp.float32) + 5.0) / 6.0) ** alpha


class _State(NamedTuple):
    """`position` is a scalar, `active: [batch]`; of what goes on: `tokens: [batch, beam, steps]`, `last` and `log_probs`
    `[batch, beam]`; of what is finished the same, best score first, with `lengths`.
    """

    position: NamedTensor
    active: NamedTensor
    cache: Any
    tokens: NamedTensor
    last: NamedTensor
    log_probs: NamedTensor
    done_tokens: NamedTensor
    done_log_probs: NamedTensor
    done_scores: NamedTensor
    done_lengths: NamedTensor


def beam_search(decoder: Decoder, constraints: Constraints, alpha: float = 0.6, n_best: int = 1) -> Hypotheses:
    """The `n_best` (at most `decoder.beam`) hypotheses of the highest log p / `length_penalty` with alpha >= 0.

    A finished hypothesis comes before every unfinished one, which is cut at its greatest length and flagged.
    """
    batch, beam, steps = decoder.batch, decoder.beam, decoder.steps
    limits = constraints.max_lengths
    best_penalty = length_penalty(limits, alpha)

    def search_on(s: _State) -> NamedTensor:
        return mtf.reduce_any(s.active)

    def step(s: _State) -> _State:
        logits, cache = decoder.step(s.cache, s.last, s.position)
        log_probs = constraints.possible(mtf.log_softmax(logits, "vocab"), s.position)
        parents, token, totals = _continuations(log_probs + s.log_probs, beam)
        continued = write(_of_parents(s.tokens, parents), token, s.position)
        length = s.position + 1
        ends = mtf.equal(token, EOS)

        scores = mtf.where(ends, totals / length_penalty(length, alpha), NOTHING)
        lengths = token * 0 + length
        pool = {
            "done_tokens": (s.done_tokens, continued),
            "done_log_probs": (s.done_log_probs, totals),
            "done_scores": (s.done_scores, scores),
            "done_lengths": (s.done_lengths, lengths),
        }
        joined = {n: mtf.concat([mtf.rename(a, beam="candidates"), b], "candidates") for n, (a, b) in pool.items()}
        done = _best(joined["done_scores"], beam, joined)

        going = {"tokens": continued, "last": token, "log_probs": mtf.where(ends, NOTHING, totals), "parents": parents}
        going = _best(going["log_probs"], beam, going)

        # A hypothesis can only lose probability, and its penalty is greatest at the greatest length.
        hope = mtf.index(going["log_probs"], "beam", 0) / best_penalty
        reached = mtf.index(done["done_scores"], "beam", n_best - 1)
        active = s.active & mtf.less(length, limits) & mtf.greater(hope, mtf.maximum(reached, NOTHING / 2))
        kept = {n: _where(s.active, new, getattr(s, n)) for n, new in (done | going).items() if n != "parents"}
        return _State(position=length, active=active, cache=decoder.follow(cache, going["parents"]), **kept)

    zeros = mtf.zeros([batch, beam], jnp.int32)
    nothing = mtf.full([batch, beam], NOTHING)
    empty = mtf.zeros([batch, beam, steps], jnp.int32)
    first_only = mtf.where(mtf.equal(mtf.arange(beam), 0), 0.0, nothing)  # all hypotheses are still one and the same
    start = _State(
        position=mtf.zeros([], jnp.int32),
        active=mtf.greater(limits, 0),
        cache=decoder.start(),
        tokens=empty,
        last=zeros,
        log_probs=first_only,
        done_tokens=empty,
        done_log_probs=nothing,
        done_scores=nothing,
        done_lengths=zeros,
    )
    end = mtf.while_loop(search_on, step, start)
    return _result(end, limits, alpha, n_best)


def _continuations(totals: NamedTensor, beam: Dimension) -> tuple[NamedTensor, NamedTensor, NamedTensor]:
    """Of all continuations `[batch, beam, vocab]` the 2 * beam best: parent, token and log-probability.

    All `[batch, candidates]`. First the best of each hypothesis, so that of a split vocabulary only those travel.
    """
    each = Dimension("each", min(2 * beam.size, totals.shape.find("vocab").size))
    values, tokens = mtf.top_k(totals, "vocab", each)
    flat = Dimension("flat", beam.size * each.size)
    values, tokens = (mtf.reshape(x, [*x.shape.without("beam", each), flat]) for x in (values, tokens))
    candidates = Dimension("candidates", min(2 * beam.size, flat.size))
    values, places = mtf.top_k(values, flat, candidates)
    parents = mtf.NamedTensor(places.array // each.size, places.shape)
    return parents, mtf.gather(tokens, places, flat), values


def _of_parents(x: NamedTensor, parents: NamedTensor) -> NamedTensor:
    """`x` `[batch, beam, ...]` of each candidate's parent: `[batch, candidates, ...]`."""
    return mtf.gather(x, parents, "beam")


def _best(scores: NamedTensor, beam: Dimension, tensors: dict[str, NamedTensor]) -> dict[str, NamedTensor]:
    """Of `tensors` `[batch, candidates, ...]` those of the `beam` highest scores, highest first."""
    _, places = mtf.top_k(scores, "candidates", beam)
    return {name: mtf.gather(x, places, "candidates") for name, x in tensors.items()}


def _where(condition: NamedTensor, new: NamedTensor, old: NamedTensor) -> NamedTensor:
    return mtf.where(condition, new, old, output_shape=old.shape)


def _result(end: _State, limits: NamedTensor, alpha: float, n_best: int) -> Hypotheses:
    """The finished hypotheses and, where there are not enough, those cut at the greatest length."""
    cut_scores = end.log_probs / length_penalty(limits, alpha)
    exists = mtf.greater(end.log_probs, NOTHING / 2)
    # Below every finished one, above nothing; already in order, which equals keep.
    rank = mtf.where(exists, NOTHING / 4, NOTHING)
    both = {
        "tokens": (end.done_tokens, end.tokens),
        "lengths": (end.done_lengths, end.done_lengths * 0 + limits),
        "finished": (mtf.greater(end.done_scores, NOTHING / 2), mtf.full(end.log_probs.shape, False, jnp.bool_)),
        "log_probs": (end.done_log_probs, end.log_probs),
        "scores": (end.done_scores, mtf.where(exists, cut_scores, NOTHING)),
        "rank": (end.done_scores, rank),
    }
    joined = {n: mtf.rename(mtf.concat([a, b], "beam"), beam="candidates") for n, (a, b) in both.items()}
    best = _best(joined["rank"], Dimension("n_best", n_best), joined)
    del best["rank"]
    return Hypotheses(**best)
