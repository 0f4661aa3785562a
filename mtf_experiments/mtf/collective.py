"""The collectives that the lowering is made of, with their gradients (paper, section 6).

All functions act on one processor's slice inside `jax.shard_map(check_vma=True)`. JAX tracks over which mesh dimensions
a value varies; the transpose of a cast to varying is the paper's backward allreduce. With no mesh dimensions given each
is the identity, which is how the same program runs on one device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mtf_experiments.mtf.placement import placement

Axes = tuple[str, ...]

COMMUNICATED = "communicated"
"""Name of collective results for `jax.checkpoint` policies: saved, they need not be communicated again backward."""


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh dimensions over which the processors hold different values of `x`."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x: jax.Array, axes: Axes | frozenset[str]) -> jax.Array:
    """`x` as a value that may differ over `axes`. Local; its gradient is the allreduce over the axes added.

    Nothing is done for mesh dimensions of one processor, nor outside the program, where there are none.
    """
    here = placement()
    missing = tuple(sorted(a for a in frozenset(axes) - varying_axes(x) if here.applied and here.mesh[a] > 1))
    return lax.pcast(x, missing, to="varying") if missing else x


def allreduce(x: jax.Array, axes: Axes) -> jax.Array:
    """Sum over the processors along `axes`. Its gradient is local."""
    return checkpoint_name(lax.psum(vary(x, axes), axes), COMMUNICATED) if axes else x


def allreduce_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Maximum over the processors along `axes`, NaN if any has one; carries no gradient."""
    x = lax.stop_gradient(x)
    if not axes:
        return x
    x = vary(x, axes)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.pmax(x, axes)
    if x.dtype.itemsize < 4:
        return allreduce_max(x.astype(jnp.float32), axes).astype(x.dtype)
    # Backends differ in whether a maximum of floats passes NaN on. As integers, floats keep their order (the negative
    # ones once their magnitude is complemented), and NaN is above all.
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")

    def complemented(bits: jax.Array) -> jax.Array:
        return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)

    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), integer)
    return lax.bitcast_convert_type(complemented(lax.pmax(complemented(bits), axes)), x.dtype)


def allreduce_min(x: jax.Array, axes: Axes) -> jax.Array:
    """Minimum over the processors along `axes`, NaN if any has one; carries no gradient."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return -allreduce_max(-x, axes)
    return lax.pmin(vary(x, axes), axes) if axes else x


def allgather(x: jax.Array, mesh_axis: str, axis: int) -> jax.Array:
    """split -> unsplit: the slices along array axis `axis`, joined on every processor. Its gradient is a slice."""
    gathered = lax.all_gather(vary(x, (mesh_axis,)), mesh_axis, axis=axis, tiled=True, to="invarying")
    return checkpoint_name(gathered, COMMUNICATED)


def own_slice(x: jax.Array, mesh_axis: str, axis: int) -> jax.Array:
    """unsplit -> split: this processor's slice along array axis `axis`. Local; its gradient is the allgather.

    (Left to itself, differentiation would zero-pad every slice and allreduce: n times the traffic. Where `x` was cast
    to varying before, that is right all the same: the allreduce then belongs to the cast.)
    """
    return _slice(x, mesh_axis, axis) if mesh_axis in varying_axes(x) else _slice_of_replicated(x, mesh_axis, axis)


def _slice(x: jax.Array, mesh_axis: str, axis: int) -> jax.Array:
    size = x.shape[axis] // lax.axis_size(mesh_axis)
    return lax.dynamic_slice_in_dim(vary(x, (mesh_axis,)), lax.axis_index(mesh_axis) * size, size, axis)


_slice_of_replicated = jax.custom_vjp(_slice, nondiff_argnums=(1, 2))


def _slice_forward(x: jax.Array, mesh_axis: str, axis: int) -> tuple[jax.Array, tuple[()]]:
    return _slice(x, mesh_axis, axis), ()


def _slice_backward(mesh_axis: str, axis: int, _: tuple[()], g: jax.Array) -> tuple[jax.Array]:
    return (allgather(g, mesh_axis, axis),)


_slice_of_replicated.defvjp(_slice_forward, _slice_backward)


def alltoall(x: jax.Array, mesh_axis: str, split_axis: int, concat_axis: int) -> jax.Array:
    """A split -> B split over one mesh dimension: splits array axis `split_axis`, joins `concat_axis`."""
    x = vary(x, (mesh_axis,))
    return checkpoint_name(lax.all_to_all(x, mesh_axis, split_axis, concat_axis, tiled=True), COMMUNICATED)


def reduce_scatter(x: jax.Array, mesh_axis: str, axis: int) -> jax.Array:
    """Sum over the processors along `mesh_axis`, of which each keeps its slice along array axis `axis`."""
    x = vary(x, (mesh_axis,))
    return checkpoint_name(lax.psum_scatter(x, mesh_axis, scatter_dimension=axis, tiled=True), COMMUNICATED)


def exchange(x: jax.Array, mesh_axis: str, offset: int) -> jax.Array:
    """Passes `x` to the processor `offset` further along `mesh_axis`; those that receive nothing get zeros."""
    n = lax.axis_size(mesh_axis)
    pairs = [(i, i + offset) for i in range(n) if 0 <= i + offset < n]
    return lax.ppermute(vary(x, (mesh_axis,)), mesh_axis, pairs)


def relayout(x: jax.Array, before: tuple[str | None, ...], after: tuple[str | None, ...]) -> jax.Array:
    """Moves a slice from one layout to another: `before` and `after` give each array axis' mesh dimension or None.

    One alltoall for every mesh dimension that moves between two axes; else allgather (split -> unsplit) and own slice
    (unsplit -> split).
    """
    axes = list(before)
    for _ in axes:  # a move may free the axis that another waits for
        for source, mesh_axis in enumerate(axes):
            target = after.index(mesh_axis) if mesh_axis is not None and mesh_axis in after else source
            if mesh_axis is not None and target != source and axes[target] is None:
                x = alltoall(x, mesh_axis, target, source)
                axes[source], axes[target] = None, mesh_axis
    for axis, mesh_axis in enumerate(axes):
        if mesh_axis is not None and mesh_axis != after[axis]:
            x = allgather(x, mesh_axis, axis)
            axes[axis] = None
    for axis, mesh_axis in enumerate(after):
        if mesh_axis is not None and axes[axis] != mesh_axis:
            x = own_slice(x, mesh_axis, axis)
    return x


def global_start(mesh_axis: str | None, local_size: int) -> jax.Array | int:
    """Where this processor's slice of a dimension begins in the whole, in elements."""
    return 0 if mesh_axis is None else lax.axis_index(mesh_axis).astype(jnp.int32) * local_size
