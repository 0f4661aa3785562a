"""Checkpoints: parameters, optimizer state and run metadata of one step, as one atomic directory.

A thin layer over Orbax. It stores trees flat, {path: array}, with the named dimensions beside them, so that a
checkpoint is layout-independent and readable without model code; it says by name what does not fit; and it keeps a
failed or interrupted save from being mistaken for a checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from mtf_experiments.errors import UserError
from mtf_experiments.mtf import NamedTensor
from mtf_experiments.training.checkpoint_record import (
    FORMAT,
    cause,
    check_fits,
    damaged,
    describe,
    metrics_as_json,
    metrics_from_json,
    missing_parts,
    read_record,
)

logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax narrates every save, and all that it raises besides
_log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\d+\.orbax-checkpoint-tmp.*")


class Checkpoints:
    """The checkpoints of one run, one directory a step.

    Kept are the newest `keep`, the best by `metric` (a key of the metrics given to `save`; `mode` "min" or "max"), and
    every step that is a multiple of `keep_every`. An old one is deleted only after a newer one is whole.

    With `read_only` nothing on disk is touched. Otherwise leftovers of interrupted saves are removed and steps that are
    not whole are renamed to `STEP.incomplete`, each with a warning. Raises UserError if the directory cannot be
    written. All processes of a run make the same calls in the same order.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 2,
        keep_every: int | None = None,
        metric: str | None = None,
        mode: str = "min",
        read_only: bool = False,
    ) -> None:
        if keep < 1:
            raise UserError(f"checkpoints to keep: {keep}; want at least 1")
        if mode not in ("min", "max"):
            raise UserError(f"best checkpoint by {mode!r}; want 'min' or 'max'")
        self.directory = Path(directory).absolute()
        self._warned: set[int] = set()
        self._pending: int | None = None
        if read_only and not self.directory.is_dir():
            raise UserError(f"no checkpoints: {self.directory} does not exist")
        if not read_only and jax.process_index() == 0:
            _make_writable(self.directory)
            self._clean()
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("checkpoint directory cleaned")

        def quality(metrics: Mapping[str, float] | None) -> float:
            value = float((metrics or {}).get(metric or "", math.nan))
            return -math.inf if math.isnan(value) else (-value if mode == "min" else value)

        keepers: list[policies.PreservationPolicy] = [policies.LatestN(keep)]
        if metric:
            keepers.append(policies.BestN(get_metric_fn=quality, n=1, keep_checkpoints_without_metrics=False))
        if keep_every:
            keepers.append(policies.EveryNSteps(keep_every))
        self._quality = quality if metric else None
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=("params", "opt_state", "meta"),
            options=ocp.CheckpointManagerOptions(
                read_only=read_only, best_fn=self._quality, preservation_policy=policies.AnyPreservationPolicy(keepers)
            ),
        )

    def save(
        self,
        step: int,
        params: Mapping[str, NamedTensor],
        opt_state: Any,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> None:
        """Starts saving the state after `step` updates; its arrays may be donated as soon as this returns.

        `meta` is any JSON object, `metrics` what the best checkpoint is chosen by. Raises UserError for the failure of
        an earlier save (with path and cause), and for a step that is not later than the newest one; with `force` (after
        going back to an earlier step) that step and all later ones are deleted first. Raises ValueError if the
        optimizer did another number of updates than `step`.
        """
        self.wait()
        later = [s for s in self._manager.all_steps() if s >= step]
        if later and not force:
            raise UserError(
                f"checkpoint of step {step} not saved: {self.directory} already has step {max(later)}; "
                "resume from it, or delete the later steps"
            )
        for s in later:
            _log.warning("deleting checkpoint %s, which step %d replaces", self.path(s), step)
            self._manager.delete(s)
        state = flatten(opt_state)
        _check_count(step, state)
        record = {
            "format": FORMAT,
            "step": step,
            "parameters": {name: describe(p) for name, p in params.items()},
            "optimizer": {name: {"sizes": list(a.shape), "dtype": str(a.dtype)} for name, a in state.items()},
            "metrics": metrics_as_json(metrics or {}),
            "meta": dict(meta),
        }
        items = ocp.args.Composite(
            params=ocp.args.StandardSave({name: p.array for name, p in params.items()}),
            opt_state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave(record),
        )
        try:
            saved = self._manager.save(
                step, args=items, metrics=metrics_as_json(metrics) if metrics else None, force=True
            )
        except Exception as error:
            raise self._failure(step, error) from error
        if not saved:
            raise UserError(f"checkpoint {self.path(step)} was not saved: the checkpoint manager declined")
        self._pending = step

    def wait(self) -> None:
        """Blocks until the last save is on disk. Raises UserError, with path and cause, if it failed."""
        step, self._pending = self._pending, None
        if step is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(step, error) from error

    def close(self) -> None:
        """Waits for the last save and ends. Raises UserError if it failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except UserError:
            if kind is None:  # an error on its way out matters more than this one
                raise

    def path(self, step: int) -> Path:
        """The directory of `step`."""
        return self.directory / str(step)

    def steps(self) -> list[int]:
        """All whole checkpoints on disk, in increasing order. Warns, once each, of those that are not whole."""
        while True:
            listed = self._listed()
            broken = {step: missing for step in listed if (missing := missing_parts(self.path(step)))}
            # A training process deletes an old step only after it wrote a newer one, perhaps since this listing.
            if not broken or self._listed() == listed:
                break
        for step in sorted(broken.keys() - self._warned):
            _log.warning("checkpoint %s is incomplete (no %s): ignored", self.path(step), broken[step][0])
        self._warned.update(broken)
        return [step for step in listed if step not in broken]

    def _listed(self) -> list[int]:
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdecimal() and p.is_dir())

    def latest(self) -> int | None:
        """The newest whole checkpoint, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The whole checkpoint with the best `metric`, the latest of equals; None where none has that metric."""
        if self._quality is None:
            raise UserError("best checkpoint: no metric to choose by was configured")
        quality = {step: self._quality(metrics_from_json(self._record(step)["metrics"])) for step in self.steps()}
        known = [step for step, q in quality.items() if q > -math.inf]
        return max(known, key=lambda step: (quality[step], step), default=None)

    def choose(self, which: str) -> list[int]:
        """The steps that `which` means: "latest", "best", "all", or steps ("500" or "500,1000").

        Raises UserError if there is none.
        """
        steps = self.steps()
        if "," in which:
            return sorted({step for one in which.split(",") for step in self.choose(one.strip())})
        found = {
            "latest": steps[-1:],
            "all": steps,
            "best": [b for b in [self.best() if which == "best" else None] if b],
        }
        if which not in found and which.isdecimal() and int(which) in steps:
            return [int(which)]
        if not found.get(which):
            there = ", ".join(map(str, steps)) or "none"
            raise UserError(
                f"checkpoint {which!r} of {self.directory}: there are {there}; want latest, best, all or a step"
            )
        return found[which]

    def meta(self, step: int) -> dict[str, Any]:
        """The `meta` that `step` was saved with. Raises UserError if that step cannot be read."""
        return self._record(step)["meta"]

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that `step` was saved with."""
        return metrics_from_json(self._record(step)["metrics"])

    def restore(
        self, step: int, abstract_params: Mapping[str, NamedTensor], abstract_opt_state: Any
    ) -> tuple[dict[str, NamedTensor], Any]:
        """Parameters and optimizer state of `step`, placed as the shardings of the abstract arrays say.

        The leaves are jax.ShapeDtypeStruct (or arrays); one without a sharding goes to the first device. Raises
        UserError that lists every parameter or optimizer leaf which is missing, left over, or of other dimensions or
        dtype, and UserError with the path for a step that is incomplete or damaged.
        """
        record = self._record(step)
        params = self.restore_params(step, abstract_params)
        flat = flatten(abstract_opt_state)
        wanted = {name: {"sizes": list(a.shape), "dtype": str(a.dtype)} for name, a in flat.items()}
        check_fits(self.path(step), "optimizer state", record["optimizer"], wanted)
        arrays = self._read(step, "opt_state", flat)
        _check_count(step, arrays)
        return params, jax.tree.unflatten(jax.tree.structure(abstract_opt_state), arrays.values())

    def restore_params(self, step: int, abstract_params: Mapping[str, NamedTensor]) -> dict[str, NamedTensor]:
        """The parameters of `step` alone; raises as `restore` does."""
        wanted = {name: describe(p) for name, p in abstract_params.items()}
        check_fits(self.path(step), "parameters", self._record(step)["parameters"], wanted)
        arrays = self._read(step, "params", {name: p.array for name, p in abstract_params.items()})
        return {name: NamedTensor(arrays[name], p.shape) for name, p in abstract_params.items()}

    def restore_average(
        self, steps: Sequence[int], abstract_params: Mapping[str, NamedTensor]
    ) -> dict[str, NamedTensor]:
        """The mean of the parameters of several steps; raises as `restore` does."""
        total: dict[str, NamedTensor] = {}
        for number, step in enumerate(steps):  # a running mean: two sets of parameters are held, however many steps
            params = self.restore_params(step, abstract_params)
            total = jax.tree.map(lambda m, p, n=number: m + (p - m) / (n + 1), total, params) if total else params
        return total

    def follow(self, last: int, patience: float, every: float = 5.0) -> Iterator[int]:
        """The steps that are there, then each as it appears, until step `last` or `patience` seconds without a new one."""
        known: set[int] = set()
        since = time.monotonic()
        while last not in known and time.monotonic() - since < patience:
            new = [step for step in self.steps() if step not in known]
            for step in new:
                yield step
                known.add(step)
                since = time.monotonic()
            if not new:
                time.sleep(every)

    def _read(self, step: int, item: str, flat: Mapping[str, Any]) -> dict[str, jax.Array]:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None) or here)
            for name, a in flat.items()
        }
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(target)})
        try:
            arrays = self._manager.restore(step, args=args)[item]
        except Exception as error:
            raise damaged(self.path(step), error) from error
        return {name: arrays[name] for name in flat}

    def _record(self, step: int) -> dict[str, Any]:
        return read_record(self.path(step), self.steps())

    def _failure(self, step: int, error: Exception) -> UserError:
        # The manager has already forgotten the steps that the failed one would have replaced; the disk still has them.
        self._manager.reload()
        self._pending = None
        return UserError(f"checkpoint {self.path(step)} could not be saved: {cause(error)}")

    def _clean(self) -> None:
        for path in sorted(self.directory.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                _log.warning("removing %s, left by an interrupted save", path)
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.isdecimal() and path.is_dir() and (missing := missing_parts(path)):
                aside = path.with_name(path.name + ".incomplete")
                _log.warning("checkpoint %s is incomplete (no %s): renamed to %s", path, missing[0], aside.name)
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by their paths, as in "0/count"."""
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in jax.tree.leaves_with_path(tree)}


def list_checkpoints(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """One row a whole checkpoint, oldest first: step, parameters (number of elements), bytes on disk, metrics."""
    rows = []
    with Checkpoints(directory, read_only=True) as checkpoints:
        for step in checkpoints.steps():
            record = read_record(checkpoints.path(step))
            sizes = ([size for _, size in p["dims"]] for p in record["parameters"].values())
            rows.append(
                {
                    "step": step,
                    "parameters": sum(math.prod(s) for s in sizes),
                    "bytes": sum(f.stat().st_size for f in checkpoints.path(step).rglob("*") if f.is_file()),
                    "metrics": metrics_from_json(record["metrics"]),
                }
            )
    return rows


def to_numpy(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The parameters of the checkpoint directory `path` as whole numpy arrays: one device, no model code needed."""
    path = Path(path).absolute()
    names = read_record(path)["parameters"]
    args = ocp.args.PyTreeRestore(restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(path / "params", args=args)
    except Exception as error:
        raise damaged(path, error) from error


def _make_writable(directory: Path) -> None:
    probe = directory / f".writable-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"checkpoint directory {directory} cannot be written: {error}") from error


def _check_count(step: int, flat: Mapping[str, Any]) -> None:
    for name, leaf in flat.items():
        if name.rsplit("/", 1)[-1] == "count" and leaf.ndim == 0 and int(leaf) != step:
            raise ValueError(f"optimizer state {name} counts {int(leaf)} updates, but the step is {step}")
