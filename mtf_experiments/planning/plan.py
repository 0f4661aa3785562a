"""The plan of an experiment: all that can be known of its training step on a kind of machine before it is paid for.

plan = make_plan(exp, mesh_shape, hardware)
plan.time.seconds, plan.efficiency, plan.forecast.total_bytes, plan.fits
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from mtf_experiments import mtf
from mtf_experiments.errors import UserError
from mtf_experiments.planning.cost import StepTime, step_time
from mtf_experiments.planning.estimate import Estimator
from mtf_experiments.planning.explain import Change, Einsum, changes, einsums, shares
from mtf_experiments.planning.forecast import Forecast, forecast
from mtf_experiments.planning.hardware import Hardware
from mtf_experiments.training.step import Programs


class Experiment(Protocol):
    """What is planned: a dataclass of plain settings that builds the programs of a training step on any mesh."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def model(self) -> Any:
        """Sizes of the model, `remat` and `unroll` among them."""
        ...

    @property
    def training(self) -> Any:
        """How it is trained, `microbatches` among it."""
        ...

    @property
    def layout(self) -> str:
        """Which dimension is split over which mesh dimension."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows of a step."""
        ...

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of a step over all devices."""
        ...

    def programs(self, mesh: Any) -> Programs:
        """Raises UserError with the place of an illegal layout."""
        ...

    def dry_mesh(self, devices: int | None) -> mtf.MeshShape:
        """The mesh on so many devices, or as written."""
        ...


E = TypeVar("E", bound=Experiment)

REMAT = ("none", "communication", "full")
"""What the backward pass recomputes, from the fastest to the most sparing."""


@dataclass(frozen=True)
class Placed:
    """A parameter or activation under the layout: its global shape, what splits it, and one processor's slice."""

    name: str
    shape: mtf.Shape
    slices: tuple[int, ...]
    bytes: int
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """A choice of rematerialisation and microbatches: what it holds and how long a step takes."""

    remat: str
    microbatches: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A training step of an experiment on a kind of machine; bytes and seconds are those of one processor."""

    mesh: mtf.MeshShape
    layout: mtf.Layout
    hardware: Hardware
    forecast: Forecast
    time: StepTime
    model_flops: float
    """Of the model, over all processors (2 for each weight and token forward, 4 backward, and attention)."""
    dtype: str
    """The type of most products' operands."""
    choices: tuple[Choice, ...]
    placed: tuple[Placed, ...]
    einsums: tuple[Einsum, ...]
    changes: tuple[Change, ...]

    @property
    def efficiency(self) -> float:
        """Model FLOPs per second and processor, as a part of the peak."""
        return self.efficiency_in(self.time.seconds)

    def efficiency_in(self, seconds: float) -> float:
        """The efficiency if a step takes so many seconds."""
        return self.model_flops / self.mesh.processors / self.hardware.peak(self.dtype) / seconds

    @property
    def fits(self) -> bool:
        """Whether the step fits into a device's memory."""
        return self.forecast.total_bytes <= self.hardware.memory

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of the step by cause."""
        return shares(self.time, self.forecast.ledger.products, self.hardware, self.mesh, self.model_flops)

    def as_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        return {
            "mesh": dict(self.mesh),
            "layout": dict(self.layout),
            "hardware": self.hardware.name,
            **self.forecast.as_json(),
            "model_flops": self.model_flops,
            "executed_flops": self.forecast.ledger.flops * self.mesh.processors,
            "memory": self.hardware.memory,
            "fits": self.fits,
            "seconds": {
                "products": self.time.products,
                "elementwise": self.time.elementwise,
                "communication": {";".join(axes): s for axes, s in self.time.communication.items()},
                "nothing_overlaps": self.time.seconds,
                "all_overlaps": self.time.overlapped,
            },
            "efficiency": self.efficiency,
            "efficiency_if_all_overlaps": self.efficiency_in(self.time.overlapped),
            "shares": self.shares,
            "choices": [vars(c) for c in self.choices],
            "tensors": [
                {"name": p.name, "shape": str(p.shape), "slice": p.slices, "bytes": p.bytes, "rules": p.rules}
                for p in self.placed
            ],
            "einsums": [vars(e) for e in self.einsums],
            "changes": [{"what": c.what, "layout": str(c.layout), "saved": c.saved} for c in self.changes],
        }


def on_accelerators(exp: E, **changed: Any) -> E:
    """The experiment with its layers scanned unless it says otherwise, and `remat`, `microbatches`, ... changed.

    (On a CPU the trainer unrolls the layers, for speed; a plan is one for accelerators.)
    """
    model = replace(exp.model, unroll=exp.model.unroll or 1)
    if "remat" in changed:
        model = replace(model, remat=changed.pop("remat"))
    training = exp.training
    if "microbatches" in changed:
        training = replace(training, microbatches=changed.pop("microbatches"))
    return replace(exp, model=model, training=training, **changed)


def estimator_of(exp: Experiment, mesh: mtf.MeshShape) -> Estimator:
    """Estimates of the experiment's training step under any layout."""
    programs = on_accelerators(exp, remat="none").programs(mtf.abstract_mesh(mesh))
    return Estimator(programs.record(), programs.SUMMED, exp.training.microbatches)


