"""Pictures of a report: learning curves, results against parameters and tokens, logit scales."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtf_experiments.reporting.console import count
from mtf_experiments.reporting.runs import Run
from mtf_experiments.reporting.tables import bleu, by_seed, law, scale_result


def draw(runs: Sequence[Run], folder: Path, prefix: str) -> list[Path]:
    """Draws all that `runs` have numbers for; returns the paths."""
    makers = {"curves": _curves, "width": _width, "tokens": _tokens, "scales": _scales}
    paths = []
    for name, make in makers.items():
        path = folder / f"{prefix}-{name}.png"
        figure, axes = _figure()
        if make(axes, runs):
            axes.grid(alpha=0.3)
            figure.savefig(path, dpi=120, metadata={"Software": None})
            paths.append(path)
        _close(figure)
    return paths


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(8, 5), layout="constrained")


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)


def _curves(axes: Any, runs: Sequence[Run]) -> bool:
    """Development NLL (points) and training NLL (thin) over steps."""
    drawn = False
    lowest, highest = [], []
    for i, run in enumerate(runs):
        train, development = run.curve("train/nll"), run.curve("validation/nll_per_token")
        if not development.steps:
            continue
        colour = f"C{i % 10}"
        style = "-" if i < 10 else "--"
        axes.plot(train.steps, train.values, style, color=colour, alpha=0.35, linewidth=0.8)
        axes.plot(development.steps, development.values, f"o{style}", color=colour, label=run.name, markersize=4)
        after = [v for s, v in zip(development.steps, development.values, strict=True) if s > 0]
        if after:
            lowest.append(min(after))
            highest.append(max(after))
        drawn = True
    if drawn:
        if lowest:
            low, high = min(lowest), max(highest)
            axes.set_ylim(low - 0.1 * (high - low) - 0.02, high + 0.5 * (high - low) + 0.02)
        axes.set_xlabel("steps")
        axes.set_ylabel("nats per token")
        axes.set_title("Learning curves: development (points), training with dropout (thin)", fontsize=11)
        axes.legend(fontsize=7, ncols=1 + len(runs) // 9)
    return drawn


def _width(axes: Any, runs: Sequence[Run]) -> bool:
    """The result against parameters, with intervals; seeds are joined by their mean."""
    finished = [r for r in runs if r.finished and r.parameters]
    if len({r.parameters for r in finished}) < 2:
        return False
    translates = any(r.translates for r in finished)
    data = sorted({r.train_tokens or 0 for r in finished})
    for i, tokens in enumerate(data):
        mine = [r for r in finished if (r.train_tokens or 0) == tokens]
        points = []
        for r in mine:
            value, low, high = _interval(r, translates)
            if value is None:
                continue
            points.append((r.parameters, value))
            error = [[value - low], [high - value]] if low is not None and high is not None else None
            axes.errorbar([r.parameters], [value], yerr=error, fmt="o", color=f"C{i}", capsize=3, markersize=4)
        means = sorted((n, float(np.mean([v for m, v in points if m == n]))) for n in {n for n, _ in points})
        label = f"{tokens / 1e6:.3g}M training tokens" if len(data) > 1 and tokens else None
        axes.plot(*zip(*means, strict=True), "-", color=f"C{i}", label=label)
    fitted = law(runs)
    if fitted is not None and fitted.by_parameters and not translates and len(data) == 1:
        every = [r for r in finished if r.tokens]
        grid = np.geomspace(min(r.parameters or 1 for r in every), max(r.parameters or 1 for r in every), 50)
        tokens = float(np.median([r.tokens or 1 for r in every]))
        ratio = _tokens_per_word(every[0])
        axes.plot(
            grid, [np.exp(ratio * fitted.predict(n, tokens)) for n in grid], ":", color="0.4", label=fitted.formula()
        )
    axes.set_xscale("log")
    if not translates:
        axes.set_yscale("log")
        _plain(axes.yaxis)
    _plain(axes.xaxis)
    axes.set_xlabel("parameters")
    axes.set_ylabel("BLEU (development)" if translates else "perplexity per word (development)")
    axes.set_title(f"Width: {len(finished)} finished runs, 95 % intervals over sentences", fontsize=11)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
    return True


def _interval(run: Run, translates: bool) -> tuple[float | None, float | None, float | None]:
    if translates:
        found = bleu(run, "validation")
        if not found:
            return None, None, None
        half = found.get("interval")
        return found["bleu"], found["bleu"] - half if half else None, found["bleu"] + half if half else None
    found = scale_result(run, "validation")
    if not found:
        return None, None, None
    low, high = found.get("ppl_word_low"), found.get("ppl_word_high")
    return float(found["ppl_word"]), None if low is None else float(low), None if high is None else float(high)


def _tokens_per_word(run: Run) -> float:
    evaluation = run.evaluation() or {}
    return evaluation["tokens"] / evaluation["per_word"] if evaluation else 1.0


def _tokens(axes: Any, runs: Sequence[Run]) -> bool:
    """The result against tokens of training data, a line for each width."""
    finished = [r for r in runs if r.finished and r.train_tokens and not r.translates]
    if len({r.train_tokens for r in finished}) < 2:
        return False
    widths = sorted({(r.parameters or 0, r.setting("d_ff")) for r in finished})
    for i, (parameters, d_ff) in enumerate(widths):
        groups = [g for g in by_seed(finished) if (g[0].parameters, g[0].setting("d_ff")) == (parameters, d_ff)]
        points = []
        for group in groups:
            values = [v for r in group if (v := _interval(r, False)[0]) is not None]
            if values:
                points.append((group[0].train_tokens or 0, float(np.mean(values))))
        if points:
            points.sort()
            axes.plot(
                *zip(*points, strict=True),
                "o-",
                color=f"C{i}",
                label=f"d_ff {d_ff}, {parameters / 1e6:.3g}M parameters",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.set_xlabel("tokens of training data")
    axes.set_ylabel("perplexity per word (development)")
    axes.set_title("Data: where width stops helping", fontsize=11)
    axes.legend(fontsize=8)
    return True


def _scales(axes: Any, runs: Sequence[Run]) -> bool:
    """Perplexity per word against the factor on the logits, relative to that at 1."""
    drawn = False
    for i, run in enumerate(r for r in runs if r.finished):
        evaluation = run.evaluation() or {}
        scales = sorted((s["logit_scale"], float(s["ppl_word"])) for s in evaluation.get("scales", ()))
        at_one = next((p for s, p in scales if s == 1.0), None)
        if len(scales) < 3 or at_one is None:
            continue
        best = min(scales, key=lambda item: item[1])
        style = "-" if i < 10 else "--"
        xs, ys = [s for s, _ in scales], [p / at_one for _, p in scales]
        axes.plot(xs, ys, f"o{style}", color=f"C{i % 10}", label=run.name, markersize=3)
        axes.plot(best[0], best[1] / at_one, "o", color=f"C{i % 10}", markersize=8, markerfacecolor="none")
        drawn = True
    if drawn:
        axes.set_xlabel("factor on the logits")
        axes.set_ylabel("perplexity per word / that at 1")
        axes.set_title("Logit scales on the development set; circles: the best", fontsize=11)
        axes.legend(fontsize=7, ncols=1 + len(runs) // 9)
    return drawn


def _plain(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    plain = FuncFormatter(lambda v, _: count(v) if v >= 10_000 else f"{v:,.4g}")
    axis.set_major_formatter(plain)
    axis.set_minor_locator(LogLocator(subs=(2.0, 3.0, 4.0, 5.0, 7.0)))
    axis.set_minor_formatter(plain)
