"""Component-wise operations with broadcasting by name. All are local under every layout."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtf_experiments.mtf.dimension import Dimension
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.tensor import NamedTensor, Scalar, apply

Operand = NamedTensor | Scalar | jax.Array

add = partial(apply, jnp.add)
subtract = partial(apply, jnp.subtract)
multiply = partial(apply, jnp.multiply)
divide = partial(apply, jnp.divide)
power = partial(apply, jnp.power)
maximum = partial(apply, jnp.maximum)
minimum = partial(apply, jnp.minimum)
equal = partial(apply, jnp.equal)
not_equal = partial(apply, jnp.not_equal)
less = partial(apply, jnp.less)
less_equal = partial(apply, jnp.less_equal)
greater = partial(apply, jnp.greater)
greater_equal = partial(apply, jnp.greater_equal)
logical_and = partial(apply, jnp.logical_and)
logical_or = partial(apply, jnp.logical_or)
logical_not = partial(apply, jnp.logical_not)
exp = partial(apply, jnp.exp)
log = partial(apply, jnp.log)
sqrt = partial(apply, jnp.sqrt)
rsqrt = partial(apply, lax.rsqrt)
square = partial(apply, jnp.square)
absolute = partial(apply, jnp.abs)
sign = partial(apply, jnp.sign)
sin = partial(apply, jnp.sin)
cos = partial(apply, jnp.cos)
tanh = partial(apply, jnp.tanh)
sigmoid = partial(apply, jax.nn.sigmoid)
relu = partial(apply, jax.nn.relu)
gelu = partial(apply, jax.nn.gelu)
silu = partial(apply, jax.nn.silu)
is_finite = partial(apply, jnp.isfinite)


@recorded
def stop_gradient(x: NamedTensor) -> NamedTensor:
    """`x`, through which no gradient flows."""
    return NamedTensor(lax.stop_gradient(x.array), x.shape)


def where(
    condition: NamedTensor, x: Operand, y: Operand, output_shape: Iterable[Dimension] | None = None
) -> NamedTensor:
    """`x` where `condition` holds, else `y`; all three broadcast by name."""
    return apply(jnp.where, condition, x, y, output_shape=output_shape)


def cast(x: NamedTensor, dtype: Any) -> NamedTensor:
    """`x` with elements of `dtype`."""
    return x.astype(dtype)


def broadcast(x: NamedTensor, shape: Iterable[Dimension]) -> NamedTensor:
    """`x` repeated along the dimensions of `shape` that it lacks."""
    return apply(lambda a: a, x, output_shape=shape)
