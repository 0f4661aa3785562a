"""Softmax and its cross-entropy over a dimension that may be split: a few numbers per row travel, never the dimension.

Both have gradients of their own: softmax keeps its result only, cross-entropy its exponentials only, and each backward
pass reads them once. (Left to differentiation, both would keep several tensors of that size and read each again.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtf_experiments.mtf import collective
from mtf_experiments.mtf.dimension import Dimension, ShapeError
from mtf_experiments.mtf.elementwise import logical_and, where
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.reduction import reduce_logsumexp, split_over
from mtf_experiments.mtf.reshape import transpose
from mtf_experiments.mtf.tensor import NamedTensor

Axes = tuple[str, ...]


@recorded
def softmax(x: NamedTensor, dim: Dimension | str) -> NamedTensor:
    """exp(x) / sum(exp(x)) over `dim`. A row that is -inf throughout gives NaN, as 0/0 does."""
    dim = x.shape.find(dim)
    return NamedTensor(_softmax(x.array, x.shape.axis(dim), split_over([dim])), x.shape)


@recorded
def log_softmax(x: NamedTensor, dim: Dimension | str) -> NamedTensor:
    """x - logsumexp(x) over `dim`."""
    return x - reduce_logsumexp(x, dim)


@recorded
def softmax_cross_entropy(
    logits: NamedTensor, labels: NamedTensor, dim: Dimension | str, label_smoothing: float = 0.0
) -> NamedTensor:
    """-log softmax(logits)[label] along `dim`, in f32 and nats: `[*labels.shape]`.

    `labels` has the dimensions of `logits` less `dim`. With `label_smoothing` e the target distribution is 1-e on the
    label and e spread evenly over the whole of `dim`. A label outside 0..size-1 yields NaN. Raises ShapeError for
    labels that are not integers, or of other dimensions.
    """
    if not label_smoothing:
        return _cross_entropies(logits, labels, dim, with_uniform=False)[0]
    return smoothed(*softmax_cross_entropy_and_uniform(logits, labels, dim), label_smoothing)


@recorded
def softmax_cross_entropy_and_uniform(
    logits: NamedTensor, labels: NamedTensor, dim: Dimension | str
) -> tuple[NamedTensor, NamedTensor]:
    """The cross-entropies with the labels and with the uniform distribution over `dim`, both `[*labels.shape]`, in one
    pass over the logits; `smoothed` mixes them. As `softmax_cross_entropy` otherwise.
    """
    return _cross_entropies(logits, labels, dim, with_uniform=True)


def smoothed(nll: NamedTensor, uniform: NamedTensor, label_smoothing: float) -> NamedTensor:
    """The cross-entropy with (1-e) label + e uniform, which is linear in the target distribution."""
    return nll * (1 - label_smoothing) + uniform * label_smoothing


def _cross_entropies(
    logits: NamedTensor, labels: NamedTensor, dim: Dimension | str, with_uniform: bool
) -> tuple[NamedTensor, NamedTensor]:
    dim = logits.shape.find(dim)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ShapeError(f"cross-entropy along {dim.name} needs integer labels, got {labels.dtype}")
    if set(labels.shape) != set(logits.shape.without(dim)):
        raise ShapeError(
            f"labels {labels.shape} of logits {logits.shape} along {dim}: want {logits.shape.without(dim)}"
        )
    wide = transpose(logits, [*labels.shape, dim]).astype(jnp.float32)
    # Logits that a broadcast made the same along split labels must vary like them: their gradient does.
    array = wide.varying(collective.varying_axes(labels.array))
    both: Any = _cross_entropy(array, labels.array, split_over([dim]), with_uniform, dim.size)
    nll, uniform = (NamedTensor(a, labels.shape) for a in both)
    known = logical_and(labels >= 0, labels < dim.size)
    return where(known, nll, jnp.nan), where(known, uniform, jnp.nan)


def _shifted_exponential(x: jax.Array, axis: int, mesh_axes: Axes) -> tuple[jax.Array, jax.Array]:
    """exp(x - maximum), which cannot overflow, and that maximum (0 for rows without a finite one), axis kept."""
    maximum = collective.allreduce_max(jnp.max(x, axis=axis, keepdims=True), mesh_axes)
    maximum = jnp.where(jnp.isfinite(maximum), maximum, 0)
    return jnp.exp(x - maximum), maximum


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _softmax(x: jax.Array, axis: int, mesh_axes: Axes) -> jax.Array:
    exponential, _ = _shifted_exponential(x, axis, mesh_axes)
    return exponential / collective.allreduce(jnp.sum(exponential, axis=axis, keepdims=True), mesh_axes)


def _softmax_forward(x: jax.Array, axis: int, mesh_axes: Axes) -> tuple[jax.Array, jax.Array]:
    y: jax.Array = _softmax(x, axis, mesh_axes)  # pyright: ignore[reportAssignmentType]
    return y, y


def _softmax_backward(axis: int, mesh_axes: Axes, y: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    mean = collective.allreduce(jnp.sum(g * y, axis=axis, keepdims=True), mesh_axes)
    return (y * (g - mean),)


_softmax.defvjp(_softmax_forward, _softmax_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _cross_entropy(
    logits: jax.Array, labels: jax.Array, mesh_axes: Axes, with_uniform: bool, size: int
) -> tuple[jax.Array, jax.Array]:
    return _cross_entropy_forward(logits, labels, mesh_axes, with_uniform, size)[0]


def _cross_entropy_forward(
    logits: jax.Array, labels: jax.Array, mesh_axes: Axes, with_uniform: bool, size: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    exponential, maximum = _shifted_exponential(logits, -1, mesh_axes)
    total = collective.allreduce(jnp.sum(exponential, axis=-1), mesh_axes)
    normaliser = jnp.log(total) + jnp.squeeze(maximum, -1)
    local = labels - _start(logits, mesh_axes)
    mine = (local >= 0) & (local < logits.shape[-1])
    row = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[..., None], axis=-1)
    nll = normaliser - collective.allreduce(jnp.where(mine, jnp.squeeze(row, -1), 0), mesh_axes)
    uniform = nll  # stands in where none is asked for; its gradient is then never used
    if with_uniform:
        uniform = normaliser - collective.allreduce(jnp.sum(logits, axis=-1), mesh_axes) / size
    return (nll, uniform), (exponential, labels, total)


def _cross_entropy_backward(
    mesh_axes: Axes,
    with_uniform: bool,
    size: int,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    g: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, None]:
    exponential, labels, total = kept
    of_label, of_uniform = g
    positions = _start(exponential, mesh_axes) + lax.broadcasted_iota(
        jnp.int32, exponential.shape, exponential.ndim - 1
    )
    target = jnp.where(positions == labels[..., None], of_label[..., None], 0.0)
    whole = of_label
    if with_uniform:
        target, whole = target + (of_uniform / size)[..., None], of_label + of_uniform
    gradient = exponential * (whole / total)[..., None] - target
    # Two products read it, one transposed: without the barrier XLA computes it twice, the second time column by column.
    return lax.optimization_barrier(gradient), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _start(x: jax.Array, mesh_axes: Axes) -> jax.Array | int:
    """Where this processor's slice of the last axis begins in the whole dimension."""
    return collective.global_start(mesh_axes[0] if mesh_axes else None, x.shape[-1])
