"""A sweep: many runs of one base that differ along named axes, each in its own run directory.

sweep = Sweep(title="widths", base=["lm_tiny.gin"], axes={"heads": {1: ["num_heads=1"], 2: ["num_heads=2"]}})
[m.name for m in sweep.members()]      # ["heads=1", "heads=2"]
"""

from __future__ import annotations

import fnmatch
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin

from mtf_experiments.errors import UserError
from mtf_experiments.reporting.metrics import read_metrics
from mtf_experiments.reporting.run_directory import RunDirectory


@gin.configurable
@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Members are all combinations of the values of `axes`, less those that a pattern of `leave_out` names.

    `axes` maps the name of an axis to its values, a value to Gin bindings and files on top of `base`:
    `{"heads": {1: ["num_heads=1", "d_ff=128"]}, "seed": {0: ["Experiment.seed=0"]}}`. A member is called by its values,
    `heads=1,seed=0`, which is also its run directory's name; `leave_out` has patterns of such names (`heads=2,seed=*`).
    `devices` is the number of virtual CPU devices (0: whatever there is). `splits` are evaluated when training is done,
    besides the development set.
    """

    title: str
    base: Sequence[str]
    axes: Mapping[str, Mapping[Any, Sequence[str]]]
    leave_out: Sequence[str] = ()
    devices: int = 0
    splits: Sequence[str] = ()
    note: str = ""

    def members(self) -> list[Member]:
        """The members, the last axis changing fastest. Raises UserError for names that no directory can have."""
        members = []
        for values in itertools.product(*(axis.items() for axis in self.axes.values())):
            named = {name: value for name, (value, _) in zip(self.axes, values, strict=True)}
            name = ",".join(f"{axis}={value}" for axis, value in named.items())
            if set(name) & set('/\\:*?"<>|\n'):
                raise UserError(f"the member {name!r} of the sweep cannot name a directory: give its axis other values")
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.leave_out):
                members.append(Member(self, name, named, tuple(b for _, bindings in values for b in bindings)))
        for pattern in self.leave_out:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self._all_names()):
                raise UserError(
                    f"Sweep.leave_out: {pattern!r} names no member; there are {', '.join(self._all_names())}"
                )
        if not members:
            raise UserError(f"the sweep {self.title!r} has no members")
        return members

    def _all_names(self) -> list[str]:
        return [
            ",".join(f"{axis}={value}" for axis, value in zip(self.axes, values, strict=True))
            for values in itertools.product(*self.axes.values())
        ]


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    sweep: Sweep
    name: str
    values: Mapping[str, Any]
    changes: tuple[str, ...]

    @property
    def gin_files(self) -> list[str]:
        """Gin files, the base's first."""
        return [*self.sweep.base, *(c for c in self.changes if c.endswith(".gin"))]

    def gin_params(self, more: Sequence[str] = ()) -> list[str]:
        """Gin bindings; `more` win."""
        return [*(c for c in self.changes if not c.endswith(".gin")), *more]

    def commands(self, output: Path, more: Sequence[str] = (), python: str = sys.executable) -> list[list[str]]:
        """The commands that make the run in its directory below `output`: training, then the other splits."""
        run = [f"--model_dir={output / self.name}"]
        devices = [f"--devices={self.sweep.devices}"] if self.sweep.devices else []
        files = [f"--gin_file={f}" for f in self.gin_files]
        params = [f"--gin_param={p}" for p in self.gin_params(more)]
        commands = [[python, "-m", "mtf_experiments.train", *files, *params, *run, *devices]]
        if self.sweep.splits:
            splits = [f"--split={s}" for s in self.sweep.splits]
            commands.append([python, "-m", "mtf_experiments.evaluate", *run, *splits, *devices])
        return commands

    def shell(self, output: Path, more: Sequence[str] = ()) -> str:
        """The commands as one line for a shell."""
        return " && ".join(shlex.join(c) for c in self.commands(output, more, python="python"))


@dataclass(frozen=True)
class Progress:
    """How far a member's run directory says that it is; `loss` and `rate` (steps per second) of the last steps logged."""

    step: int = 0
    total: int = 0
    trained: bool = False
    missing_splits: tuple[str, ...] = field(default=())
    loss: float | None = None
    rate: float | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.trained and not self.missing_splits


def progress(member: Member, output: Path, total: int) -> Progress:
    """What the run directory of `member` below `output` says; `total` steps are wanted."""
    run = RunDirectory(output / member.name, writer=False)
    rows = [r for r in read_metrics(run.metrics) if r["key"] == "train/loss"] if run.metrics.is_file() else []
    evaluated = {p.stem for p in (run.path / "eval").glob("*.json")} if (run.path / "eval").is_dir() else set()

    def has(split: str) -> bool:
        return any(name.endswith(f"-{split}-{total}") for name in evaluated)

    rate = None
    if len(rows) > 1 and rows[-1]["time"] > rows[-2]["time"]:
        rate = (rows[-1]["step"] - rows[-2]["step"]) / (rows[-1]["time"] - rows[-2]["time"])
    return Progress(
        step=rows[-1]["step"] if rows else 0,
        total=total,
        trained=(run.checkpoints / str(total)).is_dir() and has("validation"),
        missing_splits=tuple(s for s in member.sweep.splits if not has(s)),
        loss=rows[-1]["value"] if rows else None,
        rate=rate,
    )
