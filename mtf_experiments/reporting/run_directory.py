"""The directory of a run: where everything is, what was in effect, and whether a new start may go on in it."""

from __future__ import annotations

import datetime
import fnmatch
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtf_experiments import config
from mtf_experiments.errors import UserError
from mtf_experiments.files import write_text

MAY_DIFFER = (
    "mesh_shape",
    "layout",
    "train_steps",
    "data_dir",
    "*.mesh_shape",
    "*.layout",
    "*.train_steps",
    "*.data_dir",
    "*.cache_dir",
    "*.microbatches",
    "*.remat",
    "*.unroll",
    "*.log_every",
    "*.eval_every",
    "*.checkpoint_every",
    "*.keep_*",
    "*.peak_flops",
    "*.stall_seconds",
    "Evaluation.*",
    "Decoding.*",
)
"""Bindings (`macro` or `Class.parameter`) that may change between two starts: they do not change what is learnt.

The data may move as long as its fingerprints stay; `train_steps` may grow to prolong a run.
"""

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "gin-config", "numpy", "sentencepiece", "sacrebleu")


class RunDirectory:
    """The names in a run's directory. `writer` is false where a process only reads or leaves writing to another."""

    def __init__(self, path: str | os.PathLike[str], writer: bool = True) -> None:
        self.path = Path(path).absolute()
        self.writer = writer
        self.config = self.path / "config.gin"
        self.environment = self.path / "environment.json"
        self.tokenizer = self.path / "tokenizer.model"
        self.plan = self.path / "plan.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"

    def evaluation(self, task: str, split: str, step: int | str) -> Path:
        """The file of one evaluation."""
        return self.path / "eval" / f"{task}-{split}-{step}.json"

    def decode(self, task: str, split: str, step: int | str, suffix: str = ".txt") -> Path:
        """The file of one decode, a plain line for each source line; with suffix ".jsonl" its details."""
        return self.path / "decodes" / f"{task}-{split}-{step}{suffix}"

    def references(self, task: str, split: str) -> Path:
        """The file of the references that decodes of `split` are scored against."""
        return self.path / "decodes" / f"{task}-{split}.references.txt"

    @classmethod
    def create(cls, path: str | os.PathLike[str], writer: bool = True) -> RunDirectory:
        """The directory, made if need be. Raises UserError, before any work is done, if it cannot be written."""
        run = cls(path, writer)
        if writer:
            probe = run.path / f".writable-{os.getpid()}"
            try:
                run.path.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise UserError(f"model_dir {run.path} cannot be written: {error.strerror or error}") from error
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """An existing run, to be read. Raises UserError if there is none."""
        run = cls(path, writer=False)
        if not run.config.is_file():
            exists = "is not a directory" if run.path.exists() else "does not exist"
            what = "has no config.gin: it is not the directory of a run" if run.path.is_dir() else exists
            raise UserError(f"model_dir {run.path} {what}")
        return run

    def record(self, config_text: str, environment: Mapping[str, Any], may_differ: Sequence[str] = MAY_DIFFER) -> None:
        """Writes the resolved configuration and the environment of this start; earlier environments stay in the file.

        `environment` has what `describe_environment` returns. Raises UserError, and writes nothing, where the directory
        holds checkpoints of another model, data, optimizer or seed; it lists every value that differs.
        """
        self.check(config_text, may_differ)
        earlier = self._earlier()
        if self.used and earlier:
            self._refuse(_changed_data(earlier[-1].get("data", {}), environment.get("data", {})))
        if self.writer:
            write_text(self.config, config_text)
            text = json.dumps({**environment, "earlier_starts": earlier}, indent=2, sort_keys=True, default=str)
            write_text(self.environment, text + "\n")

    def check(self, config_text: str, may_differ: Sequence[str] = MAY_DIFFER) -> None:
        """Raises UserError, with every value that differs, if there are checkpoints of another configuration."""
        if self.used and self.config.is_file():
            self._refuse(changed(self.config.read_text("utf-8"), config_text, may_differ))

    def _refuse(self, differences: Sequence[str]) -> None:
        if differences:
            lines = "\n  ".join(differences)
            raise UserError(
                f"model_dir {self.path} belongs to a run with another configuration (there -> now):\n  {lines}\n"
                "use another model_dir, or the values of that run"
            )

    @property
    def used(self) -> bool:
        """Whether something was learnt here: there are checkpoints."""
        return self.checkpoints.is_dir() and any(p.name.isdecimal() for p in self.checkpoints.iterdir())

    def _earlier(self) -> list[dict[str, Any]]:
        if not self.environment.is_file():
            return []
        try:
            latest = json.loads(self.environment.read_text("utf-8"))
            return [*latest.pop("earlier_starts", []), latest]
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{self.environment} is damaged: {error}") from error


def changed(before: str, after: str, may_differ: Sequence[str] = MAY_DIFFER) -> list[str]:
    """One line a value that differs between two resolved configurations and must not: `name: before -> after`."""
    a, b = config.flatten(before), config.flatten(after)
    lines = []
    for name in sorted(a.keys() | b.keys()):
        short = ".".join(name.rsplit("/", 1)[-1].split(".")[-2:])
        free = any(fnmatch.fnmatchcase(short, pattern) for pattern in may_differ)
        if not free and a.get(name) != b.get(name):
            lines.append(f"{name}: {a.get(name, '(not set)')} -> {b.get(name, '(not set)')}")
    return lines


def describe_environment(
    seed: int, mesh_shape: str, layout: str, data: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """What a run depends on besides its configuration: versions, devices, mesh, layout, seed, data fingerprints."""
    import jax

    devices = jax.devices()
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES if _installed(name)}
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": {"python": platform.python_version(), "mtf_experiments": _own_version(), **versions},
        "devices": {
            "count": len(devices),
            "kind": devices[0].device_kind,
            "platform": devices[0].platform,
            "processes": jax.process_count(),
        },
        "mesh_shape": mesh_shape,
        "layout": layout,
        "seed": seed,
        "data": dict(data),
        **more,
    }


def _changed_data(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    a, b = (json.loads(json.dumps(x, default=str)) for x in (dict(before), dict(after)))
    return [
        f"data {name}: {json.dumps(a.get(name))} -> {json.dumps(b.get(name))}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _own_version() -> str:
    return importlib.metadata.version("mtf-experiments") if _installed("mtf-experiments") else "(not installed)"
