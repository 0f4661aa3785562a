"""spmd: a named program, a mesh and a layout become one jitted `jax.shard_map` (paper, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mtf_experiments.mtf.dimension import Dimension, Shape
from mtf_experiments.mtf.layout import Layout, MeshShape
from mtf_experiments.mtf.placement import Placement, inside_spmd, placed
from mtf_experiments.mtf.tensor import NamedTensor, is_named

T = TypeVar("T")


def make_mesh(mesh_shape: str | MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (default: all). Raises LayoutError if its product is not their number."""
    devices = list(jax.devices() if devices is None else devices)
    shape = (MeshShape(mesh_shape) if isinstance(mesh_shape, str) else mesh_shape).resolve(len(devices))
    if not shape:
        shape = MeshShape({"all": 1})
    if devices[0].platform == "cpu":  # no topology to respect: processors are named in row-major order
        grid = np.array(devices).reshape(tuple(shape.values()))
        return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def abstract_mesh(mesh_shape: str | MeshShape, processors: int | None = None) -> AbstractMesh:
    """A mesh without devices, to trace programs on (they cannot be run)."""
    shape = MeshShape(mesh_shape) if isinstance(mesh_shape, str) else mesh_shape
    if processors is not None or -1 in shape.values():
        shape = shape.resolve(processors or 1)
    shape = shape or MeshShape({"all": 1})
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def mesh_shape_of(mesh: Mesh | AbstractMesh) -> MeshShape:
    """Names and sizes of the dimensions of `mesh`."""
    return MeshShape(dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))


def partition_spec(shape: Shape, layout: Layout, mesh: MeshShape) -> PartitionSpec:
    """The placement of a tensor of `shape` in JAX's terms."""
    return PartitionSpec(*layout.axes(shape, mesh))


def sharding(shape: Iterable[Dimension], layout: Layout | str, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of a tensor of `shape`. Raises LayoutError if the layout is not legal for it."""
    layout, shape = Layout(layout) if isinstance(layout, str) else layout, Shape(shape)
    layout.check_mesh(mesh_shape_of(mesh))
    layout.check_shape(shape, mesh_shape_of(mesh))
    return NamedSharding(mesh, partition_spec(shape, layout, mesh_shape_of(mesh)))  # pyright: ignore[reportArgumentType]


def check_program(function: Callable[..., Any], mesh: MeshShape, layout: Layout, *arguments: Any) -> Any:
    """Traces `function` without devices and checks that `layout` is legal for every tensor in it.

    Returns its output as abstract NamedTensors of global sizes. Raises LayoutError: an unknown mesh dimension, a rule
    that matches nothing, two dimensions of one tensor on one mesh dimension, a size that does not divide.
    """
    layout.check_mesh(mesh)
    with placed(Placement(mesh, layout, applied=False)) as checked:
        for path, x in jax.tree_util.tree_leaves_with_path(arguments, is_leaf=is_named):
            if is_named(x):
                name = jax.tree_util.keystr(path[1:], simple=True, separator="/") or f"argument {path[0].idx}"
                layout.check_shape(x.shape, mesh, name)
                checked.check(x.shape)
        # A fresh function object: JAX keeps traces by identity, and this one must be traced here, to be seen.
        output = jax.eval_shape(lambda *a: function(*a), *arguments)
    layout.check_used(checked.names)
    return output


def spmd(
    function: Callable[..., T],
    mesh: Mesh | AbstractMesh,
    layout: Layout | str,
    donate: tuple[int, ...] = (),
    checked: Any = None,
) -> Callable[..., T]:
    """`function`, written over whole named tensors, as one program for every processor of `mesh`.

    Arguments and results are pytrees of NamedTensors (laid out by `layout`) and plain arrays (the same on every
    processor). The layout decides placement and communication, never the result. `donate` numbers arguments whose
    buffers may be reused. Raises LayoutError when called, before anything is compiled, as `check_program` does;
    `checked` is what that returned for arguments of the same shapes, to spare doing it again.
    """
    layout = Layout(layout) if isinstance(layout, str) else layout
    shape = mesh_shape_of(mesh)
    layout.check_mesh(shape)

    def specs(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: partition_spec(x.shape, layout, shape) if is_named(x) else PartitionSpec(), tree, is_leaf=is_named
        )

    def local(*arguments: Any) -> Any:
        with placed(Placement(shape, layout, applied=True)):
            return function(*arguments)

    def whole(*arguments: Any) -> Any:
        if inside_spmd():
            raise RuntimeError("spmd programs do not nest: call the function itself, it is already laid out")
        output = check_program(function, shape, layout, *arguments) if checked is None else checked
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs(arguments), out_specs=specs(output), check_vma=True)
        return mapped(*arguments)

    return jax.jit(whole, donate_argnums=donate)


def place(tree: Any, mesh: Mesh, layout: Layout | str) -> Any:
    """Puts the (global) NamedTensors of a pytree onto the devices of `mesh` as `layout` says; plain arrays, on each."""

    def put(x: Any) -> Any:
        if not is_named(x):
            return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
        return NamedTensor(jax.device_put(x.array, sharding(x.shape, layout, mesh)), x.shape)

    return jax.tree.map(put, tree, is_leaf=is_named)
