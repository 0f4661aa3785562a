"""What the curves of a run say: its best step, the gap between training and development, and a verdict in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtf_experiments.reporting.runs import Run

WORSE = 0.005
"""Relative rise of the development NLL above its best from which on a run overfits; a fall of less in its last part is
saturation."""

VERDICTS = (
    f"Overfitting: the development NLL ends more than {WORSE:.1%} above its best. Still improving: over the last third of the "
    f"evaluations it fell by more than {WORSE:.1%} (a learning rate that goes to zero makes the end of any run improve). "
    "Saturated: neither."
)
"""What the verdicts mean, for readers."""


@dataclass(frozen=True)
class Diagnosis:
    """`gap`: development less training NLL at the end, nats per token (training with dropout, over the last tenth)."""

    best_step: int
    best_nll: float
    last_nll: float
    gap: float | None
    verdict: str


def diagnose(run: Run) -> Diagnosis | None:
    """The diagnosis of a run, None where it has not been evaluated.

    Overfitting: the development NLL rose by more than `WORSE` above its best. Still improving: over the last third of the
    evaluations it fell by more than `WORSE`. Saturated: neither. A learning rate that goes to zero makes the last part of
    any run improve; "still improving" says what the curve does, not what a longer run would.
    """
    curve = run.curve("validation/nll_per_token")
    if not curve.steps:
        return None
    best = min(range(len(curve.values)), key=lambda i: curve.values[i])
    last, lowest = curve.values[-1], curve.values[best]
    if len(curve.values) < 3:
        verdict = "too few evaluations to say"
    elif last > (1 + WORSE) * lowest:
        verdict = "overfitting"
    elif min(curve.values[: -math.ceil(len(curve.values) / 3)]) > (1 + WORSE) * last:
        verdict = "still improving"
    else:
        verdict = "saturated"
    train = run.curve("train/nll")
    tail = train.values[-max(1, len(train.values) // 10) :] if train.values else ()
    gap = last - sum(tail) / len(tail) if tail else None
    return Diagnosis(curve.steps[best], lowest, last, gap, verdict)
