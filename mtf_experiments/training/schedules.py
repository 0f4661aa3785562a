"""Learning rate schedules: pure functions of the number of updates done before the one they scale.

That number is the one step counter of the training state (t = 0 at the first update), so a resumed run cannot disagree
with an uninterrupted one. Each schedule takes a Python int or a traced int32 scalar and returns a float32 scalar.
"""

from __future__ import annotations

import importlib.util  # noqa: F401  (gin uses it without importing it)
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import gin
import jax
import jax.numpy as jnp
import optax

from mtf_experiments.errors import UserError


@runtime_checkable
class Schedule(Protocol):
    """Learning rate as a function of the step."""

    def __call__(self, step: int | jax.Array) -> jax.Array:
        """Learning rate (float32 scalar) of the update that follows `step` earlier ones."""
        ...


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@gin.configurable
@dataclass(frozen=True)
class InverseSquareRootToZero:
    """The paper's schedule: linear warm-up, inverse square root, and a linear fall to zero over the last steps.

    scale * min(1, t / warmup) * max(t, warmup)^-1/2 * clip((train_steps - t) / final, 0, 1). Raises UserError for
    step counts that leave no schedule.
    """

    train_steps: int
    warmup_steps: int = 10_000
    final_steps: int = 13_600
    scale: float = 1.0

    def __post_init__(self) -> None:
        _require(self.train_steps >= 1, f"InverseSquareRootToZero.train_steps is {self.train_steps}; want at least 1")
        _require(
            self.warmup_steps >= 1, f"InverseSquareRootToZero.warmup_steps is {self.warmup_steps}; want at least 1"
        )
        _require(self.final_steps >= 1, f"InverseSquareRootToZero.final_steps is {self.final_steps}; want at least 1")

    def __call__(self, step: int | jax.Array) -> jax.Array:
        """Learning rate after `step` updates, float32 scalar."""
        t = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, t / self.warmup_steps)
        fall = jnp.clip((self.train_steps - t) / self.final_steps, 0.0, 1.0)
        return self.scale * warm * jnp.maximum(t, float(self.warmup_steps)) ** -0.5 * fall


@gin.configurable
@dataclass(frozen=True)
class Constant:
    """The same learning rate at every step."""

    learning_rate: float

    def __call__(self, step: int | jax.Array) -> jax.Array:
        """Learning rate after `step` updates, float32 scalar."""
        return jnp.full(jnp.shape(step), self.learning_rate, jnp.float32)


@gin.configurable
@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up from 0 to `peak`, then half a cosine down to `peak * final_fraction` at `train_steps`.

    Raises UserError unless 0 <= warmup_steps < train_steps.
    """

    train_steps: int
    peak: float
    warmup_steps: int = 1_000
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        _require(
            0 <= self.warmup_steps < self.train_steps,
            f"WarmupCosine.warmup_steps is {self.warmup_steps}; want 0 to less than train_steps, {self.train_steps}",
        )

    def __call__(self, step: int | jax.Array) -> jax.Array:
        """Learning rate after `step` updates, float32 scalar."""
        curve = optax.warmup_cosine_decay_schedule(
            0.0, self.peak, self.warmup_steps, self.train_steps, self.peak * self.final_fraction
        )
        return jnp.asarray(curve(jnp.asarray(step)), jnp.float32)
