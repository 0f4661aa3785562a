"""How a training run goes, as Gin binds it."""

from __future__ import annotations

import importlib.util  # noqa: F401  (gin uses it without importing it)
from dataclasses import dataclass

import gin


@gin.configurable
@dataclass(frozen=True)
class Training:
    """How a run goes: `microbatches` parts of each batch one after another, and what happens every so many steps.

    0 for a period means never (checkpoints: only at the end). `keep_checkpoints` newest ones are kept, besides the best by
    development perplexity and every `keep_every`-th step. `peak_flops` is one device's peak FLOP/s, to print the share of it
    that is used; `stall_seconds` without a finished step end the run with a stack dump (0: wait for ever).
    """

    microbatches: int = 1
    label_smoothing: float = 0.0
    log_every: int = 100
    eval_every: int = 1000
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    keep_every: int = 0
    peak_flops: float = 0.0
    stall_seconds: float = 0.0
