"""Studies: many plans, one picture.  A study is a Gin file in `gin/planning/`; its results are a table, JSON and a plot.

python -m mtf_experiments.plan --study=planning/mesh_shapes.gin --output=results/planning
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin

from mtf_experiments.files import write_text
from mtf_experiments.planning import compilers
from mtf_experiments.planning.hardware import Hardware
from mtf_experiments.planning.plan import Experiment, on_accelerators, timed
from mtf_experiments.reporting.console import duration_of, size, table

Load = Callable[[Sequence[str], Sequence[str], Sequence[type]], list[Any]]
_METRICS = {
    "efficiency": "model FLOP/s, part of the peak",
    "seconds": "predicted step time (s)",
    "memory": "predicted memory per device (GiB)",
}


@gin.configurable
@dataclass(frozen=True, kw_only=True)
class Study:
    """Plans of one base experiment under many changes.

    `cases` maps a series to its points, a point (its place on the x axis, or a name) to Gin bindings and files on top of
    `base`: `{"data": {8: ["mesh_shape='rows:8'"]}}`. `metric`, one of efficiency, seconds and memory, is what is drawn.
    With `widths` (macros and their multiples, `{"d_ff": 1024, "num_heads": 1}`) each series has one case, whose widest model
    that fits is found by bisection; `steps` says in what steps of the multiples it may grow, x is the first macro's value.
    `compile` names targets of compilers that say whether each point fits; the first of them decides in plots and bisections.
    """

    title: str
    base: Sequence[str]
    hardware: str
    cases: Mapping[str, Mapping[Any, Sequence[str]]]
    metric: str = "efficiency"
    x: str = ""
    log_x: bool = False
    log_y: bool = False
    compile: Sequence[str] = ()
    widths: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Point:
    """One plan of a study; bytes are those of one device."""

    series: str
    x: Any
    processors: int
    seconds: float
    efficiency: float
    communication: float
    """Share of the step that is communication."""
    memory: int
    fits: bool
    compiled: tuple[compilers.Compiled, ...]

    @property
    def really_fits(self) -> bool:
        """What the first compiler says, where one was asked."""
        return self.compiled[0].fits if self.compiled else self.fits


def run(study: Study, load: Load, experiment: type) -> list[Point]:
    """All points of the study. Raises UserError for a case that is no legal experiment."""
    points = []

    def plan(series: str, x: Any, bindings: Sequence[str]) -> Point:
        files = [study.hardware, *study.base, *(b for b in bindings if b.endswith(".gin"))]
        exp, hardware = load(files, [b for b in bindings if not b.endswith(".gin")], [experiment, Hardware])
        points.append(_point(series, x, exp, hardware, study.compile))
        return points[-1]

    for series, cases in study.cases.items():
        for x, bindings in cases.items():
            if study.widths:
                _bisect(
                    study, series, lambda w, b, series=series, more=bindings: plan(series, w, [*more, *b]).really_fits
                )
                points.sort(key=lambda p: (list(study.cases).index(p.series), p.x))
            else:
                plan(series, x, bindings)
    return points


def _bisect(study: Study, series: str, fits: Callable[[int, list[str]], bool]) -> None:
    """Tries widths until that which still fits and that which no longer does are within an eighth of each other."""
    (_, unit), *_ = study.widths.items()
    step = study.steps.get(series, 1)

    def at(k: int) -> bool:
        return fits(k * unit, [f"{macro}={k * multiple}" for macro, multiple in study.widths.items()])

    low, high = 0, step
    while high < 2**20 and at(high):
        low, high = high, 2 * high
    while high - low > max(step, low // 8):
        middle = (low + high) // 2 // step * step
        if at(middle):
            low = middle
        else:
            high = middle


def _point(series: str, x: Any, exp: Experiment, hardware: Hardware, targets: Sequence[str]) -> Point:
    mesh = exp.dry_mesh(None)
    hardware.check(mesh)
    forecast, time = timed(exp, mesh, hardware)
    products = forecast.ledger.products
    peak = hardware.peak(max(products, key=lambda p: p.flops * p.count).dtype)
    programs = on_accelerators(exp).programs
    return Point(
        series=series,
        x=x,
        processors=mesh.processors,
        seconds=time.seconds,
        efficiency=exp.flops_per_step / mesh.processors / peak / time.seconds,
        communication=time.communicating / time.seconds,
        memory=forecast.total_bytes,
        fits=forecast.total_bytes <= hardware.memory,
        compiled=tuple(compilers.compile_step(programs, target, mesh) for target in targets),
    )


def write(study: Study, name: str, points: Sequence[Point], folder: Path) -> list[Path]:
    """Writes `name`.json, .md and .png into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [{**vars(p), "compiled": [compilers.as_json(c) for c in p.compiled]} for p in points]
    paths = [folder / f"{name}.{kind}" for kind in ("json", "md", "png")]
    about = {"title": study.title, "base": study.base, "hardware": study.hardware, "note": study.note}
    write_text(paths[0], json.dumps(about | {"points": found}, indent=1) + "\n")
    write_text(paths[1], markdown(study, name, points))
    draw(study, points, paths[2])
    return paths


