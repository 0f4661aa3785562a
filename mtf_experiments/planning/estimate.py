"""What a training step communicates and computes under any mesh and layout, read off the record of its program.

    estimate = Estimator(record, batch_dimensions=("batch", "length"), microbatches=1)
    estimate.legal(mesh, layout)          # or why it is not
    estimate.ledger(mesh, layout)         # as `mtf.ledger` of the gradient program, without tracing it

A tensor varies over some mesh dimensions (the processors hold different values): those that its dimensions are split
over, until a sum joins the processors. What an operation reads has to vary over the union of what its operands do; a
tensor that has to vary over more than it does is cast, once for all who need the same, and backward that cast is an
allreduce of its gradient (DESIGN: "lowering"). The rules below say of each operation what it communicates itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mtf_experiments.mtf import Collective, Layout, LayoutError, Ledger, MeshShape, Operation, Product, Record, Shape

Axes = frozenset[str]


class Estimator:
    """Estimates of the gradients of one recorded loss by its parameters.

    `parameters` numbers those among the record's arguments (default: all of floating point). `summed` names the dimensions
    that the loss is a sum over: parameters are cast to vary over theirs before the loop over `microbatches`, each of which
    runs the record once.
    """

    def __init__(
        self,
        record: Record,
        summed: Sequence[str] = (),
        microbatches: int = 1,
        parameters: Sequence[int] | None = None,
    ) -> None:
        self.record, self.summed, self.microbatches = record, tuple(summed), microbatches
        self._shapes = list(dict.fromkeys(t.shape for t in record.tensors))
        self._products = [Shape(_union(op, record)) for op in record.operations if op.name in ("einsum", "gather")]
        self._sizes: dict[str, set[int]] = {}
        for shape in self._shapes:
            for d in shape:
                self._sizes.setdefault(d.name, set()).add(d.size)
        self._looped = {d for op in record.operations if op.name == "slice_of_loop" for d in _sliced(op, record)}
        if parameters is None:
            parameters = [i for i in record.arguments if np.issubdtype(record.tensors[i].dtype, np.floating)]
        self._parameters = list(parameters)
        self._gradients = set(self._parameters)
        self._of_parameters = set(self._parameters)  # depend on nothing but parameters
        for op in record.operations:
            float_outputs = [o for o in op.outputs if np.issubdtype(record.tensors[o].dtype, np.floating)]
            if op.name != "stop_gradient" and any(i in self._gradients for i in op.inputs):
                self._gradients.update(float_outputs)
            if op.inputs and all(i in self._of_parameters for i in op.inputs):
                self._of_parameters.update(float_outputs)

    @property
    def dimensions(self) -> dict[str, int]:
        """Names and sizes of the dimensions that a layout could split: those of all tensors less those looped over."""
        return {d.name: d.size for shape in self._shapes for d in shape if d.name not in self._looped}

    def check(self, mesh: MeshShape, layout: Layout) -> None:
        """Raises LayoutError if the layout is not legal for a tensor, a product or a lookup of the program."""
        layout.check_mesh(mesh)
        for name in self._looped & set(layout):
            raise LayoutError(f"layout rule {name}:{layout[name]}: {name} is looped over and cannot be split")
        for shape in self._shapes:
            layout.check_shape(shape, mesh)
        for shape in self._products:
            layout.check_shape(shape, mesh)

    def together(self) -> dict[str, set[str]]:
        """For each dimension those that it meets in a tensor, a product or a lookup: no two on one mesh dimension."""
        met: dict[str, set[str]] = {name: set() for name in self.dimensions}
        for shape in (*self._shapes, *self._products):
            for name in set(shape.names) & set(met):
                met[name].update(set(shape.names) - {name})
        return met

    def divides(self, name: str, processors: int) -> bool:
        """Whether a dimension of this name has, in every tensor, a size that divides over so many processors."""
        return all(size % processors == 0 for size in self._sizes[name])

    def ledger(self, mesh: MeshShape, layout: Layout) -> Ledger:
        """Collectives and matrix products of one step on each processor, forward and backward."""
        return self._run(mesh, layout).finished()

    def products(self, mesh: MeshShape, layout: Layout) -> list[tuple[Operation, Product]]:
        """The einsums of the program, each with its products of forward and backward pass in one step."""
        einsums = [op for op in self.record.operations if op.name == "einsum"]
        return list(zip(einsums, self._run(mesh, layout).products, strict=True))

    def _run(self, mesh: MeshShape, layout: Layout) -> _Run:
        run = _Run(self, mesh, layout)
        for op in self.record.operations:
            run.operation(op)
        return run

    def traffic(self, mesh: MeshShape, layout: Layout) -> int:
        """Bytes that all but products and collectives read and write, roughly: each value that is computed from activations
        and parameters is written and read once, and its gradient too.
        """
        total = 0
        for op in self.record.operations:
            for o in op.outputs:
                if o in self._gradients and o not in self._of_parameters:
                    tensor = self.record.tensors[o]
                    size = tensor.dtype.itemsize * math.prod(layout.local_sizes(tensor.shape, mesh))
                    total += size * op.repeats * self.microbatches
        return 4 * total

    def parameter_bytes(self, mesh: MeshShape, layout: Layout) -> int:
        """Bytes of the parameters (or of their gradients) on one processor."""
        tensors = [self.record.tensors[i] for i in self._parameters]
        return sum(t.dtype.itemsize * math.prod(layout.local_sizes(t.shape, mesh)) for t in tensors)


@dataclass
class _Run:
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
        for i in self.of._parameters:
            missing = self.summed - self.axes(self.shape(i))
            self.collect("allreduce", missing, self.elements(self.shape(i)), self.itemsize(i), 1)

    # Under the layout

    def shape(self, tensor: int) -> Shape:
        return self.of.record.tensors[tensor].shape

    def itemsize(self, tensor: int) -> int:
        return self.of.record.tensors[tensor].dtype.itemsize

    def axis(self, name: str) -> str | None:
        mesh_dimension = self.layout.get(name)
        return mesh_dimension if mesh_dimension and self.mesh[mesh_dimension] > 1 else None

    def axes(self, shape: Iterable) -> Axes:
        return frozenset(a for d in shape if (a := self.axis(d.name)))

    def elements(self, shape: Shape) -> int:
        return math.prod(self.layout.local_sizes(shape, self.mesh))

    def varies(self, tensor: int) -> Axes:
        if tensor not in self.varying:
            outside = self.summed if tensor in self.of._of_parameters else frozenset()
            self.varying[tensor] = self.axes(self.shape(tensor)) | outside
        return self.varying[tensor]

    # What is communicated

    def collect(self, kind: str, axes: Axes, elements: int, itemsize: int, count: int) -> None:
        if axes and count and elements:
            key = (kind, tuple(a for a in self.mesh if a in axes), elements, itemsize)
            self.collectives[key] = self.collectives.get(key, 0) + count

    def cast(self, tensor: int, axes: Axes, repeats: int) -> None:
        """`tensor` has to vary over `axes`: backward, its gradient is summed over those that are new to it."""
        missing = axes - self.varies(tensor)
        if missing and tensor in self.of._gradients and (tensor, missing, repeats) not in self.casts:
            self.casts.add((tensor, missing, repeats))
            self.collect(
                "allreduce", missing, self.elements(self.shape(tensor)), self.itemsize(tensor), self.runs(repeats)
            )

    def runs(self, repeats: int) -> int:
        return repeats * self.of.microbatches

    def operation(self, op: Operation) -> None:
        union = frozenset[str]().union(*(self.varies(i) for i in op.inputs))
        rule: Callable[[_Run, Operation, Axes], Axes] = _RULES.get(op.name, _local)
        varying = rule(self, op, union)
        for output in op.outputs:
            self.varying[output] = varying | self.axes(self.shape(output))

    def finished(self) -> Ledger:
        made = [
            Collective(kind, axes, elements, elements * itemsize, count)
            for (kind, axes, elements, itemsize), count in self.collectives.items()
        ]
        return Ledger(tuple(made), tuple(self.products))

    def sum_over(self, axes: Axes, op: Operation, shape: Shape, itemsize: int, times: int = 1) -> None:
        self.collect("allreduce", axes, self.elements(shape), itemsize, times * self.runs(op.repeats))

    def relayout(self, before: Shape, after: Shape, op: Operation, itemsize: int, backward: bool) -> None:
        """Moves a tensor; backward its gradient moves the other way, a slice being an allgather there."""
        old, new = self.layout.axes(before, self.mesh), list(self.layout.axes(after, self.mesh))
        old, local = list(old), self.elements(before)
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


def _local(run: _Run, op: Operation, union: Axes) -> Axes:
    for i in op.inputs:
        run.cast(i, union, op.repeats)
    return union


def _slice_of_loop(run: _Run, op: Operation, union: Axes) -> Axes:
    return union


def _vary_over(run: _Run, op: Operation, union: Axes) -> Axes:
    names = next(v for v in op.arguments.values() if isinstance(v, list | tuple))
    union |= frozenset(a for name in names if (a := run.axis(name)))
    return _local(run, op, union)


def _einsum(run: _Run, op: Operation, union: Axes) -> Axes:
    _local(run, op, union)
    record, (output,) = run.of.record, op.outputs
    everything = _union(op, record)
    rename = op.arguments.get("rename") or {}
    kept = {d.name for d in run.shape(output)} | set(rename)
    contracted = run.axes(d for d in everything if d.name not in kept)
    flops = 2 * run.elements(Shape(everything))
    shared = tuple(a for a in run.mesh if a in union)
    dtype = str(max((record.tensors[i].dtype for i in op.inputs), key=lambda d: d.itemsize))
    moved = sum(run.elements(run.shape(i)) * run.itemsize(i) for i in (*op.inputs, output))
    times = 1 + sum(i in run.of._gradients for i in op.inputs)
    run.products.append(Product(flops, moved, dtype, times * run.runs(op.repeats), op.scope, shared))
    before = Shape(d for d in everything if d.name in kept)
    scattered = run.axes(run.shape(output)) & contracted
    local = run.elements(before) if rename else run.elements(run.shape(output))
    for a in sorted(scattered):
        run.collect("reduce_scatter", frozenset([a]), local, run.itemsize(output), run.runs(op.repeats))
        if output in run.of._gradients:
            run.collect("allgather", frozenset([a]), local, run.itemsize(output), run.runs(op.repeats))
        local //= run.mesh[a]
    run.collect("allreduce", contracted - scattered, local, run.itemsize(output), run.runs(op.repeats))
    return (union - contracted) | scattered


def _reduce_sum(run: _Run, op: Operation, union: Axes) -> Axes:
    (x,), (output,) = op.inputs, op.outputs
    kept = {d.name for d in run.shape(output)}
    axes = run.axes(d for d in run.shape(x) if d.name not in kept)
    run.sum_over(axes, op, run.shape(output), run.itemsize(output))
    return union - axes


def _reduce_extreme(run: _Run, op: Operation, union: Axes) -> Axes:
    axes_left = _reduce_sum(run, op, union)
    if op.inputs[0] in run.of._gradients:  # how many attain it, and their gradient's sum
        gone = union - axes_left
        run.sum_over(gone, op, run.shape(op.outputs[0]), run.itemsize(op.outputs[0]))
    return axes_left


def _moved(run: _Run, op: Operation, union: Axes) -> Axes:
    (x, *_), (output, *_) = op.inputs, op.outputs
    if len(op.inputs) == len(op.outputs) == 1:
        run.relayout(run.shape(x), run.shape(output), op, run.itemsize(x), output in run.of._gradients)
        return (union - run.axes(run.shape(x))) | run.axes(run.shape(output))
    return _local(run, op, union)


def _unstack(run: _Run, op: Operation, union: Axes) -> Axes:
    (x,) = op.inputs
    gone = next(d for d in run.shape(x) if not run.shape(op.outputs[0]).has(d))
    if axis := run.axis(gone.name):
        whole = run.elements(run.shape(x)) * run.mesh[axis]
        run.collect("allgather", frozenset([axis]), whole, run.itemsize(x), run.runs(op.repeats))
        union -= {axis}
    return union


def _gather(run: _Run, op: Operation, union: Axes) -> Axes:
    (table, _), (output,) = op.inputs, op.outputs
    dim = next(v for key, v in op.arguments.items() if key in ("2", "dim"))
    axis = run.axis(dim if isinstance(dim, str) else dim.name)
    axes = frozenset([axis]) if axis else frozenset[str]()
    run.cast(table, union | axes, op.repeats)
    run.sum_over(axes, op, run.shape(output), run.itemsize(output))
    return (union | axes) - axes


def _softmax(run: _Run, op: Operation, union: Axes) -> Axes:
    (x,) = op.inputs
    dim = next(v for key, v in op.arguments.items() if key in ("1", "dim"))
    name = dim if isinstance(dim, str) else dim.name
    rows = Shape(d for d in run.shape(x) if d.name != name)
    axes = run.axes(d for d in run.shape(x) if d.name == name)
    run.sum_over(axes, op, rows, run.itemsize(x), 2 + (x in run.of._gradients))
    return union


def _cross_entropy(run: _Run, op: Operation, union: Axes) -> Axes:
    logits, labels = op.inputs
    axes = run.axes(d for d in run.shape(logits) if not run.shape(labels).has(d))
    run.cast(logits, run.varies(logits) | run.varies(labels), op.repeats)
    times = 4 if op.name.endswith("uniform") else 3  # maximum, sum, the label's logit, the sum of all
    run.sum_over(axes, op, run.shape(labels), 4, times)
    return union - axes


def _dropout(run: _Run, op: Operation, union: Axes) -> Axes:
    (x,) = op.inputs
    shared = set(op.arguments.get("shared", ()))
    union |= run.axes(d for d in run.shape(x) if d.name not in shared)
    run.cast(x, union, op.repeats)
    return union


_RULES: Mapping[str, Callable[[_Run, Operation, Axes], Axes]] = {
    "einsum": _einsum,
    "reduce_sum": _reduce_sum,
    "reduce_logsumexp": _reduce_extreme,
    "reduce_max": _reduce_extreme,
    "reduce_min": _reduce_extreme,
    "rename": _moved,
    "reshape": _moved,
    "slice_dimension": _moved,
    "unstack": _unstack,
    "gather": _gather,
    "softmax": _softmax,
    "softmax_cross_entropy": _cross_entropy,
    "softmax_cross_entropy_and_uniform": _cross_entropy,
    "dropout": _dropout,
    "slice_of_loop": _slice_of_loop,
    "vary_over": _vary_over,
}
"""What operations do besides computing locally; those that are not here communicate nothing."""


def _union(op: Operation, record: Record) -> list:
    found = {}
    for i in op.inputs:
        for d in record.tensors[i].shape:
            found.setdefault(d.name, d)
    return list(found.values())


def _sliced(op: Operation, record: Record) -> set[str]:
    (stack,), (piece,) = op.inputs, op.outputs
    return set(record.tensors[stack].shape.names) - set(record.tensors[piece].shape.names)
