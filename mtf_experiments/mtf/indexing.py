"""Positions, lookups, shifts. Each processor does its part of a split dimension; the smallest exchange joins them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtf_experiments.mtf import collective
from mtf_experiments.mtf.dimension import Dimension, Shape, ShapeError
from mtf_experiments.mtf.elementwise import equal
from mtf_experiments.mtf.layout import LayoutError
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.reshape import transpose
from mtf_experiments.mtf.tensor import NamedTensor


@recorded
def arange(dim: Dimension, dtype: jnp.dtype | type = jnp.int32) -> NamedTensor:
    """Positions 0, 1, ... along `dim`, counted in the whole dimension: `[dim]`."""
    (size,) = placement().local_sizes(Shape([dim]))
    start = collective.global_start(placement().axis(dim), size)
    return NamedTensor((start + jnp.arange(size)).astype(dtype), [dim])


def one_hot(ids: NamedTensor, dim: Dimension, dtype: jnp.dtype | type = jnp.float32) -> NamedTensor:
    """1 where the position along `dim` equals the id, else 0: `[*ids.shape, dim]`."""
    return equal(ids, arange(dim), output_shape=[*ids.shape, dim]).astype(dtype)


def _local_positions(ids: jax.Array, dim: Dimension) -> tuple[jax.Array, jax.Array, tuple[str, ...]]:
    """Ids as positions in this processor's slice of `dim`, which of them lie in it, and what it is split over."""
    axis = placement().axis(dim)
    (size,) = placement().local_sizes(Shape([dim]))
    local = ids.astype(jnp.int32) - collective.global_start(axis, size)
    mine = (local >= 0) & (local < size)
    return jnp.where(mine, local, 0), mine, (axis,) if axis else ()


@recorded
def gather(table: NamedTensor, ids: NamedTensor, dim: Dimension | str) -> NamedTensor:
    """Rows of `table` along `dim` selected by the integer tensor `ids`: an embedding lookup.

    `[*ids.shape, *rest]`, where `rest` is the table's shape less `dim`; dimensions that both have are matched. A split
    `dim` is looked up locally, masked and allreduced. An id outside 0..size-1 yields NaN rows, never another row
    (integers: 0).
    """
    dim = table.shape.find(dim)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ShapeError(f"gather along {dim.name} needs integer ids, got {ids.dtype}")
    shared = [d for d in ids.shape if table.shape.has(d)]
    for d in shared:
        table.shape.find(d)  # of the same size in both
    rest = table.shape.without(dim, *shared)
    output = Shape([*ids.shape, *rest])
    placement().check(Shape([*output, dim]))
    positions, mine, axes = _local_positions(ids.array, dim)
    union = collective.varying_axes(table.array) | collective.varying_axes(mine)
    array = jnp.transpose(table.varying(union), [table.shape.axis(d) for d in (*shared, dim, *rest)])
    index = tuple(  # dimensions that both have are indexed by their own (local) position, broadcast to the ids' shape
        jnp.arange(positions.shape[ids.shape.axis(d)]).reshape([-1 if e == d else 1 for e in ids.shape]) for d in shared
    )
    rows = array[(*index, positions)]
    fill = jnp.nan if jnp.issubdtype(rows.dtype, jnp.floating) else 0
    valid = (ids.array >= 0) & (ids.array.astype(jnp.int32) < dim.size)
    expand = tuple(range(len(ids.shape), len(output)))
    rows = jnp.where(
        jnp.expand_dims(mine, expand), rows, jnp.where(jnp.expand_dims(valid, expand), 0, fill).astype(rows.dtype)
    )
    return NamedTensor(collective.allreduce(rows, axes), output)


@recorded
def slice_dimension(x: NamedTensor, dim: Dimension | str, start: int | jax.Array, size: int) -> NamedTensor:
    """Elements start..start+size-1 along `dim`, whose size becomes `size`. A split dimension is gathered first."""
    dim = x.shape.find(dim)
    if isinstance(start, int | np.integer) and not 0 <= start <= start + size <= dim.size:
        raise ShapeError(f"slice {start}..{start + size - 1} of dimension {dim.name}, which has size {dim.size}")
    target = Shape(Dimension(d.name, size) if d == dim else d for d in x.shape)
    axes = placement().axes(x.shape)
    whole = tuple(None if d == dim else a for d, a in zip(x.shape, axes, strict=True))
    array = collective.relayout(x.array, axes, whole)
    array = lax.dynamic_slice_in_dim(array, start, size, x.shape.axis(dim))
    placement().check(target)
    return NamedTensor(collective.relayout(array, whole, placement().axes(target)), target)


