"""The experiment that a Gin file describes: the one root object, built whole by every command before anything else."""

from __future__ import annotations

import importlib.util  # noqa: F401  (gin uses it without importing it)
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gin

from mtf_experiments import config, mtf
from mtf_experiments.data.pair_sources import ParallelTextSource, TfdsPairSource
from mtf_experiments.data.sources import TextSource
from mtf_experiments.data.synthetic import SyntheticSource
from mtf_experiments.data.synthetic_pairs import SyntheticPairSource
from mtf_experiments.data.tasks import LanguageModelTask
from mtf_experiments.data.tfds_source import TfdsSource
from mtf_experiments.data.tokenizer import Vocabulary
from mtf_experiments.data.translation_task import TranslationTask
from mtf_experiments.data.tsv_pairs import TsvPairSource
from mtf_experiments.errors import UserError
from mtf_experiments.evaluation.settings import Decoding, Evaluation
from mtf_experiments.models.language_model import LanguageModelConfig
from mtf_experiments.models.translation import TranslationModelConfig
from mtf_experiments.training.optimizers import Adafactor, AdamW, Optimizer
from mtf_experiments.training.schedules import Constant, InverseSquareRootToZero, Schedule, WarmupCosine
from mtf_experiments.training.settings import Training
from mtf_experiments.training.step import Programs, StepSettings

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

CONFIGURABLE = (
    *(TextSource, TfdsSource, SyntheticSource, LanguageModelTask, Vocabulary, LanguageModelConfig),
    *(ParallelTextSource, TsvPairSource, TfdsPairSource, SyntheticPairSource, TranslationTask, TranslationModelConfig),
    *(Adafactor, AdamW, Constant, InverseSquareRootToZero, WarmupCosine),
)
"""What Gin files may refer to; importing it here registers it."""


