"""How a model is evaluated, as Gin binds it."""

from __future__ import annotations

import importlib.util  # noqa: F401  (gin uses it without importing it)
from collections.abc import Sequence
from dataclasses import dataclass

import gin


@gin.configurable
@dataclass(frozen=True)
class Evaluation:
    """How a model is evaluated: `batch_size` rows at once (0: as in training), for every factor of `logit_scales`.

    `during_training` lists the scales of evaluations within a run. `label` claims the name of a published measure for the
    development set; it is refused unless sentences and words are that measure's.
    """

    batch_size: int = 0
    logit_scales: Sequence[float] = (1.0,)
    during_training: Sequence[float] = (1.0,)
    label: str = ""
