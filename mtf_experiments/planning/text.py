"""A plan in words and tables, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mtf_experiments.mtf import MeshShape
from mtf_experiments.planning.best import Ranked, Searched, reason
from mtf_experiments.planning.compilers import Compiled
from mtf_experiments.planning.cost import collective_time
from mtf_experiments.planning.plan import Plan
from mtf_experiments.reporting.console import block, count, duration, duration_of, rate, size, table

PAPER = {
    # Parameters, processors: FLOP/s reached, peak, hours of the whole run (Shazeer et al. 2018, sections 8.4 and 9).
    (4_899_222_528, 512): "the paper: 6 of 11.5 PFLOP/s (52 %) on 512 TPU v2 cores, 13 hours for the run",
    (2_885_976_064, 128): "the paper: 22 hours for English to French on 128 TPU v2 cores",
}


def render(plan: Plan, rows: dict[str, str], steps: int, compiled: Sequence[Compiled] = ()) -> str:
    """All sections of the plan of a run of so many steps; `rows` say what is planned."""
    sections = [
        block("plan", rows | {"hardware": _hardware(plan)}),
        block("parameters", {"": _parameters(plan)}),
        block("memory per device", {"": _memory(plan)}),
        block("communication per device and step", {"": _communication(plan)}),
        block("step time", _time(plan, steps)),
        block("layout", {"": _layout(plan)}),
        block("why", {"": _why(plan)}),
    ]
    if compiled:
        sections.append(block("what compilers make of it", {"": _compiled(plan, compiled)}))
    return "\n\n".join(sections)


def _hardware(plan: Plan) -> str:
    h = plan.hardware
    lines = [
        f"{h.name}: {rate(h.peak(plan.dtype), 'FLOP/s')} for {plan.dtype}, {size(h.memory)} at "
        f"{rate(h.memory_bandwidth, 'B/s')} a device; all {plan.mesh.processors}: "
        f"{rate(h.peak(plan.dtype) * plan.mesh.processors, 'FLOP/s')}"
    ]
    slowest = min((n for n in plan.mesh if plan.mesh[n] > 1), key=lambda n: _bandwidth(plan, n), default=None)
    for name in plan.mesh:
        hops = h.hops(plan.mesh, [name])
        if plan.mesh[name] > 1 and hops:
            parts = " and ".join(
                f"{hop.size} along {hop.level.name} ({hop.level.kind}, {rate(hop.bandwidth, 'B/s')} a device"
                f"{f', links shared by {hop.sharing}' if hop.sharing > 1 and hop.level.kind != 'switch' else ''})"
                for hop in reversed(hops)
                if hop.size > 1
            )
            lines.append(f"{name}: {parts}{'; the slowest' if name == slowest and len(plan.mesh) > 1 else ''}")
    return "\n".join(lines)


def _bandwidth(plan: Plan, name: str) -> float:
    return min((hop.bandwidth for hop in plan.hardware.hops(plan.mesh, [name]) if hop.size > 1), default=math.inf)


def _parameters(plan: Plan) -> str:
    modules: dict[str, list[int]] = {}
    for name, (shape, local) in plan.forecast.parameters.items():
        entry = modules.setdefault(name.rpartition("/")[0] or name, [0, 0])
        entry[0] += shape.elements
        entry[1] += local
    total = plan.forecast.parameter_count
    rows = [("module", "parameters", "share", "per device")]
    rows += [(m, f"{n:,}", f"{n / total:.1%}", size(local)) for m, (n, local) in modules.items()]
    rows.append(("all", f"{total:,}", "", size(plan.forecast.parameter_bytes)))
    return table(rows, right=(1, 2, 3))


def _memory(plan: Plan) -> str:
    f = plan.forecast
    rows = [
        ("parameters", size(f.parameter_bytes)),
        ("optimizer", size(f.optimizer_bytes)),
        ("gradients", size(f.parameter_bytes)),
        ("activations at the fullest moment", size(f.activation_bytes)),
        ("all", f"{size(f.total_bytes)} of {size(plan.hardware.memory)}: {'fits' if plan.fits else 'DOES NOT FIT'}"),
    ]
    lines = ["\n".join(f"{name:<34} {value}" for name, value in rows)]
    if len(plan.choices) > 1:
        rows = [("remat", "microbatches", "memory", "step time", "")]
        for c in plan.choices:
            note = "" if c.total_bytes <= plan.hardware.memory else "does not fit"
            note = note + (" (this run)" if c is plan.choices[0] else "")
            rows.append((c.remat, str(c.microbatches), size(c.total_bytes), duration_of(c.seconds), note.strip()))
        lines += ["", table(rows, right=(1, 2, 3))]
    return "\n".join(lines)


def _communication(plan: Plan) -> str:
    if not plan.forecast.ledger.collectives:
        return "none"
    rows = [("collective", "over", "elements", "count", "bytes", "time", "where")]
    timed = [(collective_time(c, plan.hardware, plan.mesh), c) for c in plan.forecast.ledger.collectives]
    for seconds, c in sorted(timed, key=lambda item: -item[0]):
        kind = c.kind if c.reduction in ("", "sum") else f"{c.kind} ({c.reduction})"
        over = " ".join(c.mesh_dimensions)
        each = (f"{c.elements:,}", f"{c.count:,}", size(c.bytes * c.count), duration_of(seconds))
        rows.append((kind, over, *each, c.where))
    for axes, seconds in plan.time.communication.items():
        total = plan.forecast.ledger.bytes_by_mesh_dimension()[axes]
        rows.append(("all", " ".join(axes), "", "", size(total), duration_of(seconds), ""))
    return table(rows, right=(2, 3, 4, 5))


def _time(plan: Plan, steps: int) -> dict[str, str]:
    t, executed = plan.time, plan.forecast.ledger.flops * plan.mesh.processors
    communication = [f"{' and '.join(axes)} {duration_of(s)}" for axes, s in t.communication.items()]
    lines = {
        "FLOPs": f"{count(plan.model_flops)} of the model; executed {count(executed)} ({executed / plan.model_flops:.2f}x)",
        "compute": f"{duration_of(t.compute)} = matrix products {duration_of(t.products)} + memory traffic of the rest "
        f"{duration_of(t.elementwise)}",
        "communication": f"{duration_of(t.communicating)}{' = ' + ' + '.join(communication) if communication else ''}",
        "step": f"{duration_of(t.seconds)} if nothing overlaps, {duration_of(t.overlapped)} if all communication does",
        "efficiency": f"{plan.efficiency:.1%} of the peak ({rate(_reached(plan, t.seconds), 'FLOP/s')}), at best "
        f"{plan.efficiency_in(t.overlapped):.1%}",
        "whole run": f"{steps:,} steps: {duration(steps * t.seconds)}",
    }
    known = PAPER.get((plan.forecast.parameter_count, plan.mesh.processors))
    if known and plan.hardware.name == "TPU v2":
        lines["whole run"] += f"\n{known}"
        lines["assumed"] = (
            "every product at peak speed or waiting for memory at its full bandwidth, rings at their full bandwidth;\n"
            "input, padding of small tiles, launch of kernels and stragglers cost nothing: the paper's run had them"
        )
    return lines


def _reached(plan: Plan, seconds: float) -> float:
    return plan.model_flops / seconds


def _layout(plan: Plan) -> str:
    rows = [("tensor", "shape", "slice", "bytes", "split by")]
    for p in plan.placed:
        slices = "[" + ", ".join(map(str, p.slices)) + "]"
        rows.append(
            (p.name, str(p.shape), slices, size(p.bytes), " ".join(p.rules) or "nothing: whole on every device")
        )
    return table(rows, right=(3,))


def _why(plan: Plan) -> str:
    total = plan.time.seconds
    lines = [f"{part / total:6.1%}  {what}" for what, part in plan.shares.items() if abs(part) > 5e-4 * total]
    dear = [e for e in plan.einsums if e.seconds > 0.01 * total]
    lines += ["", "einsums of more than 1 % of the step, and the mesh dimensions that they leave unused:"]
    rows = [("share", "unused", "wasted", "einsum")]
    for e in dear:
        wasted = f"{e.wasted / total:.1%}" if e.unused else ""
        rows.append((f"{e.seconds / total:.1%}", " ".join(e.unused) or "none", wasted, e.name))
    lines.append(table(rows, right=(0, 2)))
    if plan.changes:
        lines += ["", "single changes of the layout that would save time (estimated):"]
        lines += [f"{c.saved / total:6.1%}  {c.what}" for c in plan.changes[:5]]
    else:
        lines += ["", "no single change of the layout would save time"]
    if not plan.fits:
        fitting = [c for c in plan.choices if c.total_bytes <= plan.hardware.memory]
        lines.append("")
        if fitting:
            best = min(fitting, key=lambda c: c.seconds)
            lines.append(
                f"to fit: remat='{best.remat}', {best.microbatches} microbatches ({duration_of(best.seconds)} a step)"
            )
        else:
            lines.append(
                "no choice of remat and microbatches above fits: split more dimensions, or take more processors (--search)"
            )
    return "\n".join(lines)


def render_search(searched: Searched, mesh: MeshShape) -> str:
    """The best layouts, why the others lose, and where the experiment's own stands."""
    found = searched.found
    how = (
        f"all {found.timed:,} legal meshes and layouts"
        if found.exact
        else f"{found.timed:,} meshes and layouts (there are more)"
    )
    head = (
        f"search for {mesh.processors} devices of {searched.hardware.name}, mesh dimensions {', '.join(mesh)}: {how} were\n"
        "timed; the best were traced exactly and made to fit into memory"
    )
    rows = [("step", "memory", "remat", "microbatches", "mesh", "layout", "why")]

    def add(r: Ranked, why: str) -> None:
        memory = size(r.forecast.total_bytes)
        layout = str(r.layout) or "(empty)"
        rows.append((duration_of(r.seconds), memory, r.remat, str(r.microbatches), str(r.mesh), layout, why))

    for r in searched.fitting:
        add(r, reason(r, searched.fitting[0], searched.estimator, searched.hardware))
    for r in searched.too_large[:5]:
        add(r, f"does not fit into {size(searched.hardware.memory)}")
    if searched.own and not any(
        (r.mesh, r.layout) == (searched.own.mesh, searched.own.layout) for r in searched.fitting
    ):
        why = "does not fit"
        if searched.own.fits and searched.fitting:
            why = reason(searched.own, searched.fitting[0], searched.estimator, searched.hardware)
        add(searched.own, f"this experiment's own: {why}")
    lines = [head, "", table(rows, right=(0, 1, 3))]
    if not searched.fitting:
        lines += ["", "none of those tried fits: take more devices, or ones with more memory"]
    return "\n".join(lines)


