"""The training step: gradients of the mean token loss, computed in the language, and one optimizer update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.loss import scaled_token_nll, token_losses
from mtf_experiments.models.parameters import Parameters
from mtf_experiments.training import optimizers
from mtf_experiments.training.optimizers import Optimizer
from mtf_experiments.training.schedules import Schedule

Batch = Mapping[str, mtf.NamedTensor]


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """What training changes. `step`: int32 scalar, the number of updates done; everything else that counts follows it."""

    params: Parameters
    opt_state: Any
    step: jax.Array


@dataclass(frozen=True)
class StepSettings:
    """Sizes of a training step: `batch_size` rows, in `microbatches` equal parts one after another.

    `lengths` are those of the dimensions of a row, `{"length": 256}`. `seed` decides initial parameters and dropout.
    `label_smoothing` applies to the training loss only.
    """

    batch_size: int
    lengths: Mapping[str, int]
    microbatches: int = 1
    seed: int = 0
    label_smoothing: float = 0.0


class Programs:
    """Everything of a run that follows from model, mesh and layout: shapes, placements, and the compiled functions.

    On an AbstractMesh all of it can be traced and measured, but not run. Raises LayoutError if the layout is not legal for
    the model, before anything is compiled.
    """

    SUMMED = ("batch", "length")
    """Dimensions that the loss is a sum over."""

    def __init__(
        self,
        model: Any,
        mesh: Mesh | AbstractMesh,
        layout: mtf.Layout,
        optimizer: Optimizer,
        schedule: Schedule,
        settings: StepSettings,
    ) -> None:
        self.mesh, self.layout, self.settings, self.schedule = mesh, layout, settings, schedule
        self.mesh_shape = mtf.mesh_shape_of(mesh)
        self.structure, self.params = model.abstract_parameters()
        self._build, self._features = model.build, model.FEATURES
        layout.check_mesh(self.mesh_shape)
        parameters.check_layout(self.params, self.mesh_shape, layout)
        self.transformation = optimizer.transformation(self.params)
        self.train_rows = (
            mtf.Dimension("microbatches", settings.microbatches),
            mtf.Dimension("batch", settings.batch_size // settings.microbatches),
        )
        self.train_shapes = self._shapes(self.train_rows, "of training rows")
        checked = mtf.check_program(self._gradients, self.mesh_shape, layout, *self.abstract_gradient_arguments())
        self.gradient_program = mtf.spmd(self._gradients, mesh, layout, checked=checked)
        # Initialisation knows parameters only, so rules for activations have nothing to match there.
        self.lenient_layout = mtf.Layout({f"{name}": axis for name, axis in layout.items()})
        self.lenient_layout.optional.update(layout)

    @property
    def vocab_size(self) -> int:
        """Ids that the model has, padding of the dimension included."""
        return self.params["embedding/tokens"].shape.find("vocab").size

    def eval_shapes(self, batch_size: int) -> dict[str, mtf.Shape]:
        """Shapes of the features of `batch_size` evaluation rows. Raises LayoutError if they cannot be laid out."""
        return self._shapes((mtf.Dimension("batch", batch_size),), "of evaluation rows")

    def check_decoding(self, batch_size: int) -> None:
        """Raises LayoutError if `batch_size` lines at once cannot be laid out."""
        self.layout.check_shape(mtf.Shape([mtf.Dimension("batch", batch_size)]), self.mesh_shape, "of lines to decode")

    def _shapes(self, rows: tuple[mtf.Dimension, ...], what: str) -> dict[str, mtf.Shape]:
        lengths = {name: mtf.Dimension(name, size) for name, size in self.settings.lengths.items()}
        shapes = {feature: mtf.Shape([*rows, lengths[length]]) for feature, length in self._features.items()}
        for shape in shapes.values():
            self.layout.check_shape(shape, self.mesh_shape, what)
        return shapes

    # Shapes and placements

    def sharding(self, shape: mtf.Shape) -> Any:
        """Where a tensor of `shape` lives."""
        return mtf.sharding(shape, self.layout, self.mesh)

    def abstract_state(self) -> TrainState:
        """The training state as shapes, types and shardings: what initialisation returns and checkpoints restore."""

        def placed(array: Any, shape: mtf.Shape) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.sharding(shape))

        params = {n: mtf.NamedTensor.unchecked(placed(p.array, p.shape), p.shape) for n, p in self.params.items()}
        opt_state = jax.eval_shape(self.transformation.init, {n: p.array for n, p in self.params.items()})
        shapes = optimizers.state_dimensions(self.transformation, self.params)
        step: Any = placed(jax.ShapeDtypeStruct((), jnp.int32), mtf.Shape())
        return TrainState(params, jax.tree.map(placed, opt_state, shapes), step)

    def abstract_batch(self) -> Batch:
        """A training batch as shapes."""
        return {
            feature: mtf.NamedTensor(jax.ShapeDtypeStruct(shape.sizes, jnp.int32), shape)
            for feature, shape in self.train_shapes.items()
        }

    def abstract_gradient_arguments(self) -> tuple[Any, ...]:
        """Arguments of the gradient program as shapes."""
        step = jax.ShapeDtypeStruct((), jnp.int32)
        return self.params, self.abstract_batch(), parameters.ABSTRACT_KEY, step

    # The programs

    def initialise(self) -> TrainState:
        """A fresh state; every processor draws only its own slices, the same numbers under every layout."""

        def draw(key: jax.Array) -> Parameters:
            return parameters.split(self._build(mtf.Random(key).fold("parameters")))[1]

        params = mtf.spmd(draw, self.mesh, self.lenient_layout)(jax.random.key(self.settings.seed))
        opt_state = optimizers.init(
            self.transformation,
            params,
            optimizers.state_shardings(self.transformation, params, self.sharding),
        )
        step = jax.device_put(jnp.zeros((), jnp.int32), self.sharding(mtf.Shape()))
        return TrainState(params, opt_state, step)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update. Metrics: `loss` (that is minimised) and `nll`, nats per real target token, `tokens`,
        `learning_rate`, `grad_norm`.
        """
        key = jax.random.key(self.settings.seed)
        gradients, metrics = self.gradient_program(state.params, batch, key, state.step)
        rate = self.schedule(state.step)
        grad_norm = optax.tree.norm([g.array for g in gradients.values()])
        params, opt_state = optimizers.apply(self.transformation, gradients, state.opt_state, state.params, rate)
        metrics = {**metrics, "learning_rate": rate, "grad_norm": grad_norm}
        return TrainState(params, opt_state, state.step + 1), metrics

    def compiled_update(self, keep_unused: bool = False) -> Any:
        """`update`, jitted; it reuses the buffers of the state that it is given.

        With `keep_unused` arguments that it does not read stay arguments of the compiled program.
        """
        shardings = jax.tree.map(lambda s: s.sharding, self.abstract_state())
        results = (shardings, self.sharding(mtf.Shape()))
        return jax.jit(self.update, donate_argnums=0, out_shardings=results, keep_unused=keep_unused)

    def compiled_nll(self, scales: tuple[float, ...]) -> Callable[[Parameters, Batch], mtf.NamedTensor]:
        """NLL of every token without dropout, for each logit scale. f32 `[scales, batch, length]`"""

        def nll(params: Parameters, batch: Batch) -> mtf.NamedTensor:
            model = parameters.merge(self.structure, params)
            return scaled_token_nll(model(batch), batch["targets"], scales)

        return mtf.spmd(nll, self.mesh, self.layout)

    def _losses(
        self, params: Parameters, batch: Batch, noise: mtf.Random | None
    ) -> tuple[mtf.NamedTensor, mtf.NamedTensor]:
        """What is minimised and the NLL, of each token of a microbatch. Both f32 `[batch, length]`"""
        logits = parameters.merge(self.structure, params)(batch, noise)
        return token_losses(logits, batch["targets"], self.settings.label_smoothing)

    def record(self) -> mtf.Record:
        """The record of the loss of one microbatch; of a model without rematerialisation, whose operations are hidden."""
        microbatches, _ = self.train_rows
        batch = {
            feature: mtf.NamedTensor(jax.ShapeDtypeStruct(shape.sizes, jnp.int32), shape)
            for feature, shape in ((f, s.without(microbatches)) for f, s in self.train_shapes.items())
        }

        def loss(params: Parameters, batch: Batch, key: jax.Array) -> mtf.NamedTensor:
            return mtf.reduce_sum(self._losses(params, batch, mtf.Random(key))[0])

        return mtf.record(loss, self.params, batch, parameters.ABSTRACT_KEY)

    def _gradients(
        self, params: Parameters, batch: Batch, key: jax.Array, step: jax.Array
    ) -> tuple[Parameters, dict[str, jax.Array]]:
        """Gradients of the loss sum / number of real targets in the whole batch, whatever the microbatches and layout."""
        random = mtf.Random(key).fold("dropout").fold(step)
        tokens = mtf.reduce_sum(mtf.not_equal(batch["targets"], 0).astype(jnp.int32)).array
        denominator = jnp.maximum(tokens, 1).astype(jnp.float32)
        microbatches, rows = self.train_rows
        # The parameters' gradients stay local through the loop; the transpose of this cast sums them over the processors.
        # Only what the loss is summed over: along a split `inputs_length` the processors share one and the same loss.
        local, sum_over_processors = jax.vjp(
            jax.named_scope("parameters")(partial(mtf.vary_over, dims=self.SUMMED)), params
        )

        def of_part(part: Any) -> tuple[Parameters, jax.Array, jax.Array]:
            part_batch, number = part
            noise = random.window("batch", number.array * rows.size, rows.size * microbatches.size)

            def loss(p: Parameters) -> tuple[jax.Array, jax.Array]:
                minimised, plain = self._losses(p, part_batch, noise)
                nll = mtf.reduce_sum(plain).array / denominator
                if minimised is plain:
                    return nll, nll
                return mtf.reduce_sum(minimised).array / denominator, nll

            (value, nll), gradients = jax.value_and_grad(loss, has_aux=True)(local)
            return gradients, value, nll

        parts = (batch, mtf.arange(microbatches))
        if microbatches.size == 1:  # no loop: adding the only part to zeros would be one more pass over all gradients
            sums = of_part(jax.tree.map(lambda x: mtf.index(x, microbatches, 0), parts, is_leaf=mtf.is_named))
        else:
            zero = jnp.zeros((), jnp.float32)
            zeros = (mtf.zeros_like(local), zero, zero)
            sums, _ = mtf.scan(lambda s, p: (jax.tree.map(jnp.add, s, of_part(p)), None), zeros, parts, microbatches)
        gradients, loss, nll = sums
        return sum_over_processors(gradients)[0], {"loss": loss, "nll": nll, "tokens": tokens}
