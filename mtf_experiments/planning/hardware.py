"""What a machine can do: arithmetic, memory, and the network as the dimensions of a mesh meet it.

A profile is a Gin file in `gin/hardware/`. All rates are those of one device, in bytes, FLOPs and seconds. The network is
a list of levels, from the outermost (the slowest, usually) to the innermost; the product of their sizes is the largest
machine of this kind. Processors are numbered with the innermost level running fastest, and mesh dimensions are laid
over them in order, the last one innermost: `rows:16;cols:32` on levels of 16 x 16 chips with 2 cores puts cols along one
side of the torus and the cores of a chip, rows along the other side.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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
    bytes; `memory_bandwidth` in bytes per second. `topology`, where there is one, is the name that the TPU compiler has for
    this machine at its largest. With `any_order` the mesh may be laid over the levels in any order, as `jax.make_mesh` does on
    TPUs.
    """

    name: str
    float32_flops: float
    bfloat16_flops: float
    memory: float
    memory_bandwidth: float
    levels: Sequence[Level] = ()
    attainable: float = 1.0
    topology: str = ""
    any_order: bool = False

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

    def hops(self, mesh: Mapping[str, int], dimensions: Sequence[str]) -> list[Hop]:
        """What a collective over the mesh `dimensions` crosses, innermost first.

        A mesh dimension whose size fills more than one level crosses each of them in its turn; one that fills a part of a
        ring shares its links with the groups that lie between its members.
        """
        along = _laid_over(tuple(self.levels), self.any_order, tuple(mesh.items()))
        return [hop for name in reversed(list(mesh)) if name in dimensions for hop in along[name]]


@functools.cache
def _laid_over(
    levels: tuple[Level, ...], any_order: bool, mesh: tuple[tuple[str, int], ...]
) -> Mapping[str, tuple[Hop, ...]]:
    """What each mesh dimension crosses, innermost first, in the part of the machine that so many processors get.

    That part has whole inner switches and as square a part of the torus as can be; of several, and of several orders, that
    in which mesh dimensions cross fewest levels.
    """
    processors = math.prod(size for _, size in mesh)

    def cost(option: tuple[Level, ...]) -> tuple[int, int, int]:
        hops = [hop for found in _along(option, mesh).values() for hop in found if hop.size > 1]
        return len(hops), math.prod(level.size for level in option), max(level.size for level in option)

    orders = itertools.permutations(levels) if any_order else [levels]
    options = [part for order in orders for part in _parts(order, processors)]
    return _along(min(options, key=cost), mesh) if levels else {name: () for name, _ in mesh}


def _parts(levels: tuple[Level, ...], processors: int) -> Iterator[tuple[Level, ...]]:
    """The ways to take so many processors of a machine. A side of a torus shorter than `closes` is a line."""
    if not levels:
        yield ()
        return
    *outer, inner = levels
    sizes = [min(inner.size, processors)]
    if inner.kind != SWITCH:
        sizes = [k for k in range(1, inner.size + 1) if inner.size % k == 0 or processors % k == 0]
    for size in sizes:
        left = -(-processors // size)
        if left <= math.prod(level.size for level in outer):
            has_ends = inner.kind == RING and 1 < size < (inner.closes or inner.size)
            here = replace(inner, size=size, kind=LINE if has_ends else inner.kind)
            yield from ((*part, here) for part in _parts(tuple(outer), left))


def _along(levels: Sequence[Level], mesh: Sequence[tuple[str, int]]) -> dict[str, tuple[Hop, ...]]:
    found, stride = {}, 1
    for name, size in reversed(mesh):
        found[name] = tuple(_span(levels, stride, size))
        stride *= size
    return found


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
    links on average, and the two directions share it: n/4 size / bandwidth; through a switch (n-1)/n size / bandwidth. An
    exchange sends `size` to one neighbour.
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
