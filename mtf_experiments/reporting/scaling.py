"""Scaling laws fitted to results: L(N, D) = E + A / N^a + B / D^b (Hoffmann et al. 2022, equation 2), or their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Law:
    """A fit of NLL (nats) by numbers of parameters N and of training tokens D; without D, or N, that term is absent.

    `residual` is the root mean square of what is left, in nats.
    """

    floor: float
    by_parameters: tuple[float, float] | None
    by_tokens: tuple[float, float] | None
    residual: float
    points: int

    def predict(self, parameters: float, tokens: float) -> float:
        """NLL of a model of so many parameters trained on so many tokens."""
        loss = self.floor
        for term, size in ((self.by_parameters, parameters), (self.by_tokens, tokens)):
            if term is not None:
                loss += term[0] * size ** -term[1]
        return loss

    def formula(self) -> str:
        """In words."""
        terms = [f"{self.floor:.3g}"]
        for term, name in ((self.by_parameters, "N"), (self.by_tokens, "D")):
            if term is not None:
                terms.append(f"{term[0]:.3g} / {name}^{term[1]:.3f}")
        return f"L = {' + '.join(terms)} (rms {self.residual:.3g} nats, {self.points} runs)"


def fit(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> Law | None:
    """The law that fits best, by least squares of log loss from several starts; terms of what does not vary are left out.

    None where the runs are fewer than the law has numbers and one more.
    """
    from scipy.optimize import least_squares

    n, d, loss = (np.asarray(x, float) for x in (parameters, tokens, losses))
    sizes = [x for x in (n, d) if len({float(f"{v:.3g}") for v in x}) > 2]
    if not sizes or len(loss) < 2 * len(sizes) + 2:
        return None
    scaled = [np.log(x / np.exp(np.log(x).mean())) for x in sizes]

    def model(p: np.ndarray) -> np.ndarray:
        total = np.exp(p[0]) * np.ones_like(loss)
        for i, x in enumerate(scaled):
            total = total + np.exp(p[1 + 2 * i] - np.exp(p[2 + 2 * i]) * x)
        return total

    best = None
    for share in (0.1, 0.5, 0.9):
        for exponent in (0.05, 0.2, 0.6):
            start = [np.log(loss.min() * share)]
            for _ in scaled:
                start += [np.log(loss.mean() * (1 - share) / len(scaled)), np.log(exponent)]
            found = least_squares(
                lambda p: np.log(model(p)) - np.log(loss), start, bounds=([-20] * len(start), [6] * len(start))
            )
            if best is None or found.cost < best.cost:
                best = found
    assert best is not None
    terms: list[tuple[float, float]] = []
    for i, x in enumerate(sizes):
        exponent = float(np.exp(best.x[2 + 2 * i]))
        terms.append((float(np.exp(best.x[1 + 2 * i] + exponent * np.log(x).mean())), exponent))
    varied = [any(x is s for s in sizes) for x in (n, d)]
    by_n, by_d = (terms.pop(0) if there else None for there in varied)
    residual = float(np.sqrt(np.mean((model(best.x) - loss) ** 2)))
    return Law(float(np.exp(best.x[0])), by_n, by_d, residual, len(loss))
