"""What a run will hold, compute and communicate, told before it starts: the start-up block and `plan.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.mtf.ledger import Ledger, trace_ledger
from mtf_experiments.reporting import console
from mtf_experiments.training import optimizers
from mtf_experiments.training.step import Programs


@dataclass(frozen=True)
class Forecast:
    """Sizes of one training step on one processor, from shapes and the traced program alone; no devices are needed."""

    parameter_count: int
    parameter_bytes: int
    optimizer_bytes: int
    ledger: Ledger

    def as_json(self) -> dict[str, Any]:
        """For `plan.json`. Bytes, elements and FLOPs are per processor and step."""
        return {
            "parameters": self.parameter_count,
            "parameter_bytes": self.parameter_bytes,
            "gradient_bytes": self.parameter_bytes,
            "optimizer_bytes": self.optimizer_bytes,
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
        held = 2 * self.parameter_bytes + self.optimizer_bytes
        return {
            "parameters": f"{self.parameter_count:,} ({console.count(self.parameter_count)})",
            "memory per device": f"{console.size(held)} = parameters {console.size(self.parameter_bytes)} + gradients "
            f"{console.size(self.parameter_bytes)} + optimizer {console.size(self.optimizer_bytes)}, and activations",
            "per device and step": self.ledger.table(),
        }


def forecast(programs: Programs) -> Forecast:
    """The forecast of `programs`, whose mesh may be abstract."""
    shapes = optimizers.state_dimensions(programs.transformation, programs.params)
    state = programs.abstract_state()

    def local_bytes(array: Any, shape: mtf.Shape) -> int:
        return math.prod(programs.layout.local_sizes(shape, programs.mesh_shape)) * array.dtype.itemsize

    optimizer = jax.tree.leaves(jax.tree.map(local_bytes, state.opt_state, shapes))
    return Forecast(
        parameter_count=parameters.count(programs.params),
        parameter_bytes=sum(local_bytes(p.array, p.shape) for p in state.params.values()),
        optimizer_bytes=sum(optimizer),
        ledger=trace_ledger(programs.gradient_program, *programs.abstract_gradient_arguments()),
    )
