"""What each operation of a record computes and communicates under a layout: the rules of the language's lowering.

A tensor varies over some mesh dimensions (the processors hold different values): those that its dimensions are split
over, until a sum joins the processors. What an operation reads has to vary over the union of what its operands do; a
tensor that has to vary over more than it does is cast, once for all who need the same, and backward that cast is an
allreduce of its gradient. The rules say of each operation what it communicates itself, and what its result varies over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mtf_experiments.mtf import Collective, Dimension, Layout, Ledger, MeshShape, Operation, Product, Record, Shape

if TYPE_CHECKING:
    from mtf_experiments.planning.estimate import Estimator

Axes = frozenset[str]


@dataclass
class Run:
    """One pass over the record under one mesh and layout."""

    of: Estimator
    mesh: MeshShape
    layout: Layout
    varying: dict[int, Axes] = field(default_factory=dict)
    collectives: dict[tuple[str, tuple[str, ...], int, int], int] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    casts: set[tuple[int, Axes, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.summed = frozenset(a for name in self.of.summed if (a := self.axis(name)))
        for i in self.of.parameters:
            missing = self.summed - self.axes(self.shape(i))
            self.collect("allreduce", missing, self.elements(self.shape(i)), self.itemsize(i), 1)

    # Under the layout

    def shape(self, tensor: int) -> Shape:
        """The global shape of a tensor."""
        return self.of.record.tensors[tensor].shape

    def itemsize(self, tensor: int) -> int:
        """Bytes of one element."""
        return self.of.record.tensors[tensor].dtype.itemsize

    def axis(self, name: str) -> str | None:
        """The mesh dimension that a dimension of this name is split over, or None."""
        mesh_dimension = self.layout.get(name)
        return mesh_dimension if mesh_dimension and self.mesh[mesh_dimension] > 1 else None

    def axes(self, shape: Iterable) -> Axes:
        """Those that dimensions are split over."""
        return frozenset(a for d in shape if (a := self.axis(d.name)))

    def elements(self, shape: Shape) -> int:
        """Of a slice on one processor."""
        return math.prod(self.layout.local_sizes(shape, self.mesh))

    def varies(self, tensor: int) -> Axes:
        """The mesh dimensions over which the processors hold different values of a tensor."""
        if tensor not in self.varying:
            outside = self.summed if tensor in self.of.of_parameters else frozenset()
            self.varying[tensor] = self.axes(self.shape(tensor)) | outside
        return self.varying[tensor]

    # What is communicated

    def collect(self, kind: str, axes: Axes, elements: int, itemsize: int, count: int) -> None:
        """Notes a collective of so many elements that runs `count` times."""
        if axes and count and elements:
            key = (kind, tuple(a for a in self.mesh if a in axes), elements, itemsize)
            self.collectives[key] = self.collectives.get(key, 0) + count

    def cast(self, tensor: int, axes: Axes, repeats: int) -> None:
        """`tensor` has to vary over `axes`: backward, its gradient is summed over those that are new to it."""
        missing = axes - self.varies(tensor)
        if missing and tensor in self.of.differentiated and (tensor, missing, repeats) not in self.casts:
            self.casts.add((tensor, missing, repeats))
            self.collect(
                "allreduce", missing, self.elements(self.shape(tensor)), self.itemsize(tensor), self.runs(repeats)
            )

    def runs(self, repeats: int) -> int:
        """How often a step does what one microbatch does `repeats` times."""
        return repeats * self.of.microbatches

    def operation(self, op: Operation) -> None:
        """Goes through one operation."""
        union = frozenset[str]().union(*(self.varies(i) for i in op.inputs))
        rule: Callable[[Run, Operation, Axes], Axes] = _RULES.get(op.name, _local)
        varying = rule(self, op, union)
        for output in op.outputs:
            self.varying[output] = varying | self.axes(self.shape(output))

    def finished(self) -> Ledger:
        """What was found."""
        made = [
            Collective(kind, axes, elements, elements * itemsize, count)
            for (kind, axes, elements, itemsize), count in self.collectives.items()
        ]
        return Ledger(tuple(made), tuple(self.products))

    def sum_over(self, axes: Axes, op: Operation, shape: Shape, itemsize: int, times: int = 1) -> None:
        """Notes allreduces of a tensor of this shape."""
        self.collect("allreduce", axes, self.elements(shape), itemsize, times * self.runs(op.repeats))

    def finish_sum(self, op: Operation, before: Shape, axes: Axes, union: Axes) -> Axes:
        """The sum over `axes` of partial results of shape `before`, which takes its new names on the way (see the language)."""
        (output,) = op.outputs
        itemsize, backward = self.itemsize(output), output in self.of.differentiated
        old, new = list(self.layout.axes(before, self.mesh)), self.layout.axes(self.shape(output), self.mesh)
        local, left = self.elements(before), set(axes)
        for i, a in enumerate(new):
            if a in left and old[i] is None:
                self.collect("reduce_scatter", frozenset([a]), local, itemsize, self.runs(op.repeats))
                if backward:
                    self.collect("allgather", frozenset([a]), local, itemsize, self.runs(op.repeats))
                local, old[i] = local // self.mesh[a], a
                left.remove(a)
        self.collect("allreduce", frozenset(left), local, itemsize, self.runs(op.repeats))
        self.move(old, list(new), local, op, itemsize, backward)
        return (union - axes - self.axes(before)) | self.axes(self.shape(output))

    def relayout(self, before: Shape, after: Shape, op: Operation, itemsize: int, backward: bool) -> None:
        """Moves a tensor; backward its gradient moves the other way, a slice being an allgather there."""
        old, new = list(self.layout.axes(before, self.mesh)), list(self.layout.axes(after, self.mesh))
        self.move(old, new, self.elements(before), op, itemsize, backward)

    def move(
        self, old: list[str | None], new: list[str | None], local: int, op: Operation, itemsize: int, backward: bool
    ) -> None:
        """As `relayout`, of slices of `local` elements and the mesh dimensions of each axis."""
        for i, a in enumerate(old):
            if a and a in new and new.index(a) != i and len(old) == len(new) and old[new.index(a)] is None:
                self.collect(
                    "alltoall", frozenset([a]), local, itemsize, (2 if backward else 1) * self.runs(op.repeats)
                )
                old[new.index(a)], old[i] = a, None
        for i, a in enumerate(old):
            if a and (i >= len(new) or new[i] != a):
                local *= self.mesh[a]
                self.collect("allgather", frozenset([a]), local, itemsize, self.runs(op.repeats))
                old[i] = None
        for i, a in enumerate(new):
            if a and (i >= len(old) or old[i] != a):
                if backward:
                    self.collect("allgather", frozenset([a]), local, itemsize, self.runs(op.repeats))
                local //= self.mesh[a]


def _before(shape: Shape, rename: Mapping[str, str]) -> Shape:
    """The shape under its names before `rename`."""
    return shape.renamed({new: old for old, new in rename.items()})


def _dim(op: Operation) -> str:
    """The name of the dimension that an operation works along."""
    dim = op.arguments["dim"]
    return dim if isinstance(dim, str) else dim.name


def _local(run: Run, op: Operation, union: Axes) -> Axes:
    for i in op.inputs:
        run.cast(i, union, op.repeats)
    return union


def _slice_of_loop(run: Run, op: Operation, union: Axes) -> Axes:
    return union


def _vary_over(run: Run, op: Operation, union: Axes) -> Axes:
    union |= frozenset(a for name in op.arguments["dims"] if (a := run.axis(name)))
    return _local(run, op, union)


def _einsum(run: Run, op: Operation, union: Axes) -> Axes:
    _local(run, op, union)
    record, (output,) = run.of.record, op.outputs
    everything = union_of(op, record)
    rename = op.arguments.get("rename") or {}
    before = _before(run.shape(output), rename)
    contracted = run.axes(d for d in everything if not before.has(d))
    flops = 2 * run.elements(Shape(everything))
    shared = tuple(a for a in run.mesh if a in union)
    dtype = str(max((record.tensors[i].dtype for i in op.inputs), key=lambda d: d.itemsize))
    moved = sum(run.elements(run.shape(i)) * run.itemsize(i) for i in (*op.inputs, output))
    times = 1 + sum(i in run.of.differentiated for i in op.inputs)
    run.products.append(Product(flops, moved, dtype, times * run.runs(op.repeats), op.scope, shared))
    return run.finish_sum(op, before, contracted, union)


def _reduce_sum(run: Run, op: Operation, union: Axes) -> Axes:
    (x,), (output,) = op.inputs, op.outputs
    before = _before(run.shape(output), op.arguments.get("rename") or {})
    return run.finish_sum(op, before, run.axes(d for d in run.shape(x) if not before.has(d)), union)


def _reduce_extreme(run: Run, op: Operation, union: Axes) -> Axes:
    axes_left = _reduce_sum(run, op, union)
    if op.inputs[0] in run.of.differentiated:  # how many attain it, and their gradient's sum
        gone = union - axes_left
        run.sum_over(gone, op, run.shape(op.outputs[0]), run.itemsize(op.outputs[0]))
    return axes_left


def _moved(run: Run, op: Operation, union: Axes) -> Axes:
    (x, *_), (output, *_) = op.inputs, op.outputs
    if len(op.inputs) == len(op.outputs) == 1:
        run.relayout(run.shape(x), run.shape(output), op, run.itemsize(x), output in run.of.differentiated)
        return (union - run.axes(run.shape(x))) | run.axes(run.shape(output))
    return _local(run, op, union)


def _slice_dimension(run: Run, op: Operation, union: Axes) -> Axes:
    """A split dimension is gathered, cut, and split again."""
    (x,), (output,) = op.inputs, op.outputs
    cut = [(d, e) for d, e in zip(run.shape(x), run.shape(output), strict=True) if d != e]
    for d, _ in cut:
        if axis := run.axis(d.name):
            whole, kept = (run.elements(run.shape(t)) * run.mesh[axis] for t in (x, output))
            run.collect("allgather", frozenset([axis]), whole, run.itemsize(x), run.runs(op.repeats))
            if output in run.of.differentiated:
                run.collect("allgather", frozenset([axis]), kept, run.itemsize(x), run.runs(op.repeats))
    return union


def _unstack(run: Run, op: Operation, union: Axes) -> Axes:
    (x,) = op.inputs
    gone = next(d for d in run.shape(x) if not run.shape(op.outputs[0]).has(d))
    if axis := run.axis(gone.name):
        whole = run.elements(run.shape(x)) * run.mesh[axis]
        run.collect("allgather", frozenset([axis]), whole, run.itemsize(x), run.runs(op.repeats))
        union -= {axis}
    return union


def _gather(run: Run, op: Operation, union: Axes) -> Axes:
    (table, _), (output,) = op.inputs, op.outputs
    axis = run.axis(_dim(op))
    axes = frozenset([axis]) if axis else frozenset[str]()
    run.cast(table, union | axes, op.repeats)
    run.sum_over(axes, op, run.shape(output), run.itemsize(output))
    return (union | axes) - axes


def _softmax(run: Run, op: Operation, union: Axes) -> Axes:
    """Maximum and sum forward; backward a sum of gradients."""
    (x,) = op.inputs
    name = _dim(op)
    rows = Shape(d for d in run.shape(x) if d.name != name)
    axes = run.axes(d for d in run.shape(x) if d.name == name)
    run.sum_over(axes, op, rows, run.itemsize(x), 2 + (x in run.of.differentiated))
    return union


def _cross_entropy(run: Run, op: Operation, union: Axes) -> Axes:
    logits, labels = op.inputs
    axes = run.axes(d for d in run.shape(logits) if not run.shape(labels).has(d))
    run.cast(logits, run.varies(logits) | run.varies(labels), op.repeats)
    times = 4 if op.name.endswith("uniform") else 3  # maximum, sum, the label's logit, the sum of all
    run.sum_over(axes, op, run.shape(labels), 4, times)
    return union - axes


def _cumsum(run: Run, op: Operation, union: Axes) -> Axes:
    """One total of each processor's part, gathered; backward their gradients are summed."""
    (x,) = op.inputs
    name = _dim(op)
    if axis := run.axis(name):
        totals = run.elements(Shape(d for d in run.shape(x) if d.name != name)) * run.mesh[axis]
        run.collect("allgather", frozenset([axis]), totals, run.itemsize(x), run.runs(op.repeats))
        if x in run.of.differentiated:
            run.collect("allreduce", frozenset([axis]), totals, run.itemsize(x), run.runs(op.repeats))
    return union


