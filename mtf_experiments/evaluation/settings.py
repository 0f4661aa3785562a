"""How a model is evaluated, as Gin binds it."""

from __future__ import annotations

import importlib.util  # noqa: F401  (gin uses it without importing it)
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import gin


@gin.configurable
@dataclass(frozen=True)
class Evaluation:
    """How a model is evaluated: `batch_size` rows at once (0: as in training), for every factor of `logit_scales`.

    `during_training` lists the scales of evaluations within a run, in which a translation model translates the development
    set every `bleu_every` steps (0: only at the end; it also has to be a step of evaluation).
    `label` claims the name of a published measure for the
    development set; it is refused unless sentences and words are that measure's.
    """

    batch_size: int = 0
    logit_scales: Sequence[float] = (1.0,)
    during_training: Sequence[float] = (1.0,)
    bleu_every: int = 0
    label: str = ""


@gin.configurable
@dataclass(frozen=True)
class Decoding:
    """How text is generated: by `beam` search or by `sample`-ing, `batch_size` sentences at once.

    `beam` hypotheses compete, ranked by log-probability / ((5 + length) / 6)^`alpha`; or so many samples are drawn, with
    `temperature` (0: greedy), of the `top_k` most probable tokens (0: all) that make up probability `top_p`, following from
    `seed`. A result has at least `min_length` and at most min(`max_length`, `length_factor` * source + `length_offset`)
    tokens, EOS included; 0 for `max_length` means as many as the model has positions. A language model's are counted
    after the prompt. `n_best` are kept. Lengths are in tokens.
    """

    method: Literal["beam", "sample"] = "beam"
    beam: int = 4
    alpha: float = 0.6
    n_best: int = 1
    min_length: int = 1
    max_length: int = 0
    length_factor: float = 1.5
    length_offset: int = 10
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32
