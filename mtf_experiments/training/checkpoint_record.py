"""The record of a checkpoint: what stands beside its arrays, read without them, and what is wrong when it does not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtf_experiments.errors import UserError
from mtf_experiments.mtf import NamedTensor

FORMAT = 1
_PARTS = ("params/_METADATA", "opt_state/_METADATA", "meta/metadata", "_CHECKPOINT_METADATA")


def read_record(path: Path, known: list[int] | None = None) -> dict[str, Any]:
    """What is stored beside the arrays of the checkpoint at `path`: step, dimensions, dtypes, metrics, meta.

    Raises UserError with the path if it is absent, incomplete, damaged, or of a newer format.
    """
    if not path.is_dir():
        there = "" if known is None else f"; there are {', '.join(map(str, known)) or 'none'}"
        raise UserError(f"no checkpoint {path}{there}")
    if missing := missing_parts(path):
        raise UserError(f"checkpoint {path} is incomplete: no {missing[0]}")
    try:
        record = json.loads((path / "meta" / "metadata").read_text("utf-8"))
        newer = record["format"] > FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error
    if newer:
        raise UserError(f"checkpoint {path} has format {record['format']}; this version reads up to {FORMAT}")
    return record


def missing_parts(path: Path) -> list[str]:
    """What a whole checkpoint has and the directory `path` lacks."""
    return [part for part in _PARTS if not (path / part).is_file()]


def damaged(path: Path, error: Exception) -> UserError:
    """The error for a checkpoint that reading failed on."""
    return UserError(
        f"checkpoint {path} cannot be read, it may be damaged: {cause(error)}\n"
        "Move that directory away to go on from the checkpoint before it, or from the beginning if there is none"
    )


def cause(error: BaseException) -> str:
    """Kind and words of an error, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}"


def describe(p: NamedTensor) -> dict[str, Any]:
    """Dimensions and type of a parameter, as JSON."""
    return {"dims": [[d.name, d.size] for d in p.shape], "dtype": str(p.array.dtype)}


def _spell(entry: Mapping[str, Any]) -> str:
    dims = [f"{n}={s}" for n, s in entry["dims"]] if "dims" in entry else [str(s) for s in entry["sizes"]]
    return f"{entry['dtype']}[{', '.join(dims)}]"


def check_fits(path: Path, what: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises UserError listing every entry of `saved` and `wanted` (as `describe` gives them) that is not the same."""
    lines = [f"{name}: in the checkpoint, but not in this model" for name in saved if name not in wanted]
    lines += [f"{name}: in this model, but not in the checkpoint" for name in wanted if name not in saved]
    lines += [
        f"{name}: {_spell(saved[name])} in the checkpoint, {_spell(wanted[name])} in this model"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    if lines:
        text = "\n  ".join(lines)
        raise UserError(f"checkpoint {path} does not fit this run; {what}:\n  {text}")


def metrics_as_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as JSON, which has no infinities and no NaN."""
    return {k: float(v) if math.isfinite(v) else str(float(v)) for k, v in metrics.items()}


def metrics_from_json(metrics: Mapping[str, float | str]) -> dict[str, float]:
    """Inverse of `metrics_as_json`."""
    return {k: float(v) for k, v in metrics.items()}
