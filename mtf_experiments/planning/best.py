"""The best layouts that a search found, traced exactly, made to fit into memory, and compared with the winner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtf_experiments import mtf
from mtf_experiments.errors import UserError
from mtf_experiments.planning.cost import StepTime
from mtf_experiments.planning.estimate import Estimator
from mtf_experiments.planning.explain import einsums
from mtf_experiments.planning.forecast import Forecast
from mtf_experiments.planning.hardware import Hardware
from mtf_experiments.planning.plan import Experiment, estimator_of, on_accelerators, timed
from mtf_experiments.planning.search import Candidate, Found, search
from mtf_experiments.reporting.console import duration_of

_MOST_TRACED = 60
_SAME = 1.02


@dataclass(frozen=True)
class Ranked:
    """A mesh and layout whose step was traced, with what it takes to fit; `fits` is false where nothing does."""

    mesh: mtf.MeshShape
    layout: mtf.Layout
    remat: str
    microbatches: int
    forecast: Forecast
    time: StepTime
    fits: bool
    squeezed: bool
    """Whether it needs more rematerialisation or microbatches than the experiment asks for."""

    @property
    def seconds(self) -> float:
        """Of a step, nothing overlapping."""
        return self.time.seconds


@dataclass(frozen=True)
class Searched:
    """What a search for an experiment found: the best that fit, faster ones that do not, and its own layout."""

    found: Found
    fitting: tuple[Ranked, ...]
    too_large: tuple[Ranked, ...]
    own: Ranked | None
    estimator: Estimator
    hardware: Hardware

    def as_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        return {
            "hardware": self.hardware.name,
            "timed": self.found.timed,
            "exact": self.found.exact,
            "own": self.own and self._row(self.own),
            "best": [self._row(r) for r in self.fitting],
            "too_large": [self._row(r) for r in self.too_large],
        }

    def _row(self, r: Ranked) -> dict[str, Any]:
        return {
            "mesh": str(r.mesh),
            "layout": str(r.layout),
            "remat": r.remat,
            "microbatches": r.microbatches,
            "seconds": r.seconds,
            "total_bytes": r.forecast.total_bytes,
            "reason": reason(r, self.fitting[0], self.estimator, self.hardware) if self.fitting else "",
        }


def search_for(exp: Experiment, mesh: mtf.MeshShape, hardware: Hardware, wanted: int = 10) -> Searched:
    """The best layouts for `exp` on as many processors as `mesh` has, with as many mesh dimensions.

    Raises UserError if the machine is too small, or the experiment's own layout is not legal.
    """
    hardware.check(mesh)
    estimator = estimator_of(exp, mesh)
    forecast, _ = timed(exp, mesh, hardware)
    scale = forecast.footprint.traffic / max(estimator.traffic(mesh, mtf.Layout(exp.layout)), 1)
    found = search(estimator, hardware, mesh.processors, list(mesh), scale)
    fitting, too_large = best(exp, hardware, found, wanted)
    own = made_to_fit(exp, hardware, mesh, mtf.Layout(exp.layout))
    return Searched(found, tuple(fitting), tuple(too_large), own, estimator, hardware)


def best(exp: Experiment, hardware: Hardware, found: Found, wanted: int = 10) -> tuple[list[Ranked], list[Ranked]]:
    """The `wanted` fastest that fit, by their exact traces, and those on the way that do not fit at all."""
    fitting: list[Ranked] = []
    too_large: list[Ranked] = []
    # Parameters and gradients alone must fit, whatever is recomputed.
    possible = [c for c in found.candidates if 2 * c.parameter_bytes <= hardware.memory]
    for candidate in _worth_listing(possible):
        if len(fitting) == wanted or len(fitting) + len(too_large) == _MOST_TRACED:
            break
        if ranked := made_to_fit(exp, hardware, candidate.mesh, candidate.layout):
            (fitting if ranked.fits else too_large).append(ranked)
    return sorted(fitting, key=lambda r: r.seconds), too_large


def made_to_fit(exp: Experiment, hardware: Hardware, mesh: mtf.MeshShape, layout: mtf.Layout) -> Ranked | None:
    """The layout with the fastest choice of rematerialisation and microbatches that fits; None if it is not legal.

    What a microbatch's activations hold shrinks with it, so one trace tells how many microbatches are needed.
    """
    there = replace(exp, mesh_shape=str(mesh), layout=str(layout))
    tried: list[Ranked] = []
    own = exp.training.microbatches

    def attempt(remat: str, microbatches: int) -> Ranked | None:
        changed = on_accelerators(there, remat=remat, microbatches=microbatches)
        try:
            forecast, time = timed(changed, mesh, hardware)
        except UserError:  # a batch that does not divide
            return None
        fits = forecast.total_bytes <= hardware.memory
        squeezed = (remat, microbatches) != (exp.model.remat, own)
        tried.append(Ranked(mesh, layout, remat, microbatches, forecast, time, fits, squeezed))
        return tried[-1]

    first = attempt(exp.model.remat, own)
    if first is None or first.fits:
        return first
    for remat in dict.fromkeys((exp.model.remat, "full")):
        start = first if remat == exp.model.remat else attempt(remat, own)
        if start is None or start.fits:
            continue
        free = hardware.memory - (start.forecast.total_bytes - start.forecast.activation_bytes)
        if free > 0:
            parts = own * 2 ** math.ceil(math.log2(max(start.forecast.activation_bytes / free, 1)))
            while parts <= exp.batch_size and (made := attempt(remat, parts)) is not None and not made.fits:
                parts *= 2
    return min(tried, key=lambda r: (not r.fits, r.seconds))


def _worth_listing(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Candidates without those that add rules to a faster one on the same mesh and change next to nothing."""
    kept: list[Candidate] = []
    for c in candidates:
        rules = set(c.layout.items())
        if not any(k.mesh == c.mesh and set(k.layout.items()) < rules and c.seconds < _SAME * k.seconds for k in kept):
            kept.append(c)
            yield c


def reason(ranked: Ranked, winner: Ranked, estimator: Estimator, hardware: Hardware) -> str:
    """Why `ranked` is slower than `winner`: what takes longer, the most first."""
    if ranked is winner:
        return "the best"
    more = {
        "memory traffic": ranked.time.elementwise - winner.time.elementwise,
        "matrix products": ranked.time.products - winner.time.products,
        "communication": ranked.time.communicating - winner.time.communicating,
    }
    lost = ranked.seconds - winner.seconds
    texts = []
    for what, seconds in sorted(more.items(), key=lambda item: -item[1]):
        if seconds <= 0.1 * lost or seconds <= 1e-4 * winner.seconds:
            continue
        text = f"{what} +{duration_of(seconds)}"
        if what == "communication":
            axes, _ = max(ranked.time.communication.items(), key=lambda item: item[1])
            text += f" (most over {' and '.join(axes)})"
        if what == "matrix products":
            idle = [e for e in einsums(estimator, hardware, ranked.mesh, ranked.layout) if e.unused]
            if idle:
                worst = max(idle, key=lambda e: e.wasted)
                text += f" ({worst.name.split(' ')[0]} leaves {' and '.join(worst.unused)} unused)"
        texts.append(text)
    if ranked.squeezed and not winner.squeezed:
        texts.append(f"fits only with remat='{ranked.remat}' and microbatches={ranked.microbatches}")
    return "; ".join(texts) or "a tie"
