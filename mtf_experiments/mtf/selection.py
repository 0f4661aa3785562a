"""The largest elements along a dimension. Over a split one each processor offers its own best; nothing else travels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mtf_experiments.mtf import collective
from mtf_experiments.mtf.dimension import Dimension, Shape, ShapeError
from mtf_experiments.mtf.indexing import index
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.reshape import transpose
from mtf_experiments.mtf.tensor import NamedTensor


@recorded
def top_k(x: NamedTensor, dim: Dimension | str, k: Dimension) -> tuple[NamedTensor, NamedTensor]:
    """The `k.size` largest elements along `dim`, largest first, and their positions (int32) along the whole of `dim`.

    Both `[*rest, k]`, where `rest` is the shape of `x` less `dim`. Of equal elements the earlier comes first. Over a split
    `dim` the processors exchange `k.size` elements and positions each. Raises ShapeError for more than `dim` holds.
    """
    dim = x.shape.find(dim)
    if not 1 <= k.size <= dim.size:
        raise ShapeError(f"the {k.size} largest along {dim.name} of {x.shape}: legal are 1..{dim.size}")
    rest = x.shape.without(dim)
    array = transpose(x, [*rest, dim]).array
    mesh_axis, last = placement().axis(dim), len(rest)
    local_size = array.shape[last]
    values, positions = lax.top_k(array, min(k.size, local_size))
    if mesh_axis is not None:
        positions = positions + collective.global_start(mesh_axis, local_size)
        # Joined in the order of the processors, so that the earlier of equals still comes first.
        values, positions = (collective.allgather(a, mesh_axis, last) for a in (values, positions))
        values, chosen = lax.top_k(values, k.size)
        positions = jnp.take_along_axis(positions, chosen, axis=last)
    output = Shape([*rest, k])
    placement().check(output)
    before, after = (*placement().axes(rest), None), placement().axes(output)

    def laid_out(a: jax.Array) -> NamedTensor:
        return NamedTensor(collective.relayout(a, before, after), output)

    return laid_out(values), laid_out(positions)


@recorded
def argmax(x: NamedTensor, dim: Dimension | str) -> NamedTensor:
    """The position (int32, along the whole of `dim`) of the largest element, the first of equals: the shape less `dim`."""
    best = Dimension("argmax", 1)
    return index(top_k(x, dim, best)[1], best, 0)