@gin.configurable
@dataclass(frozen=True)
class Experiment:
    """Model, data, optimizer, and how they are laid out over the processors.

    `mesh_shape` names the processors (`rows:16;cols:32`), `layout` what is split over them
    (`batch:rows;vocab:cols;d_ff:cols;heads:cols`). `batch_size` rows make a step. `seed` decides initial parameters,
    dropout and the order of the data.
    """

    mesh_shape: str
    layout: str
    model: LanguageModelConfig | TranslationModelConfig
    task: LanguageModelTask | TranslationTask
    optimizer: Optimizer
    schedule: Schedule
    batch_size: int
    train_steps: int
    seed: int = 0
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    decoding: Decoding = field(default_factory=Decoding)

    def __post_init__(self) -> None:
        for part, names, least in (
            (self, ("batch_size", "train_steps"), 1),
            (self, ("seed",), 0),
            (self.model, ("vocab_size", "d_model", "d_ff", "num_heads", "d_kv", "num_layers", "row_length"), 1),
            (self.training, ("microbatches", "keep_checkpoints"), 1),
            (self.training, ("log_every", "eval_every", "checkpoint_every", "keep_every"), 0),
            (self.training, ("peak_flops", "stall_seconds", "label_smoothing"), 0),
            (self.model, ("attention_dropout", "relu_dropout", "residual_dropout"), 0),
            (self.evaluation, ("batch_size", "bleu_every"), 0),
            (self.decoding, ("beam", "n_best", "min_length", "batch_size"), 1),
            (
                self.decoding,
                ("alpha", "max_length", "length_factor", "length_offset", "temperature", "top_k", "seed"),
                0,
            ),
        ):
            for name in names:
                value, most = getattr(part, name), 1 if name.endswith(("_dropout", "_smoothing")) else math.inf
                if not least <= value < most:
                    wanted = f"at least {least}" if most == math.inf else f"at least {least} and less than {most}"
                    full = f"{type(part).__name__}.{name}"
                    raise UserError(f"{full} is {value}; want {wanted}{_at(name, full)}")
        for name in ("logit_scales", "during_training"):
            scales = getattr(self.evaluation, name)
            if not scales or not all(0 < scale < math.inf for scale in scales):
                full = f"Evaluation.{name}"
                raise UserError(f"{full} is {scales}; want one or more positive numbers, e.g. (0.9, 1.0){_at(full)}")
        if self.decoding.n_best > self.decoding.beam:
            raise UserError(
                f"Decoding.n_best is {self.decoding.n_best}, more than the beam of {self.decoding.beam}"
                f"{_at('Decoding.n_best')}"
            )
        if not 0 < self.decoding.top_p <= 1:
            raise UserError(
                f"Decoding.top_p is {self.decoding.top_p}; want more than 0, at most 1{_at('Decoding.top_p')}"
            )
        ids, most = self.task.vocabulary.size, self.model.vocab_size
        if ids > most:
            raise UserError(
                f"the vocabulary may have {ids:,} ids{_at('Vocabulary.size')}, but the model has only {most:,}"
                f"{_at('vocab_size', f'{type(self.model).__name__}.vocab_size')}; raise the one or lower the other"
            )
        parts = self.training.microbatches
        if parts < 1 or self.batch_size % parts:
            raise UserError(
                f"batch_size {self.batch_size}{_at('batch_size')} does not divide into {parts} microbatches"
            )
        if set(self.model.FEATURES.values()) != set(self.task.lengths):
            raise UserError(
                f"a {type(self.task).__name__} makes rows of {' and '.join(self.task.lengths)}, a "
                f"{type(self.model).__name__} is not for them{_at('Experiment.model')}; take the model and the task of "
                "one kind"
            )
        for name, length in self.task.lengths.items():
            if length > self.model.row_length:
                raise UserError(
                    f"rows of {length} tokens ({name} of the task) are longer than the {self.model.row_length} positions "
                    f"that the model has; set {type(self.model).__name__}.row_length to at least as many"
                )

    @property
    def eval_batch_size(self) -> int:
        """Rows of an evaluation batch."""
        return self.evaluation.batch_size or self.batch_size

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of a training step over all devices."""
        return self.model.flops_per_row(self.task.lengths) * self.batch_size

    def programs(self, mesh: Mesh | AbstractMesh) -> Programs:
        """Shapes, placements and compiled functions on `mesh`. Raises UserError with the place of an illegal layout."""
        settings = StepSettings(
            self.batch_size,
            self.task.lengths,
            self.training.microbatches,
            self.seed,
            self.training.label_smoothing,
        )
        layout = self._layout()
        try:
            programs = Programs(self.model, mesh, layout, self.optimizer, self.schedule, settings)
            programs.eval_shapes(self.eval_batch_size)
            if isinstance(self.task, TranslationTask):
                programs.check_decoding(self.decoding.batch_size)
            return programs
        except mtf.LayoutError as error:
            raise UserError(f"{error}{_at('layout')}") from error

    def rows(self, mesh: Mesh | AbstractMesh) -> dict[str, str]:
        """Rows of the start-up block: what runs, and over what it is laid out."""
        mesh_shape, model, parts = mtf.mesh_shape_of(mesh), self.model, self.training.microbatches
        return {
            "mesh": f"{' x '.join(map(str, mesh_shape.values()))} ({mesh_shape}), {mesh_shape.processors} "
            f"device{'' if mesh_shape.processors == 1 else 's'}",
            "layout": repr(self._layout()),
            "model": f"{model.num_layers} layers, d_model {model.d_model}, d_ff {model.d_ff}, {model.num_heads} heads "
            f"of {model.d_kv}, vocabulary {model.vocab_size} padded to {model.padded_vocab_size}, {model.activations}",
            "batch": f"{self.batch_size} rows of {' + '.join(map(str, self.task.lengths.values()))} tokens"
            + (f" in {parts} microbatches" if parts > 1 else "")
            + f", {self.train_steps:,} steps, seed {self.seed}",
        }

    def dry_mesh(self, devices: int | None) -> mtf.MeshShape:
        """The mesh of a dry run: as written, an open size (-1) filled to `devices` (default 1)."""
        mesh = self._mesh_shape()
        return self.mesh(devices or 1) if devices or -1 in mesh.values() else mesh

    def mesh(self, devices: int) -> mtf.MeshShape:
        """The mesh on so many devices. Raises UserError saying where an impossible mesh was set."""
        mesh = self._mesh_shape()
        try:
            return mesh.resolve(devices)
        except mtf.LayoutError as error:
            first, *others = mesh or ["rows"]
            possible = ";".join([f"{first}:{devices}", *(f"{name}:1" for name in others)])
            raise UserError(
                f"{error}{_at('mesh_shape')}\nUse as many devices, name another mesh "
                f"(--gin_param=\"mesh_shape='{possible}'\"), or plan it for its own mesh: python -m mtf_experiments.plan"
            ) from error

    def _mesh_shape(self) -> mtf.MeshShape:
        try:
            return mtf.MeshShape(self.mesh_shape)
        except mtf.LayoutError as error:
            raise UserError(f"{error}{_at('mesh_shape')}; e.g. 'rows:4;cols:2'") from error

    def _layout(self) -> mtf.Layout:
        try:
            return mtf.Layout(self.layout)
        except mtf.LayoutError as error:
            raise UserError(f"{error}{_at('layout')}; e.g. 'batch:rows;d_ff:cols'") from error


def load(gin_files: Sequence[str], gin_params: Sequence[str]) -> Experiment:
    """The experiment of `gin_files` and `gin_params` (later ones win).

    Raises UserError, with file and line, for anything misspelt, of a wrong type, missing, or not read by anything.
    """
    return load_all(gin_files, gin_params, [Experiment])[0]


def load_all(gin_files: Sequence[str], gin_params: Sequence[str], roots: Sequence[type]) -> list[Any]:
    """The objects of the classes `roots` that `gin_files` and `gin_params` describe. Raises UserError as `load` does."""
    config.load(gin_files, gin_params)
    config.check_types()
    built = [config.build(root) for root in roots]
    config.check_all_read()
    return built


def _at(*names: str) -> str:
    """` (set at FILE:LINE)` for the first of the macros or parameters `names` (also of the experiment) that was set."""
    places = (config.locate(name) or config.locate(f"Experiment.{name}") for name in names)
    where = next((place for place in places if place), None)
    if where == config.PARAM:
        return f" (set by {where})"
    return f" (set at {where})" if where else ""
