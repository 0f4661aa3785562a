"""Why a step takes the time it does, and which change of layout would help.

The paper's rule (section 8.4): every expensive einsum should have one dimension split over each dimension of the mesh.
Along a mesh dimension that none of its dimensions is split over, all processors compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mtf_experiments.mtf import Layout, LayoutError, MeshShape, Operation, Product
from mtf_experiments.planning.cost import StepTime, product_time, step_time
from mtf_experiments.planning.estimate import Estimator
from mtf_experiments.planning.hardware import Hardware


@dataclass(frozen=True)
class Einsum:
    """An einsum of the program, forward and backward, and how the mesh is used for it."""

    name: str
    flops: int
    """On one processor, in a step."""
    seconds: float
    unused: tuple[str, ...]
    """Mesh dimensions along which all processors compute the same."""
    wasted: float
    """Seconds that would be saved if none were unused."""


@dataclass(frozen=True)
class Change:
    """A single change of layout that makes the step faster."""

    what: str
    layout: Layout
    saved: float
    """Seconds."""


def einsums(estimator: Estimator, hardware: Hardware, mesh: MeshShape, layout: Layout) -> list[Einsum]:
    """The einsums of the program, dearest first; those of one name are taken together."""
    found: dict[tuple[str, tuple[str, ...]], Einsum] = {}
    for operation, product in estimator.products(mesh, layout):
        unused = tuple(a for a, n in mesh.items() if n > 1 and a not in product.mesh_dimensions)
        seconds = product_time(product, hardware)
        wasted = seconds * (1 - 1 / math.prod(mesh[a] for a in unused))
        name, flops = _name(estimator, operation), product.flops * product.count
        if (name, unused) in found:
            old = found[name, unused]
            found[name, unused] = Einsum(name, old.flops + flops, old.seconds + seconds, unused, old.wasted + wasted)
        else:
            found[name, unused] = Einsum(name, flops, seconds, unused, wasted)
    return sorted(found.values(), key=lambda e: -e.seconds)


def _name(estimator: Estimator, operation: Operation) -> str:
    tensors = [estimator.record.tensors[i].shape for i in (*operation.inputs, *operation.outputs)]
    *inputs, output = (f"[{' '.join(shape.names)}]" for shape in tensors)
    return f"{operation.scope} {' x '.join(inputs)} -> {output}".strip()


def shares(
    time: StepTime, products: tuple[Product, ...], hardware: Hardware, mesh: Mapping[str, int], model_flops: float
) -> dict[str, float]:
    """Where the time of a step goes, in seconds that add up to `time.seconds`.

    `useful` is the arithmetic of the model at peak speed (`model_flops` of all processors), so that its share of the
    step is the efficiency.
    """
    processors = math.prod(mesh.values())
    dtype = max(products, key=lambda p: p.flops * p.count).dtype if products else "float32"
    useful = model_flops / processors / hardware.peak(dtype)
    arithmetic = shared = 0.0
    for p in products:
        seconds = p.flops * p.count / hardware.peak(p.dtype)
        arithmetic += seconds
        shared += seconds / math.prod(n for a, n in mesh.items() if a not in p.mesh_dimensions)
    parts = {
        "useful arithmetic": useful,
        "recomputation and what the model's count leaves out": shared - useful,
        "the same products on several processors": arithmetic - shared,
        "products slower than the peak allows, or waiting for memory": time.products - arithmetic,
        "everything else that goes through memory": time.elementwise,
    }
    parts |= {f"communication over {' and '.join(axes)}": s for axes, s in time.communication.items()}
    return parts


def changes(
    estimator: Estimator, hardware: Hardware, mesh: MeshShape, layout: Layout, traffic_scale: float
) -> list[Change]:
    """Single changes (a rule more, less, or with another mesh dimension) that save time, best first."""

    def seconds(changed: Layout) -> float:
        traffic = estimator.traffic(mesh, changed) * traffic_scale
        return step_time(estimator.ledger(mesh, changed), traffic, hardware, mesh).seconds

    now, found = seconds(layout), []
    for what, changed in _neighbours(estimator, mesh, layout):
        try:
            estimator.check(mesh, changed)
        except LayoutError:
            continue
        saved = now - seconds(changed)
        if saved > 1e-3 * now:
            found.append(Change(what, changed, saved))
    return sorted(found, key=lambda c: -c.saved)


def _neighbours(estimator: Estimator, mesh: MeshShape, layout: Layout) -> Iterator[tuple[str, Layout]]:
    rules = dict(layout.items())
    for name in estimator.dimensions:
        for axis in (a for a, n in mesh.items() if n > 1):
            if name not in rules:
                yield f"add {name}:{axis}", Layout({**rules, name: axis})
            elif rules[name] != axis:
                yield f"{name}:{axis} instead of {name}:{rules[name]}", Layout({**rules, name: axis})
        if name in rules:
            yield f"drop {name}:{rules[name]}", Layout({n: a for n, a in rules.items() if n != name})
