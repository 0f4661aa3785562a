"""Reports as Markdown and JSON: what was measured, beside the paper, with intervals; what was not run says so."""

from __future__ import annotations

import importlib.resources
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mtf_experiments.reporting.console import count, duration, table
from mtf_experiments.reporting.diagnosis import VERDICTS, diagnose
from mtf_experiments.reporting.runs import WIDTHS, Run
from mtf_experiments.reporting.scaling import Law, fit


def paper() -> dict[str, Any]:
    """The paper's tables, each number with a mark of where it comes from."""
    return json.loads(importlib.resources.files("mtf_experiments.reporting").joinpath("paper.json").read_text("utf-8"))


def scale_result(run: Run, split: str, tuned: bool = False) -> Mapping[str, Any] | None:
    """The scores of a run at logit scale 1, or at that which is best on the development set."""
    evaluation, development = run.evaluation(split), run.evaluation()
    if evaluation is None or (tuned and (development is None or "tuned" not in development)):
        return None
    wanted = development["tuned"]["logit_scale"] if tuned and development else 1.0
    return next((s for s in evaluation["scales"] if s["logit_scale"] == wanted), None)


def bleu(run: Run, split: str) -> Mapping[str, Any] | None:
    """The BLEU of a run."""
    evaluation = run.evaluation(split)
    return evaluation.get("bleu") if evaluation else None


def law(runs: Sequence[Run]) -> Law | None:
    """The scaling law of finished runs: development NLL per token by parameters and by tokens trained on."""
    points = [(r.parameters, r.tokens, scale_result(r, "validation")) for r in runs if r.finished]
    known = [(n, d, s["nll_per_token"]) for n, d, s in points if n and d and s]
    return fit(*zip(*known, strict=True)) if known else None


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Finished runs that differ in nothing but the seed, together."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        if run.finished:
            groups.setdefault(run.without_seed, []).append(run)
    return list(groups.values())


def score(run: Run) -> float | None:
    """What a run is judged by: BLEU of a translation model, else perplexity per word, on the development set."""
    if run.translates:
        found = bleu(run, "validation")
        return found["bleu"] if found else None
    found = scale_result(run, "validation")
    return float(found["ppl_word"]) if found else None


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """All numbers of a report."""
    fitted = law(runs)
    return {
        "runs": [
            {
                "name": r.name,
                "task": r.task,
                "finished": r.finished,
                "step": r.step,
                "total_steps": r.total_steps,
                "seed": r.seed,
                **{w: r.setting(w) for w in WIDTHS},
                "parameters": r.parameters,
                "tokens": r.tokens,
                "train_tokens": r.train_tokens,
                "seconds": r.seconds,
                "evaluations": {s: r.evaluation(s) and _without_places(r.evaluation(s)) for s in _splits(runs)},
                "diagnosis": (d := diagnose(r)) and asdict(d),
            }
            for r in runs
        ],
        "seeds": [
            {"runs": [r.name for r in group], "mean": statistics.mean(values), "deviation": statistics.stdev(values)}
            for group in by_seed(runs)
            if len(values := [v for v in map(score, group) if v is not None]) > 1
        ],
        "law": fitted and asdict(fitted),
    }


