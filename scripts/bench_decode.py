"""Beam search: with the cache against without it, and against a loop written by hand in plain JAX, in one run.

    python scripts/bench_decode.py [--batch 32] [--width 24] [--steps 48] [--json FILE]

All translate the same sentences with the same random parameters, beam 4, to the same tokens (which is checked), one after
another on one device; ratios are medians over pairs of neighbouring runs. Expected on two idle cores: the cache several
times faster than none, and level with the loop by hand (`plain_translation.beam_search`) or faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from plain_translation import beam_search as beam_search_by_hand
from plain_translation import from_product

from mtf_experiments import mtf
from mtf_experiments.evaluation.beam_search import beam_search
from mtf_experiments.evaluation.hypotheses import Constraints
from mtf_experiments.models import parameters
from mtf_experiments.models.incremental import CachedDecoder, UncachedDecoder, encode
from mtf_experiments.models.translation import TranslationModelConfig

BEAM, ALPHA = 4, 0.6


def ours(
    config: TranslationModelConfig, kind: Any, named: parameters.Parameters, steps: int, least: int
) -> Callable[..., Any]:
    """The product's search under its own program, `[batch, steps]` of the best hypotheses."""
    structure, _ = config.abstract_parameters()
    beam, positions = mtf.Dimension("beam", BEAM), mtf.Dimension("steps", steps)

    def search(params: parameters.Parameters, sources: mtf.NamedTensor, limits: mtf.NamedTensor) -> mtf.NamedTensor:
        model = parameters.merge(structure, params)
        decoder = kind(model, sources.shape[0], beam, positions, encode(model, sources))
        found = beam_search(decoder, Constraints(limits, config.vocab_size, least), ALPHA)
        return mtf.index(found.tokens, "n_best", 0)

    program = mtf.spmd(search, mtf.make_mesh("all:1", jax.devices()[:1]), "")

    def run(sources: np.ndarray, limits: np.ndarray) -> np.ndarray:
        batch = mtf.Dimension("batch", len(sources))
        inputs = mtf.NamedTensor(sources, [batch, mtf.Dimension("inputs_length", sources.shape[1])])
        return np.asarray(program(named, inputs, mtf.NamedTensor(limits, [batch])).array)

    return run


def compare(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Median of first/second over neighbouring pairs, and the medians in seconds."""

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    pairs = []
    for number in range(rounds + 1):  # the first pair compiles
        if number % 2:
            b, a = seconds(second), seconds(first)
        else:
            a, b = seconds(first), seconds(second)
        if number:
            pairs.append((a, b))
    ratios, firsts, seconds_ = (statistics.median(x) for x in zip(*((a / b, a, b) for a, b in pairs), strict=True))
    return ratios, firsts, seconds_


def main() -> None:
    """Prints tokens per second and the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=24, help="source tokens")
    parser.add_argument("--steps", type=int, default=48, help="target tokens; every hypothesis is as long")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = dict(vocab_size=4000, d_model=128, d_ff=512, num_heads=8, d_kv=16, num_layers=3, row_length=256)
    config = TranslationModelConfig(**sizes)
    named = parameters.split(config.build(mtf.Random(jax.random.key(0))))[1]
    plain = from_product({name: np.asarray(p.array) for name, p in named.items()})
    # Embeddings decide random models' outputs; without EOS every search runs to the end and does the same work.
    plain["softmax"] = plain["softmax"].copy()
    plain["softmax"][:, 1] = 0
    named["softmax"] = mtf.NamedTensor(plain["softmax"], named["softmax"].shape)
    rng = np.random.default_rng(0)
    sources = rng.integers(3, config.vocab_size, (args.batch, args.width)).astype(np.int32)
    sources[:, -1] = 1
    limits = np.full(args.batch, args.steps, np.int32)
    cached, uncached = (ours(config, kind, named, args.steps, 1) for kind in (CachedDecoder, UncachedDecoder))
    search = jax.jit(beam_search_by_hand, static_argnums=(3, 4, 5, 6))

    def by_hand() -> np.ndarray:
        return np.asarray(search(plain, sources, limits, config.vocab_size, BEAM, ALPHA, args.steps)[0])[:, 0]

    best = cached(sources, limits)
    for name, other in (("by hand", by_hand()), ("uncached", uncached(sources, limits))):
        same = (best == other).all(axis=1).mean()
        print(f"sentences with the same tokens, {name}: {same:.1%}")
    generated = int((best != 0).sum())
    hand, ours_seconds, hand_seconds = compare(lambda: cached(sources, limits), by_hand, args.rounds)
    speedup, whole_seconds, _ = compare(lambda: uncached(sources, limits), lambda: cached(sources, limits), 2)
    result = {
        "tokens_per_second": generated / ours_seconds,
        "tokens_per_second_by_hand": generated / hand_seconds,
        "tokens_per_second_uncached": generated / whole_seconds,
        "time_ours_by_hand": hand,
        "time_uncached_cached": speedup,
        "settings": vars(args) | {"json": str(args.json or "")} | sizes,
    }
    print(
        f"{generated:,} tokens of {args.batch} sentences, beam {BEAM}: {result['tokens_per_second']:,.0f} tokens/s; by hand "
        f"{result['tokens_per_second_by_hand']:,.0f}; without cache {result['tokens_per_second_uncached']:,.0f}"
    )
    print(f"time ours / by hand {hand:.3f}; uncached / cached {speedup:.2f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
