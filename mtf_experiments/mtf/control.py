"""Loops over a named dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from mtf_experiments.mtf.collective import vary, varying_axes
from mtf_experiments.mtf.dimension import Dimension, Shape
from mtf_experiments.mtf.layout import LayoutError
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.reshape import transpose
from mtf_experiments.mtf.tensor import NamedTensor, canonical, is_named

Carry = TypeVar("Carry")


def scan(
    body: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, xs: Any, dim: Dimension, unroll: int | bool = 1
) -> tuple[Carry, Any]:
    """Runs `carry, y = body(carry, x)` for each position along `dim`.

    `xs` is a pytree of NamedTensors that all have `dim`; `x` are their slices, without it. The ys come back stacked
    along `dim`, their first dimension. `dim` itself cannot be split (its steps follow one another): LayoutError.
    """
    (axis,) = placement().layout.axes(Shape([dim]), placement().mesh)
    if axis is not None:
        raise LayoutError(f"layout rule {dim.name}:{axis}: {dim.name} is looped over and cannot be split")

    def sliced(x: NamedTensor) -> NamedTensor:
        rest = x.shape.without(dim)
        return NamedTensor.unchecked(transpose(x, [dim, *rest]).array, rest)

    def stacked(y: NamedTensor) -> NamedTensor:
        return NamedTensor(y.array, Shape([dim, *y.shape]))

    # A carry must enter and leave with one type: as varying as its layout, and as what enters, make it.
    entering = jax.tree.map(lambda c: canonical(c) if is_named(c) else c, carry, is_leaf=is_named)
    types = jax.tree.map(varying_axes, entering)

    def step(c: Carry, x: Any) -> tuple[Carry, Any]:
        if (recorder := placement().recorder) is None:
            c, y = body(c, x)
        else:
            c, y = recorder.loop(body, (carry, xs), (c, x), dim)
        y = jax.tree.map(lambda t: canonical(t) if is_named(t) else t, y, is_leaf=is_named)
        return jax.tree.map(vary, c, types), y

    final, ys = lax.scan(step, entering, jax.tree.map(sliced, xs, is_leaf=is_named), length=dim.size, unroll=unroll)
    if (recorder := placement().recorder) is not None:
        recorder.same(final, carry)
    return final, jax.tree.map(stacked, ys, is_leaf=is_named)


def while_loop(condition: Callable[[Carry], NamedTensor], body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Runs `carry = body(carry)` as long as the scalar `condition(carry)` holds.

    `carry` is a pytree of NamedTensors and arrays whose shapes and types stay. The condition must be the same on all
    processors, as every scalar NamedTensor is that a reduction made.
    """
    entering = jax.tree.map(lambda c: canonical(c) if is_named(c) else c, carry, is_leaf=is_named)
    types = jax.tree.map(varying_axes, entering)
    return lax.while_loop(lambda c: condition(c).array, lambda c: jax.tree.map(vary, body(c), types), entering)


def zeros(shape: Shape | list[Dimension], dtype: Any = jnp.float32) -> NamedTensor:
    """A tensor of zeros."""
    return full(shape, 0, dtype)


def full(shape: Shape | list[Dimension], value: float, dtype: Any = jnp.float32) -> NamedTensor:
    """A tensor that holds `value` everywhere."""
    shape = Shape(shape)
    return canonical(NamedTensor(jnp.full(placement().local_sizes(shape), value, dtype), shape))


@recorded
def vary_over(tree: Any, dims: Sequence[str]) -> Any:
    """The NamedTensors of a pytree as values that may differ over the mesh dimensions that `dims` are split over.

    Local. Parameters cast so before a loop over microbatches gather their gradients locally; the transpose of this cast
    (`jax.vjp`) then sums them over the processors, once.
    """
    axes = {a for name in dims if (a := placement().axis(Dimension(name, 0))) is not None}
    return jax.tree.map(lambda x: NamedTensor.unchecked(x.varying(axes), x.shape), tree, is_leaf=is_named)


def zeros_like(tree: Any) -> Any:
    """Zeros of the shapes, types and layouts of the NamedTensors of a pytree, varying where those vary."""
    return jax.tree.map(lambda a: vary(jnp.zeros_like(a), varying_axes(a)), tree)
