"""Whether differences in BLEU between runs are more than chance: the paired bootstrap on what they translated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from mtf_experiments.reporting.run_directory import RunDirectory
from mtf_experiments.reporting.runs import Run


def compared(runs: Sequence[Run], splits: Sequence[str] = ("validation", "test")) -> list[str]:
    """One line for each pair of neighbours in size, and split, whose translations and references are there."""
    from mtf_experiments.evaluation.bleu import compare

    lines = []
    for split in splits:
        there = [(r, t) for r in runs if r.translates and r.finished and (t := _translations(r, split))]
        for (a, (first, references)), (b, (second, others)) in pairwise(there):
            if references != others:
                lines.append(f"{split}: {a.name} and {b.name} were scored against different references")
                continue
            found = compare(first, second, [references], allow_pieces=True)
            word = "more than" if found.p_value < 0.05 else "no more than"
            lines.append(
                f"{split}: {b.name} {found.second:.2f} against {a.name} {found.first:.2f}: "
                f"{found.second - found.first:+.2f}, {word} chance (p = {found.p_value:.3f})"
            )
    return lines


def _translations(run: Run, split: str) -> tuple[list[str], list[str]] | None:
    """The run's translations of a split and their references, None where one is missing."""
    steps = [step for s, step in run.evaluations if s == split]
    if not steps:
        return None
    directory = RunDirectory(run.path, writer=False)
    translated, references = directory.decode(run.task, split, max(steps)), directory.references(run.task, split)
    if not (translated.is_file() and references.is_file()):
        return None
    return _lines(translated), _lines(references)


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").removesuffix("\n").split("\n")
