"""Reductions over named dimensions: each processor reduces its own stripe, then an allreduce joins the stripes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from mtf_experiments.mtf import collective
from mtf_experiments.mtf.dimension import Dimension, Shape
from mtf_experiments.mtf.elementwise import exp, log, stop_gradient
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.tensor import NamedTensor

Dims: TypeAlias = Dimension | str | Iterable[Dimension | str] | None


def reduced_dimensions(shape: Shape, dims: Dims) -> tuple[Dimension, ...]:
    """The dimensions of `shape` that `dims` (one, several, or None for all) names."""
    if dims is None:
        return tuple(shape)
    return tuple(shape.find(d) for d in ([dims] if isinstance(dims, Dimension | str) else dims))


def split_over(dims: Iterable[Dimension]) -> tuple[str, ...]:
    """The mesh dimensions over which `dims` are split."""
    return tuple(a for d in dims if (a := placement().axis(d)) is not None)


def finish_sum(
    partial_sum: jax.Array, shape: Shape, axes: tuple[str, ...], rename: Mapping[str, str] | None
) -> NamedTensor:
    """Joins the processors' partial sums of a tensor of `shape` over the mesh dimensions `axes`.

    A dimension that `rename` gives a name whose layout splits it over one of `axes` is reduce-scattered, which moves
    half of what an allreduce and a slice would.
    """
    target = shape.renamed(dict(rename or {}))
    placement().check(target)
    before, after = placement().axes(shape), placement().axes(target)
    scattered: list[str] = []
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if new is not None and old is None and new in axes:
            partial_sum = collective.reduce_scatter(partial_sum, new, axis)
            scattered.append(new)
            before = before[:axis] + (new,) + before[axis + 1 :]
    total = collective.allreduce(partial_sum, tuple(a for a in axes if a not in scattered))
    return NamedTensor(collective.relayout(total, before, after), target)


@recorded
def reduce_sum(x: NamedTensor, dims: Dims = None, rename: Mapping[str, str] | None = None) -> NamedTensor:
    """Sum over `dims` (default: all). `rename` renames remaining dimensions on the way (see `finish_sum`)."""
    gone = reduced_dimensions(x.shape, dims)
    local = jnp.sum(x.array, axis=tuple(x.shape.axis(d) for d in gone))
    return finish_sum(local, x.shape.without(*gone), split_over(gone), rename)


def reduce_mean(x: NamedTensor, dims: Dims = None) -> NamedTensor:
    """Mean over `dims` (default: all)."""
    count = Shape(reduced_dimensions(x.shape, dims)).elements
    return reduce_sum(x, dims) * (1.0 / count if count else float("nan"))


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(x: jax.Array, largest: bool, array_axes: tuple[int, ...], mesh_axes: tuple[str, ...]) -> jax.Array:
    if largest:
        return collective.allreduce_max(jnp.max(x, axis=array_axes), mesh_axes)
    return collective.allreduce_min(jnp.min(x, axis=array_axes), mesh_axes)


@_extreme.defjvp
def _extreme_jvp(
    largest: bool,
    array_axes: tuple[int, ...],
    mesh_axes: tuple[str, ...],
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    # As jnp.max does: the gradient is shared equally among all elements that attain it, on whatever processor.
    (x,), (t,) = primals, tangents
    extreme = _extreme(x, largest, array_axes, mesh_axes)
    attained = (x == jnp.expand_dims(extreme, array_axes)).astype(x.dtype)
    count = collective.allreduce(lax.stop_gradient(jnp.sum(attained, axis=array_axes)), mesh_axes)
    tangent = jnp.sum(attained * t, axis=array_axes)
    if mesh_axes:  # not collective.allreduce: this is transposed as it stands, and checkpoint names have no transpose
        tangent = lax.psum(collective.vary(tangent, mesh_axes), mesh_axes)
    return extreme, tangent / count


@recorded
def reduce_max(x: NamedTensor, dims: Dims = None) -> NamedTensor:
    """Maximum over `dims` (default: all)."""
    return _reduce_extreme(x, dims, largest=True)


@recorded
def reduce_min(x: NamedTensor, dims: Dims = None) -> NamedTensor:
    """Minimum over `dims` (default: all)."""
    return _reduce_extreme(x, dims, largest=False)


def _reduce_extreme(x: NamedTensor, dims: Dims, largest: bool) -> NamedTensor:
    gone = reduced_dimensions(x.shape, dims)
    array = _extreme(x.array, largest, tuple(x.shape.axis(d) for d in gone), split_over(gone))
    return NamedTensor(array, x.shape.without(*gone))


@recorded
def reduce_logsumexp(x: NamedTensor, dims: Dims = None) -> NamedTensor:
    """log(sum(exp(x))) over `dims`, of the distance to the maximum, so that it neither over- nor underflows."""
    maximum = stop_gradient(reduce_max(stop_gradient(x), dims))
    return log(reduce_sum(exp(_minus(x, maximum)), dims)) + maximum


def _minus(x: NamedTensor, maximum: NamedTensor) -> NamedTensor:
    # A row that is -inf throughout has no finite maximum to subtract; 0 keeps it -inf instead of nan.
    finite = NamedTensor(jnp.where(jnp.isfinite(maximum.array), maximum.array, 0), maximum.shape)
    return x - finite


def _logical(reduce: Callable[..., NamedTensor], x: NamedTensor, dims: Dims) -> NamedTensor:
    result = reduce(x.astype(jnp.int32), dims)
    return NamedTensor(result.array.astype(bool), result.shape)


def reduce_any(x: NamedTensor, dims: Dims = None) -> NamedTensor:
    """Whether any element along `dims` is true."""
    return _logical(reduce_max, x, dims)


def reduce_all(x: NamedTensor, dims: Dims = None) -> NamedTensor:
    """Whether all elements along `dims` are true."""
    return _logical(reduce_min, x, dims)
