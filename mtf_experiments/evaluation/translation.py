"""BLEU of a translation model: the whole split decoded freely from raw text and scored on detokenised text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtf_experiments.data.text_io import one_line
from mtf_experiments.data.tokenizer import round_trip
from mtf_experiments.data.translation_task import PreparedTranslation
from mtf_experiments.errors import UserError
from mtf_experiments.evaluation.bleu import BleuResult, check_detokenised, score
from mtf_experiments.evaluation.settings import Decoding
from mtf_experiments.evaluation.text_decoder import Decoded, TextDecoder
from mtf_experiments.files import write_text
from mtf_experiments.models.parameters import Parameters
from mtf_experiments.reporting.run_directory import RunDirectory
from mtf_experiments.training.step import Programs


@dataclass(frozen=True)
class TranslationResult:
    """The decoded split, its score, and the share of reference lines that the vocabulary cannot spell exactly.

    `warning`: why the score may not be comparable, or "".
    """

    split: str
    decoded: tuple[Decoded, ...]
    bleu: BleuResult
    not_reversible: float
    warning: str = ""
    references: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What is kept of it; the translations have files of their own."""
        return {**self.bleu.as_json(), "references_not_reversible": self.not_reversible, "warning": self.warning}


class TranslationEvaluator:
    """Translates splits of a task and scores them. Compiled once, whatever the parameters."""

    def __init__(self, programs: Programs, task: PreparedTranslation, decoding: Decoding) -> None:
        self._task = task
        self._decoder = TextDecoder(programs, task.tokenizer, decoding)

    def evaluate(self, params: Parameters, split: str, between: Callable[[], None] = lambda: None) -> TranslationResult:
        """Every line of `split` is translated and scored, once. `between` is called before each batch."""
        references = self._task.reference_lines(split)
        decoded = self._decoder.decode(params, self._task.input_lines(split), between)
        best = [d.hypotheses[0] for d in decoded]
        result = score(
            [h.text for h in best],
            [references],
            direction=self._task.direction,
            truncated=sum(d.truncated for d in decoded),
            unfinished=sum(not h.finished for h in best),
            allow_pieces=True,
        )
        spelling, warning = round_trip(self._task.tokenizer, references), ""
        try:
            check_detokenised(references, "the references", "13a")
        except UserError as error:  # hours of decoding are not thrown away for it
            warning = str(error)
        not_reversible = spelling.changed / max(1, spelling.lines)
        return TranslationResult(split, tuple(decoded), result, not_reversible, warning, tuple(references))


def record_translations(
    decoded: Sequence[Decoded],
    run: RunDirectory,
    task: str,
    split: str,
    step: int | str,
    references: Sequence[str] = (),
) -> list[Any]:
    """Stores the translations, one plain line for each source line, their details and references beside them.

    Returns the paths of the first two.
    """
    if references:
        write_text(run.references(task, split), "".join(f"{one_line(r)}\n" for r in references))
    lines, details = run.decode(task, split, step), run.decode(task, split, step, ".jsonl")
    write_text(lines, "".join(f"{d.text}\n" for d in decoded))
    write_text(details, "".join(_json_line(d, number) for number, d in enumerate(decoded, 1)))
    return [lines, details]


def _json_line(decoded: Decoded, number: int) -> str:
    return json.dumps(decoded.as_json(number), ensure_ascii=False) + "\n"
