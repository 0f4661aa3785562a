"""What a machine can do: arithmetic, memory, and the network as the dimensions of a mesh meet it.

A profile is a Gin file in `gin/hardware/`. All rates are those of one device, in bytes, FLOPs and seconds. The network is
a list of levels, from the outermost (the slowest, usually) to the innermost; the product of their sizes is the largest
machine of this kind. Processors are numbered with the innermost level running fastest, and mesh dimensions are laid
over them in order, the last one innermost: `rows:16;cols:32` on levels of 16 x 16 chips with 2 cores puts cols along one
side of the torus and the cores of a chip, rows along the other side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import gin

from mtf_experiments.errors import UserError

RING, LINE, SWITCH = "ring", "line", "switch"


@gin.configurable
@dataclass(frozen=True)
class Level:
    """One level of a network: `size` neighbours joined by a `ring` (one side of a torus), a `switch`, or a `line`.

    `bandwidth`: bytes per second that a device sends through this level when all devices do so at once; of a ring or line, to
    both neighbours together. `latency`: seconds for a message to the next neighbour. A part of at least `closes` neighbours
    is a ring too; a smaller one is a line (0: all of them are needed).
    """

    name: str
    kind: str
    size: int
    bandwidth: float
    latency: float = 1e-6
    closes: int = 0


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
            if level.kind not in (RING, LINE, SWITCH):
                raise UserError(
                    f"hardware {self.name}: level {level.name} is a {level.kind!r}; want {RING!r}, {LINE!r} or {SWITCH!r}"
                )
        most, wanted = math.prod(level.size for level in self.levels), math.prod(mesh.values())
        if wanted > most:
            sizes = " x ".join(f"{level.size} ({level.name})" for level in self.levels) or "1"
            raise UserError(
                f"hardware {self.name} has at most {most:,} devices: {sizes}; the mesh "
                f"{';'.join(f'{n}:{s}' for n, s in mesh.items())} has {wanted:,}"
            )

    def slice(self, processors: int) -> list[Level]:
        """The levels of the part of the machine that so many processors get: whole inner levels, the torus as square as can be.

        A side that is shorter than `closes` is a line.
        """
        levels, left = [], processors
        for kind, group in itertools.groupby(reversed(self.levels), key=lambda level: level.kind):
            members = list(group)  # innermost first
            for level, size in zip(members, _sides(left, [m.size for m in members], square=kind != SWITCH), strict=True):
                has_ends = kind == RING and 1 < size < (level.closes or level.size)
                levels.insert(0, replace(level, size=size, kind=LINE if has_ends else kind))
                left = -(-left // size)
        return levels

    def hops(self, mesh: Mapping[str, int], dimensions: Sequence[str]) -> list[Hop]:
        """What a collective over the mesh `dimensions` crosses, innermost first.

        A mesh dimension whose size fills more than one level crosses each of them in its turn; one that fills a part of a
        ring shares its links with the groups that lie between its members.
        """
        levels = self.slice(math.prod(mesh.values()))
        hops: list[Hop] = []
        stride = 1
        for name in reversed(list(mesh)):
            if name in dimensions:
                hops += _span(levels, stride, mesh[name])
            stride *= mesh[name]
        return hops


def _sides(processors: int, most: Sequence[int], square: bool) -> list[int]:
    """Sizes, none above `most`, whose product holds so many processors: as equal as can be, or the first ones full."""
    if not square:
        sizes = []
        for limit in most:
            sizes.append(min(limit, processors))
            processors = -(-processors // sizes[-1])
        return sizes
    options = itertools.product(*([k for k in range(1, m + 1) if m % k == 0 or processors % k == 0] for m in most))
    enough = [o for o in options if math.prod(o) >= min(processors, math.prod(most))]
    return list(min(enough, key=lambda o: (math.prod(o), max(o), [-k for k in o])))


def _span(levels: Sequence[Level], stride: int, size: int) -> list[Hop]:
    """The parts of the levels that a dimension of `size` takes whose neighbours lie `stride` processors apart."""
    hops, below = [], 1
    for level in reversed(levels):
        top = below * level.size
        first, last = max(stride, below), min(stride * size, top)
        if last > first:
            hops.append(Hop(level, -(-last // first), max(1, stride // below)))
        below = top
    if hops and math.prod(hop.size for hop in hops) < size:  # sizes that are no factors of the levels
        rest = -(-size // math.prod(hop.size for hop in hops[:-1]))
        hops[-1] = replace(hops[-1], size=rest)
    return hops


@dataclass(frozen=True)
class Hop:
    """The part of a level that a collective crosses: `size` members; `sharing` groups use the same links of a ring at once."""

    level: Level
    size: int
    sharing: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a member sends. Only around a whole ring do both directions of its links help."""
        if self.level.kind == SWITCH or self.size == 1:
            return self.level.bandwidth
        whole = self.level.kind == RING and self.size == self.level.size
        return self.level.bandwidth / self.sharing / (1 if whole else 2)


def collective_seconds(kind: str, size: float, hops: Sequence[Hop]) -> float:
    """Time of one collective of `size` bytes per processor (allgather: of its result) over `hops`, innermost first.

    Ring algorithms, level by level (Thakur, Rabenseifner and Gropp 2005): of n members an allreduce takes
    2 (n-1)/n size / bandwidth, an allgather or reduce-scatter half of that. Over several levels an allreduce is a
    reduce-scatter inside, an allreduce of the parts outside, an allgather inside. In an alltoall every byte travels n/4
    links on average, and the two directions share it: n/4 size / bandwidth; through a switch (n-1)/n size / bandwidth. An exchange sends `size` to one neighbour.
    """
    seconds, part = 0.0, size
    for hop in hops:
        k, share = hop.size, (hop.size - 1) / hop.size
        if kind in ("allreduce", "reduce_scatter", "allgather"):
            rounds = 2 if kind == "allreduce" else 1
            seconds += rounds * (share * part / hop.bandwidth + (k - 1) * hop.level.latency)
            part /= k
        elif kind == "alltoall":
            distance = max(k / 4, share) if hop.level.kind != SWITCH else share
            seconds += distance * size / hop.bandwidth + (k - 1) * hop.level.latency
        elif kind == "exchange":
            seconds = max(seconds, size / hop.bandwidth + hop.level.latency)
        else:
            raise ValueError(f"unknown kind of collective: {kind}")
    return seconds
