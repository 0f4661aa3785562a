"""Metrics of a run over its steps: `metrics.jsonl`, which the project reads, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tensorboardX import SummaryWriter
from tensorboardX.summary import hparams

from mtf_experiments.errors import UserError
from mtf_experiments.files import write_atomically

Charts: TypeAlias = Mapping[str, Mapping[str, Sequence[str]]]


class MetricsWriter:
    """Writes scalars and texts of one run; process 0 of a run writes, in the others every call does nothing.

    metrics.jsonl has one row for each (step, key): {"step", "key", "value", "time" (seconds since 1970)}; values that
    are not finite are the strings "inf", "-inf", "nan". A run that goes on from `resume_step` first removes all later
    rows, so that no step has two values. A second value for a (step, key), as of an evaluation that is repeated after a
    restart, is not written.
    """

    def __init__(self, model_dir: str | os.PathLike[str], resume_step: int = 0, active: bool | None = None) -> None:
        if active is None:
            import jax

            active = jax.process_index() == 0
        self.path = Path(model_dir).absolute() / "metrics.jsonl"
        self._active = active
        if not active:
            return
        rows = [row for row in read_metrics(self.path) if row["step"] <= resume_step]
        self._last = {row["key"]: row["step"] for row in rows}
        with write_atomically(self.path) as file:
            file.writelines(_line(row) for row in rows)
        try:
            self._file = open(self.path, "ab")
            # Event files are named by the second: a quick restart must not overwrite the one before it.
            suffix = f".{time.time_ns()}"
            self._board = SummaryWriter(
                str(self.path.parent), purge_step=resume_step + 1, flush_secs=10, filename_suffix=suffix
            )
        except OSError as error:
            raise UserError(f"{self.path.parent} cannot be written: {error}") from error

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Records {key: number} at `step`, the number of updates done. Rows are on disk when this returns."""
        if not self._active:
            return
        now = time.time()
        new = {key: float(value) for key, value in values.items() if step > self._last.get(key, -1)}
        lines = [_line({"step": step, "key": key, "value": value, "time": now}) for key, value in new.items()]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error}") from error
        for key, value in new.items():
            self._board.add_scalar(key, value, step, walltime=now)
            self._last[key] = step

    def text(self, step: int, tag: str, text: str) -> None:
        """Shows `text` (Markdown) in TensorBoard under `tag`."""
        if self._active:
            self._board.add_text(tag, text, step)

    def describe(self, hyperparameters: Mapping[str, str | float], results: Sequence[str], charts: Charts) -> None:
        """Says, for TensorBoard, what the run is: the rows and columns of HPARAMS, and the charts of CUSTOM SCALARS.

        `results` are keys of scalars that runs are compared by; `charts` maps a category to titles, a title to keys that are
        drawn together.
        """
        if self._active and (writer := self._board.file_writer) is not None:
            for summary in hparams(dict(hyperparameters), dict.fromkeys(results, 0.0)):
                writer.add_summary(summary)
            layout = {c: {t: ["Multiline", list(keys)] for t, keys in of.items()} for c, of in charts.items()}
            self._board.add_custom_scalars(layout)

    def close(self) -> None:
        """Writes out what is buffered and ends."""
        if self._active:
            self._file.close()
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All rows of a metrics file in the order of writing, values as floats; [] if there is no such file.

    A last line that a killed process left half written is ignored. Raises UserError for any other line that is no row.
    """
    path = Path(path)
    if not path.is_file():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"]), "key": str(row["key"]), "value": float(row["value"])})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UserError(f"{path}:{number}: not a row of metrics: {line[:80]!r}") from error
    return rows


def _line(row: Mapping[str, Any]) -> bytes:
    value = row["value"]
    return json.dumps({**row, "value": value if math.isfinite(value) else str(value)}).encode() + b"\n"
