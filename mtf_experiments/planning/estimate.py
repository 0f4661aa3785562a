"""What a training step communicates and computes under any mesh and layout, read off the record of its program.

    estimate = Estimator(record, batch_dimensions=("batch", "length"), microbatches=1)
    estimate.legal(mesh, layout)          # or why it is not
    estimate.ledger(mesh, layout)         # as `mtf.ledger` of the gradient program, without tracing it

What operations do is in `rules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mtf_experiments.mtf import Layout, LayoutError, Ledger, MeshShape, Operation, Product, Record, Shape
from mtf_experiments.planning.rules import Run, union_of


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
        self._products = [Shape(union_of(op, record)) for op in record.operations if op.name in ("einsum", "gather")]
        self._sizes: dict[str, set[int]] = {}
        for shape in self._shapes:
            for d in shape:
                self._sizes.setdefault(d.name, set()).add(d.size)
        self._looped = {d for op in record.operations if op.name == "slice_of_loop" for d in _sliced(op, record)}
        if parameters is None:
            parameters = [i for i in record.arguments if np.issubdtype(record.tensors[i].dtype, np.floating)]
        self.parameters = list(parameters)
        self.differentiated = set(self.parameters)  # tensors that have a gradient
        self.of_parameters = set(self.parameters)  # tensors that depend on nothing but parameters
        for op in record.operations:
            float_outputs = [o for o in op.outputs if np.issubdtype(record.tensors[o].dtype, np.floating)]
            if op.name != "stop_gradient" and any(i in self.differentiated for i in op.inputs):
                self.differentiated.update(float_outputs)
            if op.inputs and all(i in self.of_parameters for i in op.inputs):
                self.of_parameters.update(float_outputs)

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

    def _run(self, mesh: MeshShape, layout: Layout) -> Run:
        run = Run(self, mesh, layout)
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
                if o in self.differentiated and o not in self.of_parameters:
                    tensor = self.record.tensors[o]
                    size = tensor.dtype.itemsize * math.prod(layout.local_sizes(tensor.shape, mesh))
                    total += size * op.repeats * self.microbatches
        return 4 * total

    def parameter_bytes(self, mesh: MeshShape, layout: Layout) -> int:
        """Bytes of the parameters (or of their gradients) on one processor."""
        tensors = [self.record.tensors[i] for i in self.parameters]
        return sum(t.dtype.itemsize * math.prod(layout.local_sizes(t.shape, mesh)) for t in tensors)


def _sliced(op: Operation, record: Record) -> set[str]:
    (stack,), (piece,) = op.inputs, op.outputs
    return set(record.tensors[stack].shape.names) - set(record.tensors[piece].shape.names)
