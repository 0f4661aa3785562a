"""Layout search: of all meshes and layouts that are legal for a recorded program, those that take the least time.

    found = search(estimator, hardware, processors=512, names=("rows", "cols"))
    found.candidates[0].layout, found.candidates[0].seconds

Every legal layout over every factorization of the processors is timed, where there are few enough; else the layouts of
one balanced mesh are, and only the best of them on every mesh: `exact` says which. Times are those of `cost.step_time`
on the estimated ledger.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mtf_experiments.mtf import Layout, LayoutError, MeshShape
from mtf_experiments.planning.cost import StepTime, step_time
from mtf_experiments.planning.estimate import Estimator
from mtf_experiments.planning.hardware import Hardware

MOST = 60_000
"""Candidates that are timed one by one; of more, a part is (about a minute on a laptop)."""
_KEPT = 100


@dataclass(frozen=True)
class Candidate:
    """A mesh, a layout, and the estimated time of a step."""

    mesh: MeshShape
    layout: Layout
    time: StepTime
    parameter_bytes: int
    """Of the parameters on one processor; so much again are gradients."""

    @property
    def seconds(self) -> float:
        """Of a step, nothing overlapping."""
        return self.time.seconds


@dataclass(frozen=True)
class Found:
    """The candidates, fastest first, how many were timed, and whether those were all that are legal."""

    candidates: tuple[Candidate, ...]
    timed: int
    exact: bool


def search(
    estimator: Estimator,
    hardware: Hardware,
    processors: int,
    names: Sequence[str],
    traffic_scale: float = 1.0,
    most: int = MOST,
) -> Found:
    """All legal candidates on so many processors, on meshes whose dimensions are called `names`.

    Of candidates that differ only in which name a mesh dimension has, or in rules that change neither time nor sizes,
    the one with the shortest layout stands for all. `traffic_scale` corrects `Estimator.traffic`.
    """
    meshes = [MeshShape(dict(zip(names, sizes, strict=True))) for sizes in factorizations(processors, len(names))]
    counted = {
        mesh: sum(1 for _ in itertools.islice(layouts(estimator, mesh), most + 1)) for mesh in _structures(meshes)
    }
    total = sum(counted[_structure(mesh, counted)] for mesh in meshes)
    exact = total <= most
    if exact:
        pairs: Iterator[tuple[MeshShape, Layout]] = ((m, layout) for m in meshes for layout in layouts(estimator, m))
        timed = [_timed(estimator, hardware, mesh, layout, traffic_scale) for mesh, layout in pairs]
    else:
        balanced = min(meshes, key=lambda m: (max(m.values()), list(m.values())))
        sample = itertools.islice(layouts(estimator, balanced), most // 2)
        first = [_timed(estimator, hardware, balanced, layout, traffic_scale) for layout in sample]
        best = sorted(first, key=_order)[:_KEPT]
        others = {
            (mesh, Layout({name: axis for name, axis in c.layout.items() if mesh[axis] > 1})): None
            for mesh in meshes
            for c in best
            if mesh != balanced and is_legal(estimator, mesh, c.layout)
        }
        timed = first + [_timed(estimator, hardware, mesh, layout, traffic_scale) for mesh, layout in others]
    return Found(tuple(_distinct(sorted(timed, key=_order))), len(timed), exact)


def factorizations(n: int, parts: int) -> list[tuple[int, ...]]:
    """All ordered products of `parts` positive integers that make `n`."""
    if parts == 1:
        return [(n,)]
    return [(k, *rest) for k in range(1, n + 1) if n % k == 0 for rest in factorizations(n // k, parts - 1)]


def layouts(estimator: Estimator, mesh: MeshShape) -> Iterator[Layout]:
    """Every layout over the mesh dimensions of more than one processor that is legal for the program, the empty one too."""
    used = [name for name, size in mesh.items() if size > 1]
    dimensions = [(name, size) for name, size in estimator.dimensions.items()]
    neighbours = estimator.together()

    def extend(i: int, rules: dict[str, str]) -> Iterator[Layout]:
        if i == len(dimensions):
            yield Layout(dict(sorted(rules.items(), key=lambda rule: used.index(rule[1]))))
            return
        yield from extend(i + 1, rules)
        name, _ = dimensions[i]
        for axis in used:
            if any(rules.get(other) == axis for other in neighbours[name]) or not estimator.divides(name, mesh[axis]):
                continue
            rules[name] = axis
            yield from extend(i + 1, rules)
            del rules[name]

    return extend(0, {})


def is_legal(estimator: Estimator, mesh: MeshShape, layout: Layout) -> bool:
    """Whether the layout is legal for the program."""
    try:
        estimator.check(mesh, layout)
    except LayoutError:
        return False
    return True


def _structures(meshes: Sequence[MeshShape]) -> list[MeshShape]:
    """One mesh for each set of sizes: how many layouts are legal does not depend on their order."""
    return list({tuple(sorted(mesh.values())): mesh for mesh in meshes}.values())


def _structure(mesh: MeshShape, among: Mapping[MeshShape, int]) -> MeshShape:
    return next(m for m in among if sorted(m.values()) == sorted(mesh.values()))


def _timed(
    estimator: Estimator, hardware: Hardware, mesh: MeshShape, layout: Layout, traffic_scale: float
) -> Candidate:
    traffic = estimator.traffic(mesh, layout) * traffic_scale
    time = step_time(estimator.ledger(mesh, layout), traffic, hardware, mesh)
    return Candidate(mesh, layout, time, estimator.parameter_bytes(mesh, layout))


def _order(candidate: Candidate) -> tuple[float, int]:
    return float(f"{candidate.seconds:.3e}"), len(candidate.layout)


def _distinct(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    seen = set()
    for c in candidates:
        sizes = sorted(c.mesh.values())
        parts = tuple(float(f"{t:.3e}") for t in (c.time.products, c.time.elementwise, c.time.communicating))
        if (key := (tuple(sizes), parts, c.parameter_bytes)) not in seen:
            seen.add(key)
            yield c
