"""What is measured of a model on a whole split: perplexity, for any number of logit scales in one pass, and BLEU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtf_experiments.data.tasks import PreparedTask
from mtf_experiments.data.translation_task import PreparedTranslation
from mtf_experiments.evaluation.perplexity import PerplexityAccumulator, PerplexityResult, TextCounts, choose_scale
from mtf_experiments.evaluation.settings import Decoding
from mtf_experiments.evaluation.translation import TranslationEvaluator, TranslationResult, record_translations
from mtf_experiments.files import write_text
from mtf_experiments.models.parameters import Parameters
from mtf_experiments.reporting.run_directory import RunDirectory
from mtf_experiments.training.feed import device_batch, to_host
from mtf_experiments.training.step import Programs


class PerplexityEvaluator:
    """Evaluates parameters on splits of a task. Compiled once, whatever the parameters.

    Every sentence is scored exactly once, without dropout or label smoothing; rows that only fill the last batch count
    nothing.
    """

    def __init__(
        self, programs: Programs, task: PreparedTask | PreparedTranslation, batch_size: int, scales: Sequence[float]
    ) -> None:
        self._programs, self._task = programs, task
        self._scales = tuple(float(s) for s in scales)
        self._nll = programs.compiled_nll(self._scales)
        self._shapes = programs.eval_shapes(batch_size)
        self._batch_size = batch_size

    def evaluate(
        self, params: Parameters, split: str, label: str = "", between: Callable[[], None] = lambda: None
    ) -> PerplexityResult:
        """Perplexity of `params` on `split`. `between` is called before each batch (to notice a stop, to show progress)."""
        rows = self._task.eval_rows(split, self._batch_size, self._programs.vocab_size)
        sums = PerplexityAccumulator(self._scales)
        for number in range(len(rows)):
            between()
            batch = device_batch(lambda wanted, n=number: rows.batch(n, wanted), self._shapes, self._programs.sharding)
            nll = to_host(self._nll(params, batch))
            host = rows.batch(number)
            sums.add(nll, host["targets"], host["segments"])
        counts = self._task.counts(split)
        info = self._task.text(split)
        text = TextCounts(
            sentences=int(counts["sentences"]),
            words=int(counts["words"]),
            characters=int(counts["characters"]),
            unknown=int(counts["unknown"]),
            files=tuple(f.name for f in info.files),
            sha256=info.whole.sha256,
        )
        return sums.result(text, split, label=label)


_PREDICTS_WELL, _TRANSLATES_BADLY = 4.0, 5.0  # perplexity per token and BLEU that do not go together


@dataclass(frozen=True)
class Measured:
    """All that was measured of one set of parameters on one split."""

    perplexity: PerplexityResult
    translation: TranslationResult | None = None

    def lines(self) -> list[str]:
        """For people, the counts first."""
        return [
            *self.perplexity.lines(),
            *(self.translation.bleu.lines() if self.translation else []),
            *self._warnings(),
        ]

    def _warnings(self) -> list[str]:
        if self.translation is None:
            return []
        warnings = [f"  warning: {self.translation.warning}"] if self.translation.warning else []
        per_token, bleu = self.perplexity.scales[0].ppl_token, self.translation.bleu.bleu
        if per_token < _PREDICTS_WELL and bleu < _TRANSLATES_BADLY:
            warnings.append(
                f"  warning: each next token is predicted well (perplexity {per_token:.2f}), but free translations score "
                f"BLEU {bleu:.2f}: does the model see what it has to predict, or decoding another text?"
            )
        return warnings

    def short_lines(self) -> list[str]:
        """The same without the counts, which are the same each time."""
        return [*self.perplexity.lines()[2:], *(self.translation.bleu.lines()[:1] if self.translation else [])]

    def metrics(self) -> dict[str, float]:
        """Scalars by name, `SPLIT/...`."""
        metrics = self.perplexity.metrics()
        if self.translation:
            split = self.perplexity.split
            metrics |= {f"{split}/{name}": value for name, value in self.translation.bleu.metrics().items()}
        return metrics

    def record(self, run: RunDirectory, task: str, step: int | str, checkpoint: str = "") -> list[Path]:
        """Stores it as that of the parameters after `step` updates (of `checkpoint`, if they came out of one).

        Returns the paths.
        """
        split = self.perplexity.split
        path = run.evaluation(task, split, step)
        content = {"task": task, "step": step, "checkpoint": checkpoint, **self.perplexity.as_json()}
        if split == "validation":
            choice = choose_scale(self.perplexity)
            content["tuned"] = {"logit_scale": choice.logit_scale, "ppl_word": choice.development.ppl_word}
        written = []
        if self.translation:
            written = record_translations(self.translation.decoded, run, task, split, step, self.translation.references)
            content["bleu"] = {**self.translation.as_json(), "decodes": written[0].name}
        write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return [path, *written]


class Evaluator:
    """Perplexity at `scales` and, for a translation task, BLEU of free translations by `decoding`."""

    def __init__(
        self,
        programs: Programs,
        task: PreparedTask | PreparedTranslation,
        batch_size: int,
        scales: Sequence[float],
        decoding: Decoding,
    ) -> None:
        self._perplexity = PerplexityEvaluator(programs, task, batch_size, scales)
        self._translation = None
        if isinstance(task, PreparedTranslation):
            self._translation = TranslationEvaluator(programs, task, decoding)

    def evaluate(
        self,
        params: Parameters,
        split: str,
        label: str = "",
        between: Callable[[], None] = lambda: None,
        translate: bool = True,
    ) -> Measured:
        """Measures `params` on `split`; without `translate` perplexity alone. See `PerplexityEvaluator.evaluate`."""
        perplexity = self._perplexity.evaluate(params, split, label, between)
        if self._translation is None or not translate:
            return Measured(perplexity)
        return Measured(perplexity, self._translation.evaluate(params, split, between))