def _shift(run: Run, op: Operation, union: Axes) -> Axes:
    """The elements at each border go to the neighbour; their gradients come back."""
    (x,) = op.inputs
    name = _dim(op)
    if axis := run.axis(name):
        border = abs(op.arguments["offset"]) * run.elements(Shape(d for d in run.shape(x) if d.name != name))
        times = 2 if x in run.of.differentiated else 1
        run.collect("exchange", frozenset([axis]), border, run.itemsize(x), times * run.runs(op.repeats))
    return union


def _joined(run: Run, op: Operation, union: Axes) -> Axes:
    """Parts of a split dimension are gathered, and of the whole each processor keeps its slice."""
    (output,) = op.outputs
    dim = _dim(op)
    if (axis := run.axis(dim)) is None:
        return _local(run, op, union)
    for i in op.inputs:
        if run.shape(i).names.count(dim):
            part = run.elements(run.shape(i)) * run.mesh[axis]
            run.collect("allgather", frozenset([axis]), part, run.itemsize(i), run.runs(op.repeats))
    if output in run.of.differentiated:
        whole = run.elements(run.shape(output)) * run.mesh[axis]
        run.collect("allgather", frozenset([axis]), whole, run.itemsize(output), run.runs(op.repeats))
    return union | {axis}


def _dropout(run: Run, op: Operation, union: Axes) -> Axes:
    (x,) = op.inputs
    shared = set(op.arguments.get("shared", ()))
    union |= run.axes(d for d in run.shape(x) if d.name not in shared)
    run.cast(x, union, op.repeats)
    return union


_RULES: Mapping[str, Callable[[Run, Operation, Axes], Axes]] = {
    "einsum": _einsum,
    "reduce_sum": _reduce_sum,
    "reduce_logsumexp": _reduce_extreme,
    "reduce_max": _reduce_extreme,
    "reduce_min": _reduce_extreme,
    "rename": _moved,
    "reshape": _moved,
    "slice_dimension": _slice_dimension,
    "unstack": _unstack,
    "gather": _gather,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "cumsum": _cumsum,
    "shift": _shift,
    "concat": _joined,
    "stack": _joined,
    "softmax_cross_entropy": _cross_entropy,
    "softmax_cross_entropy_and_uniform": _cross_entropy,
    "dropout": _dropout,
    "slice_of_loop": _slice_of_loop,
    "vary_over": _vary_over,
}
"""What operations do besides computing locally; those that are not here communicate nothing (or, as `top_k` and `argmax`,
are in no loss)."""


def union_of(op: Operation, record: Record) -> list[Dimension]:
    """All dimensions of what an operation reads, in order."""
    found = {}
    for i in op.inputs:
        for d in record.tensors[i].shape:
            found.setdefault(d.name, d)
    return list(found.values())
