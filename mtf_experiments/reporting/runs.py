"""What a run directory says about a run: sizes, curves, results. Reports are made of nothing else."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtf_experiments import config
from mtf_experiments.errors import UserError
from mtf_experiments.reporting.metrics import read_metrics
from mtf_experiments.reporting.run_directory import RunDirectory

WIDTHS = ("d_model", "d_ff", "num_heads", "d_kv", "num_layers")


@dataclass(frozen=True)
class Curve:
    """Values of a metric after so many steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """One run. `name` tells it from the others of a report."""

    name: str
    path: Path
    settings: Mapping[str, str]
    environment: Mapping[str, Any]
    parameters: int | None
    rows: Sequence[Mapping[str, Any]]
    evaluations: Mapping[tuple[str, int], Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path, name: str = "") -> Run:
        """The run in `path`. Raises UserError if there is none, or a file of it is damaged."""
        run = RunDirectory.open(path)
        evaluations = {}
        for file in sorted((run.path / "eval").glob("*.json")) if (run.path / "eval").is_dir() else ():
            content = _json(file)
            if isinstance(content.get("step"), int):
                evaluations[content["split"], content["step"]] = content
        plan = _json(run.plan) if run.plan.is_file() else {}
        return cls(
            name or run.path.name,
            run.path,
            config.flatten(run.config.read_text("utf-8")),
            _json(run.environment) if run.environment.is_file() else {},
            plan.get("parameters"),
            read_metrics(run.metrics),
            evaluations,
        )

    def setting(self, name: str) -> Any:
        """The value of a macro or `Class.parameter`, None if it was not set."""
        text = self.settings.get(name)
        try:
            return ast.literal_eval(text) if text is not None else None
        except (ValueError, SyntaxError):
            return text

    @cached_property
    def task(self) -> str:
        """The name of the task."""
        return next((str(e["task"]) for e in self.evaluations.values()), "")

    @property
    def translates(self) -> bool:
        """Whether it is a translation model."""
        return any(name.startswith("TranslationModelConfig.") for name in self.settings)

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.setting("Experiment.seed") or 0)

    @property
    def total_steps(self) -> int:
        """The steps that were asked for."""
        return int(self.setting("train_steps") or 0)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((r["step"] for r in self.rows if r["key"] == "train/loss"), default=0)

    @property
    def finished(self) -> bool:
        """Whether it was trained and evaluated to its end."""
        return ("validation", self.total_steps) in self.evaluations

    def curve(self, key: str) -> Curve:
        """The values of a metric that are finite."""
        points = [(r["step"], r["value"]) for r in self.rows if r["key"] == key and abs(r["value"]) < float("inf")]
        return Curve(tuple(s for s, _ in points), tuple(v for _, v in points))

    def evaluation(self, split: str = "validation") -> Mapping[str, Any] | None:
        """The evaluation on `split` after the last step that was evaluated there."""
        steps = [step for s, step in self.evaluations if s == split]
        return self.evaluations[split, max(steps)] if steps else None

    @property
    def tokens_per_step(self) -> float | None:
        """Real target tokens of a step, the mean of those logged."""
        values = self.curve("train/tokens").values
        return sum(values) / len(values) if values else None

    @property
    def tokens(self) -> float | None:
        """Real target tokens that it was trained on."""
        return None if self.tokens_per_step is None else self.tokens_per_step * self.step

    @property
    def train_tokens(self) -> int | None:
        """Tokens of the training set, each counted once."""
        counts = self.environment.get("counts", {}).get("train", {})
        return counts.get("tokens") or counts.get("target", {}).get("tokens")

    @property
    def seconds(self) -> float | None:
        """Time of training alone: the steps at the median of the speeds logged."""
        speeds = sorted(v for v in self.curve("speed/steps/s").values if v > 0)
        return self.step / speeds[len(speeds) // 2] if speeds and self.step else None

    @property
    def without_seed(self) -> tuple[Any, ...]:
        """What runs that differ in nothing but the seed have in common."""
        ignored = ("seed", "mesh_shape", "layout", "cache_dir", "data_dir")
        return tuple((k, v) for k, v in sorted(self.settings.items()) if k.rpartition(".")[2] not in ignored)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in `paths`: directories of runs, or folders (of sweeps) that hold such. Names are unique.

    Raises UserError for a path without any run.
    """
    directories: list[tuple[Path, Path]] = []
    for path in paths:
        if (path / "config.gin").is_file():
            directories.append((path.parent, path))
            continue
        inside = sorted(p.parent for p in path.glob("*/config.gin")) if path.is_dir() else []
        if not inside:
            raise UserError(f"{path} is neither the directory of a run (it has no config.gin) nor a folder of such")
        directories += [(path, p) for p in inside]
    directories = list({p.resolve(): (base, p) for base, p in directories}.values())
    names = [p.name for _, p in directories]
    runs = [Run.read(p, p.name if names.count(p.name) == 1 else f"{base.name}/{p.name}") for base, p in directories]
    return sorted(runs, key=lambda r: (r.task, r.parameters or 0, r.train_tokens or 0, r.seed, r.name))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no object")
    return content
