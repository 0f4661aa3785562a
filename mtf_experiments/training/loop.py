"""The training loop: steps, evaluations, checkpoints and what is shown of them, all by the one step counter."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import signal
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtf_experiments.data.prefetch import prefetch
from mtf_experiments.data.tasks import PreparedTask
from mtf_experiments.data.translation_task import PreparedTranslation
from mtf_experiments.errors import NonFiniteError
from mtf_experiments.evaluation.evaluator import Evaluator, Measured
from mtf_experiments.evaluation.settings import Decoding, Evaluation
from mtf_experiments.reporting.console import ProgressDisplay, ThroughputMeter, duration, progress_line
from mtf_experiments.reporting.metrics import MetricsWriter
from mtf_experiments.reporting.run_directory import RunDirectory
from mtf_experiments.training.checkpoints import Checkpoints
from mtf_experiments.training.feed import device_batch
from mtf_experiments.training.settings import Training
from mtf_experiments.training.step import Programs, TrainState

BEST_BY = "validation/nll_per_token"
CHARTS = {
    "learning": {
        "nats per token": ["train/nll", "validation/nll_per_token"],
        "perplexity per word": ["validation/ppl_word"],
        "BLEU": ["validation/bleu"],
    },
    "health": {
        "gradient norm": ["train/grad_norm"],
        "learning rate": ["train/learning_rate"],
        "speed": ["speed/tokens/s"],
    },
}
"""What TensorBoard's CUSTOM SCALARS draws together."""
_SHOWN = 5  # translations


class Stopped(Exception):
    """The process was told to end; raised where that is noticed, never in the middle of a step."""


