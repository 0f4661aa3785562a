"""Optimizers: optax transformations over named parameters, with statistics per layer and a placement for every leaf.

A configuration object (`Adafactor`, `AdamW`) makes a transformation for a unit learning rate; `apply` multiplies by the
learning rate that the trainer derived from its one step counter. So optax's own counters (second moment decay, bias
correction) and the schedule cannot drift apart, and `updates_done` holds them to the trainer's step.

A parameter whose first dimension is named `*layers` stacks one variable per layer: root mean squares, clipping and
factored moments are then taken for each layer by itself.
"""

from __future__ import annotations

import importlib.util  # noqa: F401  (gin uses it without importing it)
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mtf_experiments.errors import UserError
from mtf_experiments.mtf import Dimension, NamedTensor, Shape

Params = Mapping[str, NamedTensor]

NOT_DECAYED = ("scale", "scales", "bias", "biases", "position", "positions", "embedding", "embeddings")


@runtime_checkable
class Optimizer(Protocol):
    """What the trainer needs of an optimizer's configuration."""

    def transformation(self, params: Params) -> optax.GradientTransformation:
        """The transformation for a learning rate of 1, over {name: array}; its updates are to be added."""
        ...

    def decayed(self, params: Params) -> dict[str, bool]:
        """Which parameters weight decay shrinks."""
        ...


@gin.configurable
@dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer and Stern 2018); the defaults are those of the paper's experiments.

    In this order, for each variable (each layer of a stacked parameter) with gradient g, after t earlier updates:

    1. v <- b v + (1 - b) (g^2 + epsilon), b = 1 - (max(t - decay_offset, 0) + 1)^-decay_exponent; u = g / sqrt(v).
       v is kept as row and column means over the two largest dimensions where the second largest has at least
       `min_dim_size_to_factor`
    2. u <- u / max(1, RMS(u) / clipping_threshold)
    3. with beta1: m <- beta1 m + (1 - beta1) u, u = m (no bias correction). The moment averages unscaled updates: a new
       learning rate acts on it at once
    4. u <- u * max(RMS(parameter), min_parameter_scale)
    5. u <- u + weight_decay * parameter, for the parameters that `decays` names
    6. parameter <- parameter - learning_rate * u

    decay_offset restarts the decay for fine-tuning: up to t = decay_offset v forgets the past, as at a fresh start. A
    fresh state is legal with any offset.
    """

    factored: bool = True
    min_dim_size_to_factor: int = 128
    decay_exponent: float = 0.8
    decay_offset: int = 0
    epsilon: float = 1e-30
    clipping_threshold: float | None = 1.0
    multiply_by_parameter_scale: bool = True
    min_parameter_scale: float = 1e-3
    beta1: float = 0.0
    weight_decay: float = 0.0
    not_decayed: tuple[str, ...] = NOT_DECAYED

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta1 < 1.0:
            raise UserError(f"Adafactor.beta1 is {self.beta1}; want 0 (no momentum) or more and less than 1")
        if self.decay_offset < 0:
            raise UserError(f"Adafactor.decay_offset is {self.decay_offset}; want the step of a fresh start, 0 or more")

    def decayed(self, params: Params) -> dict[str, bool]:
        """Which parameters weight decay shrinks."""
        return _decayed(params, self.weight_decay, self.not_decayed)

    def transformation(self, params: Params) -> optax.GradientTransformation:
        """Steps 1 to 5 for a learning rate of 1, over {name: array}; its updates are to be added."""

        def decay_rate(step: Any, exponent: Any) -> jax.Array:
            # A power of a negative number is NaN, and one NaN in the second moments stays for ever.
            return 1.0 - (jnp.maximum(step, 0) + 1.0).astype(jnp.float32) ** -exponent

        scaling = [
            optax.scale_by_factored_rms(
                factored=self.factored,
                decay_rate=self.decay_exponent,
                step_offset=self.decay_offset,
                min_dim_size_to_factor=self.min_dim_size_to_factor,
                epsilon=self.epsilon,
                decay_rate_fn=decay_rate,
            )
        ]
        if self.clipping_threshold is not None:
            scaling.append(optax.clip_by_block_rms(self.clipping_threshold))
        parts = [_per_layer(optax.chain(*scaling), params)]
        if self.beta1:
            parts.append(optax.ema(self.beta1, debias=False))
        if self.multiply_by_parameter_scale:
            parts.append(_per_layer(optax.scale_by_param_block_rms(self.min_parameter_scale), params))
        if self.weight_decay:
            parts.append(optax.add_decayed_weights(self.weight_decay, self.decayed(params)))
        return optax.chain(*parts, optax.scale(-1.0))


@gin.configurable
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    parameter <- parameter - learning_rate * (m / (sqrt(v) + epsilon) + weight_decay * parameter), with m and v
    bias-corrected and weight_decay 0 for parameters that `decayed` leaves out. `clip_global_norm` first scales all
    gradients together to at most that norm.
    """

    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0
    not_decayed: tuple[str, ...] = NOT_DECAYED
    clip_global_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"AdamW.{name} is {getattr(self, name)}; want 0 or more and less than 1")

    def decayed(self, params: Params) -> dict[str, bool]:
        """Which parameters weight decay shrinks."""
        return _decayed(params, self.weight_decay, self.not_decayed)

    def transformation(self, params: Params) -> optax.GradientTransformation:
        """The update for a learning rate of 1, over {name: array}; to be added."""
        parts = [] if self.clip_global_norm is None else [optax.clip_by_global_norm(self.clip_global_norm)]
        parts.append(optax.scale_by_adam(self.beta1, self.beta2, self.epsilon))
        if self.weight_decay:
            parts.append(optax.add_decayed_weights(self.weight_decay, self.decayed(params)))
        return optax.chain(*parts, optax.scale(-1.0))


