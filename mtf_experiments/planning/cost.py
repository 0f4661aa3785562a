"""How long a training step takes: matrix products, what else goes through memory, and the network.

The model is a roofline: each matrix product takes the longer of its arithmetic and its memory traffic, whatever else is
stored or read in memory takes its bytes, each collective what the network's levels make of it. Nothing overlaps in
`seconds`; in `overlapped` all communication hides behind the rest or the other way round. The truth lies between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtf_experiments.mtf import Collective, Ledger, Product
from mtf_experiments.planning.hardware import Hardware, collective_seconds


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on each processor, part by part."""

    products: float
    """Matrix products."""
    elementwise: float
    """Reading and writing memory for everything else."""
    communication: Mapping[tuple[str, ...], float]
    """Collectives, by mesh dimensions."""

    @property
    def compute(self) -> float:
        """All but communication."""
        return self.products + self.elementwise

    @property
    def communicating(self) -> float:
        """All communication."""
        return sum(self.communication.values())

    @property
    def seconds(self) -> float:
        """The step if nothing overlaps."""
        return self.compute + self.communicating

    @property
    def overlapped(self) -> float:
        """The step if communication and computation overlap wherever they can."""
        return max(self.compute, self.communicating)


def step_time(ledger: Ledger, traffic: float, hardware: Hardware, mesh: Mapping[str, int]) -> StepTime:
    """The time of a program with this `ledger` whose other operations move `traffic` bytes of memory."""
    communication: dict[tuple[str, ...], float] = {}
    for c in ledger.collectives:
        taken = collective_time(c, hardware, mesh)
        communication[c.mesh_dimensions] = communication.get(c.mesh_dimensions, 0.0) + taken
    return StepTime(
        products=sum(product_time(p, hardware) for p in ledger.products),
        elementwise=traffic / hardware.memory_bandwidth,
        communication=communication,
    )


def product_time(product: Product, hardware: Hardware) -> float:
    """Seconds of all runs of a matrix product."""
    arithmetic = product.flops / (hardware.peak(product.dtype) * hardware.attainable)
    return product.count * max(arithmetic, product.bytes / hardware.memory_bandwidth)


def collective_time(collective: Collective, hardware: Hardware, mesh: Mapping[str, int]) -> float:
    """Seconds of all runs of a collective."""
    hops = hardware.hops(mesh, collective.mesh_dimensions)
    return collective.count * collective_seconds(collective.kind, collective.bytes, hops)
