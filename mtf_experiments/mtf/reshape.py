"""Changes of shape. Where names change, so may the layout: allgather, slice, or alltoall (paper, section 6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
from jax import lax

from mtf_experiments.mtf import collective
from mtf_experiments.mtf.dimension import Dimension, Shape, ShapeError
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.tensor import NamedTensor


@recorded
def transpose(x: NamedTensor, shape: Iterable[Dimension | str]) -> NamedTensor:
    """`x` with its dimensions in another order. Local."""
    target = Shape(x.shape.find(d) for d in shape)
    if len(target) != len(x.shape):
        raise ShapeError(f"transpose of {x.shape} to {target} must name every dimension once")
    if target == x.shape:
        return x
    return NamedTensor(jnp.transpose(x.array, [x.shape.axis(d) for d in target]), target)


@recorded
def rename(x: NamedTensor, names: Mapping[str, str] | None = None, **more: str) -> NamedTensor:
    """`x` with dimensions renamed, `old=new`.

    A dimension whose new name the layout splits otherwise is moved: split -> unsplit allgathers, unsplit -> split keeps
    the own slice, and a mesh dimension that moves from one dimension to another is an alltoall.
    """
    target = x.shape.renamed({**(names or {}), **more})
    placement().check(target)
    array = collective.relayout(x.array, placement().axes(x.shape), placement().axes(target))
    return NamedTensor(array, target)


@recorded
def reshape(x: NamedTensor, shape: Iterable[Dimension]) -> NamedTensor:
    """`x`'s elements, in row-major order, as a tensor of `shape` with as many elements.

    Only dimensions that are really regrouped move: one at the front of its group that stays split over the same mesh
    dimension stays where it is; other split dimensions of the group are gathered before and sliced after.
    """
    target = Shape(shape)
    if x.shape.elements != target.elements:
        raise ShapeError(
            f"{x.shape} has {x.shape.elements} elements and {target} has {target.elements}: no reshape between them"
        )
    placement().check(target)
    before, after = list(placement().axes(x.shape)), list(placement().axes(target))
    middle_before, middle_after = list(before), list(after)
    for old, new in _groups(x.shape.sizes, target.sizes):
        if len(old) == len(new) == 1:
            middle_after[new[0]] = middle_before[old[0]] = before[old[0]]
            continue
        same = old and new and before[old[0]] == after[new[0]]
        for i in old[1:] if same else old:
            middle_before[i] = None
        for i in new[1:] if same else new:
            middle_after[i] = None
    array = collective.relayout(x.array, tuple(before), tuple(middle_before))
    mesh = placement().mesh
    sizes = [d.size // (mesh[a] if a else 1) for d, a in zip(target, middle_after, strict=True)]
    array = collective.relayout(array.reshape(sizes), tuple(middle_after), tuple(after))
    return NamedTensor(array, target)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of axes of `old` and `new` that hold the same elements."""
    if 0 in old:
        return [(list(range(len(old))), list(range(len(new))))]
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j, p, q = i, j, 1, 1
        if i < len(old) and old[i] == 1:  # sizes of 1 stand alone, lest a split dimension seem not to be at the front
            groups.append(([i], []))
            i += 1
            continue
        if j < len(new) and new[j] == 1:
            groups.append(([], [j]))
            j += 1
            continue
        if i < len(old):
            p, i = old[i], i + 1
        if j < len(new):
            q, j = new[j], j + 1
        while p != q:
            if p < q:
                p, i = p * old[i], i + 1
            else:
                q, j = q * new[j], j + 1
        groups.append((list(range(first_i, i)), list(range(first_j, j))))
    return groups


@recorded
def concat(tensors: Sequence[NamedTensor], dim: str) -> NamedTensor:
    """Joins `tensors` along the dimension named `dim` (the others are equal). Local unless it is split."""
    shape = tensors[0].shape
    for x in tensors[1:]:
        if set(x.shape.without(dim)) != set(shape.without(dim)):
            raise ShapeError(f"concat along {dim} of {shape} and {x.shape}: the other dimensions differ")
    total = Dimension(dim, sum(x.shape.find(dim).size for x in tensors))
    target = Shape(total if d.name == dim else d for d in shape)
    axes = placement().axes(shape)
    whole = tuple(None if d.name == dim else a for d, a in zip(shape, axes, strict=True))
    parts = [collective.relayout(transpose(x, shape.names).array, axes, whole) for x in tensors]
    array = jnp.concatenate(parts, axis=shape.axis(dim))
    return NamedTensor(collective.relayout(array, whole, placement().axes(target)), target)


@recorded
def stack(tensors: Sequence[NamedTensor], dim: str, axis: int = 0) -> NamedTensor:
    """Joins `tensors` of one shape along a new dimension named `dim` at position `axis`."""
    shape = tensors[0].shape
    for x in tensors[1:]:
        if set(x.shape) != set(shape):
            raise ShapeError(f"stack of {shape} and {x.shape}: the dimensions differ")
    new = Dimension(dim, len(tensors))
    target = Shape([*shape[:axis], new, *shape[axis:]])
    placement().check(target)
    array = jnp.stack([transpose(x, shape.names).array for x in tensors], axis=axis)
    after = placement().axes(target)
    before = tuple(None if i == axis else a for i, a in enumerate(after))
    return NamedTensor(collective.relayout(array, before, after), target)


@recorded
def unstack(x: NamedTensor, dim: Dimension | str) -> list[NamedTensor]:
    """The slices of `x` along `dim`, which is gathered first if it is split."""
    dim = x.shape.find(dim)
    axes = placement().axes(x.shape)
    whole = tuple(None if d == dim else a for d, a in zip(x.shape, axes, strict=True))
    array = collective.relayout(x.array, axes, whole)
    axis, rest = x.shape.axis(dim), x.shape.without(dim)
    # Not n slices: the gradient of one split is one concatenation, that of n slices n padded copies and their sum.
    parts = lax.split(array, (1,) * dim.size, axis)
    return [NamedTensor(jnp.squeeze(part, axis), rest) for part in parts]