def index(x: NamedTensor, dim: Dimension | str, position: int | jax.Array) -> NamedTensor:
    """The slice of `x` at one position along `dim`, which disappears. Over a split `dim`: masked and allreduced.

    A position outside raises ShapeError if it is known when the program is built; else it yields NaN, as in `gather`.
    """
    dim = x.shape.find(dim)
    if isinstance(position, int | np.integer) and not 0 <= position < dim.size:
        raise ShapeError(f"position {position} along dimension {dim.name} of {x.shape}: legal are 0..{dim.size - 1}")
    return gather(x, NamedTensor(jnp.asarray(position), []), dim)


@recorded
def update_slice(x: NamedTensor, update: NamedTensor, dim: Dimension | str, start: int | jax.Array) -> NamedTensor:
    """`x` with `update` in the place of its elements start..start+n-1 along `dim`, of which `update` has n.

    Every other dimension is the same in both. `dim` itself cannot be split: LayoutError. Raises ShapeError if `update`
    does not fit; a `start` known only at run time is moved so that it does, as in `lax.dynamic_update_slice`.
    """
    dim = x.shape.find(dim)
    size = next((d.size for d in update.shape if d.name == dim.name), 0)
    update = transpose(update, [Dimension(d.name, size) if d == dim else d for d in x.shape])
    if size > dim.size or (isinstance(start, int | np.integer) and not 0 <= start <= dim.size - size):
        raise ShapeError(f"{size} elements from {start} on along {dim.name} of {x.shape}")
    if (mesh_axis := placement().axis(dim)) is not None:
        raise LayoutError(
            f"layout rule {dim.name}:{mesh_axis}: {dim.name} is written to piece by piece; do not split it"
        )
    axes = collective.varying_axes(x.array) | collective.varying_axes(update.array)
    array = lax.dynamic_update_slice_in_dim(
        x.varying(axes), update.astype(x.dtype).varying(axes), start, x.shape.axis(dim)
    )
    return NamedTensor(array, x.shape)


@recorded
def shift(x: NamedTensor, offset: int, dim: Dimension | str) -> NamedTensor:
    """Moves `x` by `offset` along `dim`; zeros enter at the end that is vacated.

    Over a split dimension only the |offset| elements at each border travel, to the neighbouring processor.
    """
    dim = x.shape.find(dim)
    axis, mesh_axis = x.shape.axis(dim), placement().axis(dim)
    size = x.array.shape[axis]
    if abs(offset) > size:
        raise ShapeError(
            f"shift by {offset} along {dim}, whose slice has {size} elements: shift by less, or split it less"
        )
    if offset == 0:
        return x
    if offset > 0:
        border = lax.slice_in_dim(x.array, size - offset, size, axis=axis)
        kept = lax.slice_in_dim(x.array, 0, size - offset, axis=axis)
    else:
        border = lax.slice_in_dim(x.array, 0, -offset, axis=axis)
        kept = lax.slice_in_dim(x.array, -offset, size, axis=axis)
    received = collective.exchange(border, mesh_axis, 1 if offset > 0 else -1) if mesh_axis else jnp.zeros_like(border)
    return NamedTensor(jnp.concatenate([received, kept] if offset > 0 else [kept, received], axis=axis), x.shape)


@recorded
def cumsum(x: NamedTensor, dim: Dimension | str, exclusive: bool = False) -> NamedTensor:
    """Running sum along `dim`. Over a split dimension one total per processor is exchanged."""
    dim = x.shape.find(dim)
    axis, mesh_axis = x.shape.axis(dim), placement().axis(dim)
    size = x.array.shape[axis]
    result = jnp.cumsum(x.array, axis=axis)
    total = lax.slice_in_dim(result, max(size - 1, 0), size, axis=axis)
    if exclusive:  # not by subtraction, which would lose small sums beside a large element
        earlier = lax.slice_in_dim(result, 0, max(size - 1, 0), axis=axis)
        result = jnp.concatenate([jnp.zeros_like(total), earlier], axis)
    if mesh_axis:
        totals = collective.allgather(total, mesh_axis, axis)
        before = jnp.arange(totals.shape[axis]) < lax.axis_index(mesh_axis)
        before = before.reshape([-1 if i == axis else 1 for i in range(totals.ndim)])
        result = result + jnp.sum(jnp.where(before, totals, 0), axis=axis, keepdims=True)
    return NamedTensor(result, x.shape)
