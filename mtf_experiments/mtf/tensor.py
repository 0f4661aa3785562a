"""NamedTensor: an array together with the names of its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp

from mtf_experiments.mtf import collective
from mtf_experiments.mtf.dimension import Dimension, Shape, ShapeError, union
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.record import recorded

Scalar: TypeAlias = int | float | bool


@jax.tree_util.register_pytree_node_class
class NamedTensor:
    """One array and its dimensions, whose sizes are those of the whole tensor.

    Inside `spmd` the array is this processor's slice. Raises ShapeError if the array does not have the sizes that shape
    and layout demand, LayoutError if the layout in force is not legal for the shape.
    """

    __slots__ = ("_array", "shape", "_casts")
    __array_ufunc__ = None  # numpy arrays and scalars leave mixed arithmetic to this class

    def __init__(self, array: Any, shape: Iterable[Dimension]) -> None:
        self._array: Any = array if isinstance(array, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(array)
        self.shape = shape if isinstance(shape, Shape) else Shape(shape)
        self._casts: list[tuple[Any, frozenset[str], jax.Array]] = []
        placement().check(self.shape)
        if self._array.shape != placement().local_sizes(self.shape):
            raise ShapeError(
                f"an array of sizes {list(self._array.shape)} is no tensor of shape {self.shape}, which needs "
                f"{list(placement().local_sizes(self.shape))}"
            )

    @classmethod
    def unchecked(cls, array: Any, shape: Shape) -> NamedTensor:
        """A tensor whose array is not (yet) of the sizes of `shape`: a stack that `scan` slices, a leaf of a pytree."""
        self = object.__new__(cls)
        self._array, self.shape, self._casts = array, shape, []
        return self

    def tree_flatten(self) -> tuple[tuple[Any], Shape]:
        """The array, and the dimensions, which are static."""
        return (self._array,), self.shape

    @classmethod
    def tree_unflatten(cls, shape: Shape, children: tuple[Any]) -> NamedTensor:
        """Unchecked: JAX puts other things than arrays into pytrees."""
        return cls.unchecked(children[0], shape)

    @property
    def array(self) -> jax.Array:
        """The array: inside `spmd` this processor's slice, or ShapeError if it is a whole tensor from outside."""
        if placement().applied:
            local, whole = placement().local_sizes(self.shape), self.shape.sizes
            if local != whole and getattr(self._array, "shape", None) == whole:
                raise ShapeError(
                    f"tensor {self.shape} was made outside spmd and is used inside, where each processor has the slice "
                    f"{list(local)}: make it inside, or pass it as an argument"
                )
        return self._array

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the elements."""
        return self._array.dtype

    def varying(self, axes: Iterable[str]) -> jax.Array:
        """The array as a value that may differ over the mesh dimensions `axes`.

        Kept, so that several consumers share one cast and with it one backward allreduce.
        """
        missing = frozenset(axes) - collective.varying_axes(self.array)
        if not missing:
            return self.array
        trace = jax.extend.core.get_opaque_trace_state(convention="named_tensor")
        for kept_trace, kept_missing, array in self._casts:
            if kept_missing == missing and kept_trace == trace:
                return array
        array = collective.vary(self.array, missing)
        if isinstance(self._array, jax.core.Tracer):  # a constant outlives the trace, which it must not keep alive
            self._casts.append((trace, missing, array))
        return array

    @recorded
    def astype(self, dtype: Any) -> NamedTensor:
        """The tensor with elements of `dtype`."""
        return self if self.dtype == dtype else NamedTensor(self.array.astype(dtype), self.shape)

    def __repr__(self) -> str:
        return f"NamedTensor({self.shape}, {getattr(self._array, 'dtype', type(self._array).__name__)})"

    def __add__(self, other: Any) -> NamedTensor:
        return apply(jnp.add, self, other)

    def __radd__(self, other: Any) -> NamedTensor:
        return apply(jnp.add, other, self)

    def __sub__(self, other: Any) -> NamedTensor:
        return apply(jnp.subtract, self, other)

    def __rsub__(self, other: Any) -> NamedTensor:
        return apply(jnp.subtract, other, self)

    def __mul__(self, other: Any) -> NamedTensor:
        return apply(jnp.multiply, self, other)

    def __rmul__(self, other: Any) -> NamedTensor:
        return apply(jnp.multiply, other, self)

    def __truediv__(self, other: Any) -> NamedTensor:
        return apply(jnp.divide, self, other)

    def __rtruediv__(self, other: Any) -> NamedTensor:
        return apply(jnp.divide, other, self)

    def __pow__(self, other: Any) -> NamedTensor:
        return apply(jnp.power, self, other)

    def __rpow__(self, other: Any) -> NamedTensor:
        return apply(jnp.power, other, self)

    def __neg__(self) -> NamedTensor:
        return self * -1

    def __lt__(self, other: Any) -> NamedTensor:
        return apply(jnp.less, self, other)

    def __le__(self, other: Any) -> NamedTensor:
        return apply(jnp.less_equal, self, other)

    def __gt__(self, other: Any) -> NamedTensor:
        return apply(jnp.greater, self, other)

    def __ge__(self, other: Any) -> NamedTensor:
        return apply(jnp.greater_equal, self, other)

    def __and__(self, other: Any) -> NamedTensor:
        return apply(jnp.logical_and, self, other)

    def __or__(self, other: Any) -> NamedTensor:
        return apply(jnp.logical_or, self, other)


def is_named(x: Any) -> bool:
    """Whether `x` is a NamedTensor: the `is_leaf` of pytree functions that want whole tensors."""
    return isinstance(x, NamedTensor)


def canonical(x: NamedTensor) -> NamedTensor:
    """`x` cast to vary over all mesh dimensions that its layout splits it over (loop carries need one fixed type)."""
    axes = tuple(a for a in placement().axes(x.shape) if a)
    return NamedTensor.unchecked(x.varying(axes), x.shape)


def broadcast_shape(operands: Sequence[NamedTensor], output_shape: Iterable[Dimension] | None = None) -> Shape:
    """The shape of a component-wise operation: that of the operand whose dimensions include all the others'.

    Raises ShapeError if no operand has them all; `output_shape` then says which order is meant.
    """
    everything = union(x.shape for x in operands)
    if output_shape is not None:
        output_shape = Shape(output_shape)
        for d in everything:
            output_shape.find(d)
        return output_shape
    for x in operands:
        if len(x.shape) == len(everything):
            return x.shape
    raise ShapeError(
        f"shapes {' and '.join(str(x.shape) for x in operands)} do not broadcast: none has all the dimensions of the "
        f"others; pass output_shape={everything} if that is meant"
    )


@recorded
def apply(
    function: Callable[..., jax.Array], *operands: Any, output_shape: Iterable[Dimension] | None = None
) -> NamedTensor:
    """Component-wise `function` of named tensors and scalars, broadcast by name. Local under every layout."""
    tensors = [x for x in operands if isinstance(x, NamedTensor)]
    shape = broadcast_shape(tensors, output_shape)
    axes = frozenset[str]().union(*(collective.varying_axes(x.array) for x in tensors))
    arrays = []
    for x in operands:
        if isinstance(x, NamedTensor):
            missing = [i for i, d in enumerate(shape) if not x.shape.has(d)]
            # Cast before transposing: the cast is kept on the tensor, and shared by all who use it.
            array = x.varying(axes)
            order = [x.shape.axis(d) for d in shape if x.shape.has(d)]
            array = jnp.transpose(array, order) if order != sorted(order) else array
            arrays.append(jnp.expand_dims(array, missing) if missing else array)
        else:
            if getattr(x, "ndim", 0):
                raise ShapeError(f"an array of sizes {list(x.shape)} has no dimension names: make it a NamedTensor")
            arrays.append(x)
    array = function(*arrays)
    return NamedTensor(jnp.broadcast_to(array, placement().local_sizes(shape)), shape)