def _without_places(evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    return {k: v for k, v in (evaluation or {}).items() if k not in ("checkpoint", "definitions", "metrics")}


def _splits(runs: Sequence[Run]) -> list[str]:
    return list(
        dict.fromkeys(s for r in runs for s, _ in sorted(r.evaluations, key=lambda key: key[0] != "validation"))
    )


def markdown(
    title: str,
    runs: Sequence[Run],
    pictures: Sequence[str],
    comparisons: Iterable[str] = (),
    prompt: str = "",
    samples: Mapping[str, str] | None = None,
) -> str:
    """The report as a page that reads well in a terminal and on a code host.

    `comparisons` are sentences; `samples` has what each run made of `prompt`.
    """
    translates = any(r.translates for r in runs)
    parts = [f"# {title}", ""]
    unfinished = [r for r in runs if not r.finished]
    parts += [
        f"{len(runs)} runs of the task {runs[0].task or '(not evaluated)'}, {len(runs) - len(unfinished)} of them finished. "
        "Intervals are of 95 %, over the sentences of the set; they say nothing of other seeds. Times are of training "
        "alone, at the median of the speeds logged; runs may have shared their machine.",
        "",
        "```",
        _results(runs, translates),
        "```",
        "",
    ]
    if lines := _seeds(runs, translates):
        parts += ["## Seeds", "", "```", lines, "```", ""]
    if lines := list(comparisons):
        parts += ["## Differences in BLEU (paired bootstrap)", "", *(f"- {line}" for line in lines), ""]
    if (found := law(runs)) is not None:
        parts += ["## Scaling law", "", "Development NLL per token, N parameters, D tokens trained on:", ""]
        parts += ["```", found.formula(), "```", ""]
        if any(term and term[1] > 1 for term in (found.by_parameters, found.by_tokens)):
            parts += ["An exponent above 1 says that these runs saturate, not that a power law holds beyond them.", ""]
    parts += ["## Curves", "", "```", _diagnoses(runs), "```", "", VERDICTS, ""]
    parts += ["## Beside the paper", "", _beside(runs, translates), ""]
    if samples:
        parts += [f'## What they make of "{prompt}"', "", *(f"- {name}: {text}" for name, text in samples.items()), ""]
    if signatures := sorted({b["signature"] for r in runs for s in _splits(runs) if (b := bleu(r, s))}):
        parts += ["BLEU: " + "; ".join(f"`{s}`" for s in signatures), ""]
    parts += [line for name in pictures for line in (f"![{name}]({name})", "")]
    return "\n".join(parts)


def _results(runs: Sequence[Run], translates: bool) -> str:
    splits = _splits(runs)
    head = ["run", "d_ff", "heads", "parameters", "steps", "tokens", "time"]
    for split in splits:
        head += [f"{split} BLEU"] if translates else []
        head += [f"{split} ppl/word", "logits tuned"] if not translates else [f"{split} ppl/token"]
    rows = [head]
    for r in runs:
        steps = f"{r.step:,}" if r.finished else f"{r.step:,} of {r.total_steps:,}"
        row = [r.name, str(r.setting("d_ff") or ""), str(r.setting("num_heads") or "")]
        row += [count(r.parameters) if r.parameters else "", steps, count(r.tokens) if r.tokens else ""]
        row.append(duration(r.seconds) if r.seconds else "")
        for split in splits:
            at = "" if r.finished or not (e := r.evaluation(split)) else f" after {e['step']:,}"
            if translates:
                row += [_bleu(bleu(r, split)) + at, _value(scale_result(r, split), "ppl_token")]
            else:
                row += [_perplexity(scale_result(r, split)) + at, _tuned(scale_result(r, split, tuned=True))]
        rows.append(row)
    return table(rows, right=range(1, len(head)))


def _perplexity(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    interval = ""
    if found.get("ppl_word_low") is not None:
        interval = f" ({float(found['ppl_word_low']):.4g}-{float(found['ppl_word_high']):.4g})"
    return f"{float(found['ppl_word']):.4g}{interval}"


def _tuned(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else f"{float(found['ppl_word']):.4g} at x{found['logit_scale']:g}"


def _bleu(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    return f"{found['bleu']:.2f}" + (f" ± {found['interval']:.2f}" if found.get("interval") else "")


def _value(found: Mapping[str, Any] | None, key: str) -> str:
    return "" if found is None else f"{float(found[key]):.4g}"


def _seeds(runs: Sequence[Run], translates: bool) -> str:
    rows = [("d_ff", "heads", "seeds", "BLEU" if translates else "ppl/word", "deviation")]
    for group in by_seed(runs):
        values = [v for v in map(score, group) if v is not None]
        if len(values) > 1:
            widths = (str(group[0].setting("d_ff")), str(group[0].setting("num_heads")))
            rows.append(
                (*widths, str(len(values)), f"{statistics.mean(values):.4g}", f"{statistics.stdev(values):.2g}")
            )
    return table(rows, right=range(5)) if len(rows) > 1 else ""


def _diagnoses(runs: Sequence[Run]) -> str:
    rows = [("run", "best step", "best nats/token", "at the end", "development - training", "verdict")]
    for r in runs:
        if (d := diagnose(r)) is None:
            rows.append((r.name, "", "", "", "", "not evaluated"))
            continue
        gap = "" if d.gap is None else f"{d.gap:+.3f}"
        verdict = d.verdict if r.finished else f"not finished; so far {d.verdict}"
        rows.append((r.name, f"{d.best_step:,}", f"{d.best_nll:.4f}", f"{d.last_nll:.4f}", gap, verdict))
    return table(rows, right=(1, 2, 3, 4))


def _beside(runs: Sequence[Run], translates: bool) -> str:
    """The paper's rows, and what was measured with the same widths."""
    facts = paper()
    wanted = facts["table3" if translates else "table2"]
    columns = (
        (("ende", "En-De BLEU"), ("enfr", "En-Fr BLEU"))
        if translates
        else (("lm1b", "ppl/word LM1B"), ("wiki", "ppl/subword Wikipedia"))
    )
    rows = [("d_ff", "heads", "billions", *(c for _, c in columns), "measured here")]
    for row in wanted["rows"]:
        same = [
            r
            for r in runs
            if (r.setting("d_model"), r.setting("d_ff"), r.setting("num_heads"))
            == (wanted["d_model"], row["d_ff"], row["heads"])
        ]
        here = "; ".join(
            f"{r.name}: {_bleu(bleu(r, 'validation')) if translates else _perplexity(scale_result(r, 'validation'))}"
            for r in same
        )
        cells = []
        for key, _ in columns:
            tuned = f" ({row[key + '_tuned']:g} tuned)" if key + "_tuned" in row else ""
            cells.append(f"{row[key]:g} {row[key + '_mark']}{tuned}")
        rows.append((f"{row['d_ff']:,}", str(row["heads"]), f"{row['parameters']:.2f}", *cells, here or "not run"))
    marks = "; ".join(f"{mark}: {meaning}" for mark, meaning in facts["marks"].items())
    note, here = "", sorted({str(r.setting("d_model")) for r in runs})
    if str(wanted["d_model"]) not in here:
        note = (
            f" The runs above have d_model {', '.join(here)}, less data and fewer steps: what can be compared is the direction "
            "in which width moves the numbers, not the numbers."
        )
    return f"{facts['source']}. {marks}.{note}\n\n```\n{table(rows, right=(0, 1, 2))}\n```"