def init(tx: optax.GradientTransformation, params: Params, shardings: Any = None) -> Any:
    """A fresh optimizer state, created in place on `shardings` (a tree as of `state_shardings`)."""
    return jax.jit(tx.init, out_shardings=shardings)(_arrays(params))


def apply(
    tx: optax.GradientTransformation, gradients: Params, state: Any, params: Params, learning_rate: jax.Array | float
) -> tuple[dict[str, NamedTensor], Any]:
    """One update: the new parameters and the new optimizer state. Names and dimensions stay as they are in `params`."""
    arrays = _arrays(params)
    updates, state = tx.update(_arrays(gradients), state, arrays)
    new: Any = optax.apply_updates(arrays, jax.tree.map(lambda u: learning_rate * u, updates))
    return {name: NamedTensor(new[name], p.shape) for name, p in params.items()}, state


def updates_done(state: Any) -> int:
    """The number of updates in an optimizer state. Raises ValueError where its counters disagree or are missing."""
    counts = {int(leaf) for path, leaf in jax.tree.leaves_with_path(state) if _key(path[-1]) == "count"}
    if len(counts) != 1:
        raise ValueError(f"the optimizer state holds {len(counts)} different update counts: {sorted(counts)}")
    return counts.pop()


def describe(optimizer: Optimizer, params: Params) -> str:
    """Which parameters weight decay shrinks and which it leaves, one a line."""
    decayed = optimizer.decayed(params)
    return "\n".join(f"{'decays' if decayed[name] else 'no decay':<9} {name} {p.shape}" for name, p in params.items())


def state_dimensions(tx: optax.GradientTransformation, params: Params) -> Any:
    """The named Shape of every leaf of the optimizer state, as a tree of that state's structure.

    A moment has its parameter's dimensions, a factored one those that were not averaged away, a counter none. Needs
    shapes and dtypes of `params` only. Raises ValueError for a leaf of which none of this is true.
    """
    abstract = {name: jax.ShapeDtypeStruct(p.shape.sizes, p.dtype) for name, p in params.items()}
    return jax.tree.map_with_path(
        lambda path, leaf: _leaf_dimensions(path, leaf, params), jax.eval_shape(tx.init, abstract)
    )


