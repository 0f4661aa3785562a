"""What a machine can do: arithmetic, memory, and the network as the dimensions of a mesh meet it.

A profile is a Gin file in `gin/hardware/`. All rates are those of one device, in bytes, FLOPs and seconds. The network is
a list of levels, from the outermost (the slowest, usually) to the innermost; the product of their sizes is the largest
machine of this kind. Processors are numbered with the innermost level running fastest, and mesh dimensions are laid
over them in order, the last one innermost: `rows:16;cols:32` on levels of 16 x 16 chips with 2 cores puts cols along one
side of the torus and the cores of a chip, rows along the other side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import gin

from mtf_experiments.errors import UserError

RING, SWITCH = "ring", "switch"


@gin.configurable
@dataclass(frozen=True)
class Level:
    """One level of a network: `size` neighbours joined by a `ring` (one side of a torus) or a `switch`.

    `bandwidth`: bytes per second that a device sends through this level when all devices do so at once; of a ring, to
    both neighbours together. `latency`: seconds for a message to the next neighbour.
    """

    name: str
    kind: str
    size: int
    bandwidth: float
    latency: float = 1e-6


@gin.configurable
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device and the network between them.

    `float32_flops` and `bfloat16_flops`: peak FLOP/s of matrix products whose operands are of that type, at JAX's default
    precision. `attainable` is the part of the peak that a large product reaches. `memory` is what a program may use, in
    bytes; `memory_bandwidth` in bytes per second. `topology`, where there is one, is the name that the TPU compiler
    has for this machine at its largest.
    """

    name: str
    float32_flops: float
    bfloat16_flops: float
    memory: float
    memory_bandwidth: float
    levels: Sequence[Level] = ()
    attainable: float = 1.0
    topology: str = ""

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of products of operands of `dtype`."""
        return self.bfloat16_flops if dtype in ("bfloat16", "float16") else self.float32_flops

    def check(self, mesh: Mapping[str, int]) -> None:
        """Raises UserError if the machine has no place for the mesh."""
        for level in self.levels:
            if level.kind not in (RING, SWITCH):
                raise UserError(
                    f"hardware {self.name}: level {level.name} is a {level.kind!r}; want {RING!r} or {SWITCH!r}"
                )
        most, wanted = math.prod(level.size for level in self.levels), math.prod(mesh.values())
        if wanted > most:
            sizes = " x ".join(f"{level.size} ({level.name})" for level in self.levels) or "1"
            raise UserError(
                f"hardware {self.name} has at most {most:,} devices: {sizes}; the mesh "
                f"{';'.join(f'{n}:{s}' for n, s in mesh.items())} has {wanted:,}"
            )

    def hops(self, mesh: Mapping[str, int], dimensions: Sequence[str]) -> list[Hop]:
        """What a collective over the mesh `dimensions` crosses, innermost first.

        A mesh dimension whose size fills more than one level crosses each of them in its turn.
        """
        hops: list[Hop] = []
        stride = 1
        for name in reversed(list(mesh)):
            if name in dimensions:
                hops += self._span(stride, mesh[name])
            stride *= mesh[name]
        return hops

    def _span(self, stride: int, size: int) -> list[Hop]:
        """The parts of the levels that a dimension of `size` takes whose neighbours lie `stride` processors apart."""
        hops, below = [], 1
        for level in reversed(self.levels):
            top = below * level.size
            first, last = max(stride, below), min(stride * size, top)
            if last > first:
                part = -(-last // first)
                hops.append(Hop(level, part, max(1, stride // below), part == level.size))
            below = top
        if below < stride * size and hops:  # sizes that are no factors of the levels: the rest crosses the outermost
            missing = -(-size // math.prod(h.size for h in hops))
            hops[-1] = Hop(hops[-1].level, hops[-1].size * missing, hops[-1].sharing, hops[-1].closed)
        return hops


@dataclass(frozen=True)
class Hop:
    """The part of a level that a collective crosses: `size` members. `sharing` groups use the same links of a ring at once.

    `closed`: the ring is used all around, so that both directions help; in a part of one, only one does.
    """

    level: Level
    size: int
    sharing: int
    closed: bool

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a member sends."""
        if self.level.kind == SWITCH:
            return self.level.bandwidth
        return self.level.bandwidth / self.sharing / (1 if self.closed or self.size == 1 else 2)


def collective_seconds(kind: str, size: float, hops: Sequence[Hop]) -> float:
    """Time of one collective of `size` bytes per processor (allgather: of its result) over `hops`, innermost first.

    Ring algorithms, level by level (Thakur, Rabenseifner and Gropp 2005): of n members an allreduce takes
    2 (n-1)/n size / bandwidth, an allgather or reduce-scatter half of that. Over several levels an allreduce is a
    reduce-scatter inside, an allreduce of the parts outside, an allgather inside. In an alltoall every byte travels
    n/4 links on average of a closed ring and the two directions share it: n/4 size / bandwidth; through a switch
    (n-1)/n size / bandwidth. An exchange sends `size` to one neighbour.
    """
    n = math.prod(hop.size for hop in hops)
    seconds, part = 0.0, size
    for hop in hops:
        k, share = hop.size, (hop.size - 1) / hop.size
        if kind in ("allreduce", "reduce_scatter", "allgather"):
            rounds = 2 if kind == "allreduce" else 1
            seconds += rounds * (share * part / hop.bandwidth + (k - 1) * hop.level.latency)
            part /= k
        elif kind == "alltoall":
            distance = max(k / 4, share) if hop.level.kind == RING else share
            seconds += distance * size / hop.bandwidth + (k - 1) * hop.level.latency
        elif kind == "exchange":
            seconds = max(seconds, size / hop.bandwidth + hop.level.latency)
        else:
            raise ValueError(f"unknown collective {kind} over {n} processors")
    return seconds
