"""Perplexity of a model on a whole split, in one pass for any number of logit scales."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtf_experiments import mtf
from mtf_experiments.data.tasks import PreparedTask
from mtf_experiments.evaluation.perplexity import PerplexityAccumulator, PerplexityResult, TextCounts, choose_scale
from mtf_experiments.models.parameters import Parameters
from mtf_experiments.reporting.run_directory import RunDirectory, write_atomically
from mtf_experiments.training.feed import device_batch
from mtf_experiments.training.step import Programs


class PerplexityEvaluator:
    """Evaluates parameters on splits of a task. Compiled once, whatever the parameters.

    Every sentence is scored exactly once, without dropout or label smoothing; rows that only fill the last batch count
    nothing.
    """

    def __init__(self, programs: Programs, task: PreparedTask, batch_size: int, scales: Sequence[float]) -> None:
        self._programs, self._task = programs, task
        self._scales = tuple(float(s) for s in scales)
        self._nll = programs.compiled_nll(self._scales)
        self._shape = programs.eval_shape(batch_size)
        self._batch_size = batch_size

    def evaluate(
        self, params: Parameters, split: str, label: str = "", between: Callable[[], None] = lambda: None
    ) -> PerplexityResult:
        """Perplexity of `params` on `split`. `between` is called before each batch (to notice a stop, to show progress)."""
        rows = self._task.eval_rows(split, self._batch_size, self._programs.vocab_size)
        sums = PerplexityAccumulator(self._scales)
        for number in range(len(rows)):
            between()
            batch = device_batch(
                lambda wanted, n=number: rows.batch(n, wanted), self._shape, self._programs.sharding(self._shape)
            )
            nll = to_host(self._nll(params, batch))
            host = rows.batch(number)
            sums.add(nll, host["targets"], host["segments"])
        counts = self._task.counts(split)
        info = self._task.stores[split].manifest.source  # pyright: ignore[reportOptionalMemberAccess]
        text = TextCounts(
            sentences=int(counts["sentences"]),
            words=int(counts["words"]),
            characters=int(counts["characters"]),
            unknown=int(counts["unknown"]),
            files=tuple(f.name for f in info.files),
            sha256=info.whole.sha256,
        )
        return sums.result(text, split, label=label)


def record(result: PerplexityResult, run: RunDirectory, task: str, step: int, checkpoint: str = "") -> Path:
    """Stores the evaluation of the parameters after `step` updates (of `checkpoint`, if they came out of one)."""
    path = run.evaluation(task, result.split, step)
    content = {"task": task, "step": step, "checkpoint": checkpoint, **result.as_json()}
    if result.split == "validation":
        choice = choose_scale(result)
        content["tuned"] = {"logit_scale": choice.logit_scale, "ppl_word": choice.development.ppl_word}
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


def to_host(tensor: mtf.NamedTensor) -> np.ndarray:
    """The whole of `tensor` as a numpy array on every process."""
    if tensor.array.is_fully_addressable:
        return np.asarray(tensor.array)
    from jax.experimental import multihost_utils

    gathered: Any = multihost_utils.process_allgather(tensor.array, tiled=True)
    return np.asarray(jax.device_get(gathered))