def state_shardings(
    tx: optax.GradientTransformation, params: Params, sharding_of: Callable[[Shape], jax.sharding.Sharding]
) -> Any:
    """The sharding of every leaf of the optimizer state: the layout's, applied to that leaf's own dimensions."""
    return jax.tree.map(sharding_of, state_dimensions(tx, params), is_leaf=lambda x: isinstance(x, Shape))


def aliased(tree: Any) -> list[tuple[str, str]]:
    """Pairs of leaves that share one buffer, by their paths; such a tree must not be donated."""
    seen: dict[int, str] = {}
    pairs = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        pointers = {s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards if s.data.size}
        pairs += [(seen[p], name) for p in sorted(pointers) if p in seen]
        seen.update(dict.fromkeys(pointers, name))
    return sorted(set(pairs))


def _arrays(params: Params) -> dict[str, Any]:
    return {name: p.array for name, p in params.items()}


def _key(entry: Any) -> Any:
    """The key, index or field name of one entry of a tree path."""
    return next(getattr(entry, a) for a in ("key", "name", "idx") if hasattr(entry, a))


def _is_stacked(shape: Shape) -> bool:
    return bool(shape) and shape[0].name.endswith("layers")


def _decayed(params: Params, weight_decay: float, not_decayed: tuple[str, ...]) -> dict[str, bool]:
    """Matrices decay: two or more dimensions besides layers, unless the name ends in a word of `not_decayed`."""

    def decays(name: str, shape: Shape) -> bool:
        last = name.rsplit("/", 1)[-1]
        exempt = any(last == word or last.endswith("_" + word) for word in not_decayed)
        return bool(weight_decay) and not exempt and len(shape) - _is_stacked(shape) >= 2

    return {name: decays(name, p.shape) for name, p in params.items()}


def _per_layer(tx: optax.GradientTransformation, params: Params) -> optax.GradientTransformation:
    """`tx`, applied to each layer of a stacked parameter by itself."""
    labels = {n: f"{p.shape[0].name}{p.shape[0].size}" if _is_stacked(p.shape) else "single" for n, p in params.items()}
    return optax.partition({label: tx if label == "single" else _mapped(tx) for label in set(labels.values())}, labels)


def _mapped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx`, mapped over the first axis of every parameter. Scalars of its state (counters) stay one for all layers."""

    def axes(params: Any) -> Any:
        layer = jax.eval_shape(lambda p: tx.init(jax.tree.map(lambda x: x[0], p)), params)
        return jax.tree.map(lambda leaf: 0 if leaf.ndim else None, layer)

    def init_fn(params: Any) -> Any:
        return jax.vmap(tx.init, out_axes=axes(params))(params)

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        state_axes = axes(params)
        return jax.vmap(tx.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))(updates, state, params)

    return optax.GradientTransformation(init_fn, update_fn)


def _leaf_dimensions(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, params: Params) -> Shape:
    keys = [_key(entry) for entry in path]
    name = keys[-1]
    if not leaf.shape and name not in params:
        return Shape()
    if name in params:
        shape = params[name].shape
        stack = shape[: int(_is_stacked(shape))]
        matrix = shape[len(stack) :]
        kept = {"v_row": _without_largest(matrix, 1), "v_col": _without_largest(matrix, 2)}.get(keys[-2], matrix)
        # optax leaves one zero in the place of a moment that a parameter does not have.
        for dimensions in (Shape((*stack, *kept)), Shape((*stack, Dimension("no_moment", 1)))):
            if dimensions.sizes == leaf.shape:
                return dimensions
    raise ValueError(f"optimizer state {'/'.join(map(str, keys))} of sizes {list(leaf.shape)} fits no parameter")


def _without_largest(dimensions: tuple[Dimension, ...], rank: int) -> tuple[Dimension, ...]:
    """`dimensions` less the largest (rank 1) or the second largest (rank 2).

    optax averages the row moment over the largest dimension, the column moment over the second largest. It tells
    equal sizes apart by numpy's default argsort, whose order of ties is not documented: so the very same call here.
    """
    if len(dimensions) < 2:
        return dimensions
    drop = int(np.argsort(tuple(d.size for d in dimensions))[-rank])
    return dimensions[:drop] + dimensions[drop + 1 :]