def _compiled(plan: Plan, compiled: Sequence[Compiled]) -> str:
    f, traced = plan.forecast, plan.forecast.ledger.elements_by_mesh_dimension()
    axes = sorted({a for c in compiled if c.ledger for a in c.ledger.elements_by_mesh_dimension()} | set(traced))
    rows = [("", "arguments", "temporaries", *(f"elements over {' '.join(a)}" for a in axes), "")]

    def add(name: str, arguments: int, temporaries: int, elements: Mapping[tuple[str, ...], int], verdict: str) -> None:
        rows.append((name, f"{arguments:,}", f"{temporaries:,}", *(f"{elements.get(a, 0):,}" for a in axes), verdict))

    for c in compiled:
        add("predicted", f.argument_bytes, f.temporary_bytes(c.target), traced, "")
        if c.ledger is None:
            rows.append((c.target, "", "", *("" for _ in axes), f"DOES NOT FIT: {c.reason}"))
            continue
        fits = "" if c.target == "cpu" else "fits, "
        verdict = f"{fits}at most {size(c.peak_bytes)} in use, compiled in {duration(c.seconds)}"
        found = c.ledger.elements_by_mesh_dimension()
        add(c.target, c.argument_bytes or 0, c.temporary_bytes or 0, found, verdict)
    notes = (
        "Bytes of one device. The compiler's collectives include the optimizer's means and norms over split dimensions, which\n"
        "the trace does not see. For cpu the prediction includes the copy its compiler makes of donated stacks of parameters."
    )
    return table(rows, right=range(1, 3 + len(axes))) + "\n" + notes