def markdown(study: Study, name: str, points: Sequence[Point]) -> str:
    """The study as a page: what it is, how it was made, its table."""
    said = [target.removeprefix("tpu:") for target in study.compile]
    rows = [("series", study.x or "case", "devices", "step", "efficiency", "communication", "memory", "fits", *said)]
    for p in points:
        row = (p.series, str(p.x), f"{p.processors:,}", duration_of(p.seconds), f"{p.efficiency:.1%}")
        row = (*row, f"{p.communication:.1%}", size(p.memory), "yes" if p.fits else "NO")
        rows.append((*row, *(_verdict(c) for c in p.compiled)))
    lines = [
        f"# {study.title}",
        "",
        study.note,
        "",
        "```",
        table(rows, right=(*range(2, 7), *range(8, 8 + len(said)))),
        "```",
        "",
    ]
    lines += [f"`python -m mtf_experiments.plan --study=planning/{name}.gin --output=results/planning`", ""]
    return "\n".join(lines)


def _verdict(compiled: compilers.Compiled) -> str:
    if compiled.fits:
        return size(compiled.peak_bytes)
    return f"NO: {size(compiled.needed_bytes) if compiled.needed_bytes else compiled.reason}"


def draw(study: Study, points: Sequence[Point], path: Path) -> None:
    """The metric of all points, a line for each series; points that do not fit are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    numeric = all(isinstance(p.x, int | float) for p in points)
    names = list(dict.fromkeys(p.x for p in points))
    figure, axes = plt.subplots(figsize=(8, 4.8) if numeric else (8, 1.6 + 0.32 * len(names)), layout="constrained")
    for number, one in enumerate(dict.fromkeys(p.series for p in points)):
        mine, colour = [p for p in points if p.series == one], f"C{number}"
        places = [p.x if numeric else names.index(p.x) for p in mine]
        values = [p.memory / 2**30 if study.metric == "memory" else getattr(p, study.metric) for p in mine]
        xs, ys = (places, values) if numeric else (values, places)
        axes.plot(xs, ys, "o-" if numeric else "o", color=colour, markerfacecolor="white", label=one)
        fitting = [i for i, p in enumerate(mine) if p.really_fits]
        axes.plot([xs[i] for i in fitting], [ys[i] for i in fitting], "o", color=colour)
    value_axis, set_scale = (axes.yaxis, axes.set_yscale) if numeric else (axes.xaxis, axes.set_xscale)
    if study.log_y:
        set_scale("log")
        value_axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        value_axis.set_minor_formatter(
            FuncFormatter(lambda v, _: f"{v:g}" if str(f"{v:g}").lstrip("0.")[0] in "25" else "")
        )
    else:
        (axes.set_ylim if numeric else axes.set_xlim)(0)
    if numeric:
        if study.log_x:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if len(names) <= 12:
            axes.set_xticks(names)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(study.x)
        axes.set_ylabel(_METRICS[study.metric])
    else:
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(_METRICS[study.metric])
    axes.set_title(study.title, fontsize=11)
    axes.grid(alpha=0.3)
    if len({p.series for p in points}) > 1:
        axes.legend(fontsize=8)
    if not all(p.really_fits for p in points):
        figure.text(0.01, 0.01, "hollow: does not fit", fontsize=8, color="0.4")
    figure.savefig(path, dpi=120)
    plt.close(figure)