class Trainer:
    """One run in a run directory: `train_steps` updates in all. An interrupted run goes on from its newest checkpoint.

    `flops_per_step` are the model's, over all devices. `hyperparameters` are what runs are compared by in TensorBoard.
    """

    def __init__(
        self,
        programs: Programs,
        task: PreparedTask | PreparedTranslation,
        run: RunDirectory,
        train_steps: int,
        training: Training,
        evaluation: Evaluation,
        decoding: Decoding,
        flops_per_step: float,
        hyperparameters: Mapping[str, str | float] | None = None,
    ) -> None:
        self.hyperparameters = hyperparameters or {}
        self.programs, self.task, self.run = programs, task, run
        self.train_steps, self.training, self.evaluation = train_steps, training, evaluation
        self.flops_per_step = flops_per_step
        self.seed, batch_size = programs.settings.seed, programs.settings.batch_size
        self.checkpoints = Checkpoints(
            run.checkpoints, training.keep_checkpoints, training.keep_every or None, metric=BEST_BY
        )
        self._main = jax.process_index() == 0
        self._stop = 0  # the signal that asked for the end
        self._rows = task.train_rows(batch_size, self.seed, programs.vocab_size)
        # The last evaluation, with all scales, is the result of the run; those on the way are for the curve.
        eval_batch = evaluation.batch_size or batch_size
        self._on_the_way = Evaluator(programs, task, eval_batch, evaluation.during_training, decoding)
        self._at_the_end = Evaluator(programs, task, eval_batch, evaluation.logit_scales, decoding)

    def train(self) -> Measured:
        """Trains to `train_steps`, evaluates, saves. Returns the last evaluation on the development set.

        Raises NonFiniteError (nothing is saved any more) when loss or gradients are not finite, SystemExit(143) after
        SIGTERM and SystemExit(130) after SIGINT with the last finished step saved, UserError where saving fails.
        """
        total = self.train_steps
        state, step = self._start()
        devices = self.programs.mesh.size
        meter = ThroughputMeter(devices, self.flops_per_step, self.training.peak_flops or None)
        update = self.programs.compiled_update()

        def batch_of(number: int) -> Any:
            return device_batch(
                lambda rows: self._rows.batch(number, rows), self.programs.train_shapes, self.programs.sharding
            )

        with (
            self._listening(),
            self.checkpoints,
            MetricsWriter(self.run.path, step) as metrics,
            ProgressDisplay(total, step, active=self._main) as display,
            prefetch(batch_of, step, stop_step=total) as batches,
        ):
            self._metrics, self._display, self._meter = metrics, display, meter
            self._first = step + 1
            saved = step
            result: Measured | None = None
            waiting: tuple[int, dict[str, jax.Array]] | None = None
            try:
                if step == 0:
                    metrics.text(0, "data/first rows", self._first_rows())
                    metrics.describe(self.hyperparameters, self._results(), CHARTS)
                    if self.training.eval_every:
                        self._evaluate(state, 0)
                for batch in batches:
                    with meter.pause("compile") if step + 1 == self._first else contextlib.nullcontext():
                        state, new = update(state, batch)
                        if step + 1 == self._first:
                            jax.block_until_ready(new)
                    step += 1
                    self._watch()
                    # The next step is dispatched before the one before it is waited for: the devices never idle.
                    if waiting:
                        self._finish(*waiting, state)
                    waiting = (step, new)
                    due = {what for what in ("log", "eval", "checkpoint") if self._due(what, step)}
                    if not due and not self._stop:
                        continue
                    values, waiting = self._finish(*waiting, state), None
                    result = None
                    if "log" in due:
                        self._log(step, values)
                    if self._stop:
                        raise Stopped
                    if "eval" in due:
                        result = self._evaluate(state, step)
                    if "checkpoint" in due:
                        self._save(step, state, result)
                        saved = step
                if result is None:
                    result = self._evaluate(state, step)
            except Stopped:
                if step > saved:
                    self._save(step, state, None)
                self.checkpoints.wait()
                display.log(
                    f"stopped by {signal.Signals(self._stop).name} after step {step}; the same command goes on from there"
                )
                raise SystemExit(128 + self._stop) from None
            self.checkpoints.wait()
            spent = ", ".join(f"{name} {duration(s)}" for name, s in meter.pauses.items())
            display.log(f"done: {step} steps in {duration(meter.elapsed)} (of it {spent})")
        return result

    def _start(self) -> tuple[TrainState, int]:
        step = self.checkpoints.latest()
        if step is None:
            return self.programs.initialise(), 0
        abstract = self.programs.abstract_state()
        params, opt_state = self.checkpoints.restore(step, abstract.params, abstract.opt_state)
        count = jax.device_put(jnp.asarray(step, jnp.int32), abstract.step.sharding)
        if self._main:
            print(f"resuming after step {step} from {self.checkpoints.path(step)}", flush=True)
        return TrainState(params, opt_state, count), step

    def _due(self, what: str, step: int) -> bool:
        every = getattr(self.training, f"{what}_every")
        return step == self.train_steps or (every > 0 and step % every == 0)

    def _finish(self, step: int, metrics: dict[str, jax.Array], state: TrainState) -> dict[str, float]:
        """Waits for a step's metrics and counts it. Raises NonFiniteError if loss or gradients are not finite."""
        values = {name: float(np.asarray(value)) for name, value in metrics.items()}
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            self.checkpoints.wait()
            broken = next((name for name, ok in finite(state.params).items() if not ok), "none")
            newest = self.checkpoints.latest()
            kept = f"the checkpoint of step {newest} is untouched" if newest else "no checkpoint was written yet"
            raise NonFiniteError(
                f"step {step} (batch {step - 1} of data seed {self.seed}): loss {values['loss']}, gradient norm "
                f"{values['grad_norm']}; first parameter that is not finite: {broken}; {kept}"
            )
        if step != self._first:  # that one's time went into compiling
            self._meter.step(int(values["tokens"]), self.programs.train_shapes["targets"].elements)
        return values

    def _log(self, step: int, values: dict[str, float]) -> None:
        throughput = self._meter.read()
        shown = {"loss": values["loss"], "lr": values["learning_rate"], "grad norm": values["grad_norm"]}
        line = progress_line(step, self.train_steps, shown, throughput, self._meter.elapsed)
        self._display.log(line)
        self._display.advance(step, f"loss {values['loss']:.4g}")
        scalars = {f"train/{name}": value for name, value in values.items()}
        speeds = {f"speed/{name}": value for name, value in throughput.scalars().items() if math.isfinite(value)}
        self._metrics.scalars(step, scalars | speeds | {"train/epoch": self._rows.epoch_of(step)})

    def _evaluate(self, state: TrainState, step: int) -> Measured:
        last = step == self.train_steps

        def between() -> None:
            self._watch()
            if self._stop:
                raise Stopped

        evaluator = self._at_the_end if last else self._on_the_way
        label, every = self.evaluation.label, self.evaluation.bleu_every
        translate = last or (every > 0 and step > 0 and step % every == 0)
        with self._meter.pause("evaluation"):
            result = evaluator.evaluate(state.params, "validation", label, between, translate)
        self._metrics.scalars(step, result.metrics())
        if result.translation:
            first = result.translation.decoded[:_SHOWN]
            self._metrics.text(step, "decodes/validation", "\n\n".join(f"{d.source}  \n**{d.text}**" for d in first))
        if self._main:
            result.record(self.run, self.task.task.name, step)
        shown = result.lines() if last else result.short_lines()
        self._display.log("\n".join([f"evaluation after step {step}:", *shown]))
        return result

    def _save(self, step: int, state: TrainState, result: Measured | None) -> None:
        if not all(finite(state.params).values()):
            raise NonFiniteError(f"parameters are not finite after step {step}; not saved")
        meta = {
            "seed": self.seed,
            "task": self.task.task.name,
            "vocabulary": self.task.tokenizer.fingerprint,
        }
        with self._meter.pause("saving"):
            metrics = result.metrics() if result else None
            self.checkpoints.save(step, state.params, state.opt_state, meta, metrics)

    def _results(self) -> list[str]:
        translation = ["validation/bleu"] if isinstance(self.task, PreparedTranslation) else []
        return [*translation, "validation/ppl_word", "validation/nll_per_token", "train/nll", "speed/tokens/s"]

    def _first_rows(self) -> str:
        targets = self._rows.batch(0, slice(0, 4))["targets"]
        return "\n\n".join(self.task.tokenizer.decode([row[row > 1] for row in targets]))

    def _watch(self) -> None:
        """Sets the stall watchdog anew: without progress it prints every thread's stack and ends the process."""
        if self.training.stall_seconds:
            faulthandler.dump_traceback_later(self.training.stall_seconds, exit=True)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Turns SIGTERM and SIGINT into a request that the loop sees between steps.

        A second SIGTERM does not hurry it; a second SIGINT is a user who does not want to wait.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stop == number == signal.SIGINT:
                raise KeyboardInterrupt
            self._stop = number

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            faulthandler.cancel_dump_traceback_later()


@jax.jit
def _all_finite(params: Any) -> dict[str, jax.Array]:
    return {name: jnp.all(jnp.isfinite(p.array)) for name, p in params.items()}


def finite(params: Any) -> dict[str, bool]:
    """For each parameter, whether all its elements are finite."""
    return {name: bool(ok) for name, ok in _all_finite(params).items()}
