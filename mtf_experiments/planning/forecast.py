"""What a training step holds, computes and communicates on one processor, from shapes and the traced program alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from mtf_experiments import mtf
from mtf_experiments.planning.memory import Footprint, footprint_of
from mtf_experiments.reporting import console
from mtf_experiments.training import optimizers
from mtf_experiments.training.step import Programs


@dataclass(frozen=True)
class Forecast:
    """Sizes of one training step on one processor. No devices are needed.

    `parameters` maps each parameter's path to its global shape and its bytes on one processor.
    """

    parameters: Mapping[str, tuple[mtf.Shape, int]]
    optimizer_bytes: int
    batch_bytes: int
    ledger: mtf.Ledger
    footprint: Footprint

    @property
    def parameter_count(self) -> int:
        """Number of all parameters."""
        return sum(shape.elements for shape, _ in self.parameters.values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters on one processor."""
        return sum(size for _, size in self.parameters.values())

    @property
    def activation_bytes(self) -> int:
        """Bytes held beside parameters, optimizer state, batch and one set of gradients, at the fullest moment."""
        return max(self.footprint.peak - self.parameter_bytes, 0)

    def temporary_bytes(self, target: str) -> int:
        """What a compiler holds besides the arguments. That for CPUs copies donated parameters that a loop reads in slices."""
        return self.footprint.peak + (self.footprint.stacks if target == "cpu" else 0)

    @property
    def argument_bytes(self) -> int:
        """What a step is given: parameters, optimizer state, step number, batch."""
        return self.parameter_bytes + self.optimizer_bytes + self.batch_bytes + 4

    @property
    def total_bytes(self) -> int:
        """All that one processor holds at the fullest moment."""
        return self.argument_bytes + max(self.footprint.peak, self.parameter_bytes)

    def as_json(self) -> dict[str, Any]:
        """For `plan.json`. Bytes, elements and FLOPs are per processor and step."""
        return {
            "parameters": self.parameter_count,
            "parameter_bytes": self.parameter_bytes,
            "gradient_bytes": self.parameter_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "activation_bytes": self.activation_bytes,
            "total_bytes": self.total_bytes,
            "matmul_flops": self.ledger.flops,
            "communication": [
                {
                    "kind": c.kind,
                    "mesh_dimensions": list(c.mesh_dimensions),
                    "elements": c.elements,
                    "bytes": c.bytes,
                    "count": c.count,
                    "where": c.scope,
                }
                for c in self.ledger.collectives
            ],
        }

    def rows(self) -> dict[str, str]:
        """Rows of the start-up block."""
        parts = [
            ("parameters", self.parameter_bytes),
            ("gradients", self.parameter_bytes),
            ("optimizer", self.optimizer_bytes),
            ("activations", self.activation_bytes),
        ]
        return {
            "parameters": f"{self.parameter_count:,} ({console.count(self.parameter_count)})",
            "memory per device": f"about {console.size(self.total_bytes)} = "
            + " + ".join(f"{name} {console.size(size)}" for name, size in parts),
            "per device and step": self.ledger.table(),
        }


def forecast(programs: Programs) -> Forecast:
    """The forecast of `programs`, whose mesh may be abstract."""
    shapes = optimizers.state_dimensions(programs.transformation, programs.params)
    state = programs.abstract_state()

    def local_bytes(array: Any, shape: mtf.Shape) -> int:
        return math.prod(programs.layout.local_sizes(shape, programs.mesh_shape)) * array.dtype.itemsize

    traced = mtf.trace(programs.gradient_program, *programs.abstract_gradient_arguments())
    return Forecast(
        parameters={name: (p.shape, local_bytes(p.array, p.shape)) for name, p in state.params.items()},
        optimizer_bytes=sum(jax.tree.leaves(jax.tree.map(local_bytes, state.opt_state, shapes))),
        batch_bytes=sum(local_bytes(x.array, x.shape) for x in programs.abstract_batch().values()),
        ledger=mtf.ledger_of(traced),
        footprint=footprint_of(traced),
    )