def timed(exp: Experiment, mesh: mtf.MeshShape, hardware: Hardware) -> tuple[Forecast, StepTime]:
    """Sizes and time of a step, from one trace. Raises UserError for an illegal layout."""
    found = forecast(on_accelerators(exp).programs(mtf.abstract_mesh(mesh)))
    # The optimizer reads gradients, parameters and its state, and writes the latter two.
    traffic = found.footprint.traffic + 3 * found.parameter_bytes + 2 * found.optimizer_bytes
    return found, step_time(found.ledger, traffic, hardware, mesh)


def make_plan(
    exp: Experiment, mesh: mtf.MeshShape, hardware: Hardware, microbatches: Sequence[int] = (), explain: bool = True
) -> Plan:
    """The plan of `exp` on `mesh`. `microbatches`: counts to try besides the experiment's own, where they divide.

    Raises UserError for an illegal layout, and for a mesh larger than the machine.
    """
    hardware.check(mesh)
    found, time = timed(exp, mesh, hardware)
    layout = mtf.Layout(exp.layout)
    own = (exp.model.remat, exp.training.microbatches)
    wanted = [(remat, own[1]) for remat in REMAT] + [(own[0], m) for m in microbatches if not exp.batch_size % m]
    choices = [Choice(*own, found.total_bytes, time.seconds)]
    for remat, parts in dict.fromkeys(wanted) if explain else ():
        if (remat, parts) == own:
            continue
        try:
            other, taken = timed(on_accelerators(exp, remat=remat, microbatches=parts), mesh, hardware)
        except UserError:  # microbatches that do not divide over the mesh
            continue
        choices.append(Choice(remat, parts, other.total_bytes, taken.seconds))
    estimator = estimator_of(exp, mesh) if explain else None
    scale = 1.0
    if estimator is not None:
        scale = found.footprint.traffic / max(estimator.traffic(mesh, layout), 1)
    products = found.ledger.products
    return Plan(
        mesh=mesh,
        layout=layout,
        hardware=hardware,
        forecast=found,
        time=time,
        model_flops=exp.flops_per_step,
        dtype=max(products, key=lambda p: p.flops * p.count).dtype,
        choices=tuple(choices),
        placed=tuple(_placed(found, estimator, mesh, layout)),
        einsums=tuple(einsums(estimator, hardware, mesh, layout)) if estimator else (),
        changes=tuple(changes(estimator, hardware, mesh, layout, scale)) if estimator else (),
    )


def _placed(found: Forecast, estimator: Estimator | None, mesh: mtf.MeshShape, layout: mtf.Layout) -> list[Placed]:
    """Every parameter, and every activation that a product, lookup or softmax makes."""
    made = [_place(name, shape, size, mesh, layout) for name, (shape, size) in found.parameters.items()]
    seen = set()
    for op in estimator.record.operations if estimator else ():
        if op.name in ("einsum", "gather", "softmax"):
            tensor = estimator.record.tensors[op.outputs[0]]  # pyright: ignore[reportOptionalMemberAccess]
            name = f"{op.scope or 'output'} ({op.name})"
            if tensor.shape.elements and (name, tensor.shape) not in seen and len(tensor.shape) > 1:
                seen.add((name, tensor.shape))
                local = math.prod(layout.local_sizes(tensor.shape, mesh))
                made.append(_place(name, tensor.shape, local * tensor.dtype.itemsize, mesh, layout))
    return made


def _place(name: str, shape: mtf.Shape, size: int, mesh: mtf.MeshShape, layout: Mapping[str, str]) -> Placed:
    full = layout if isinstance(layout, mtf.Layout) else mtf.Layout(layout)
    axes = full.axes(shape, mesh)
    rules = tuple(f"{d.name}:{a}" for d, a in zip(shape, axes, strict=True) if a)
    return Placed(name, shape, full.local_sizes(shape, mesh), size, rules)
