"""Softmax cross-entropy over a vocabulary that may be split: two numbers per position travel, never the vocabulary."""

from __future__ import annotations

import jax.numpy as jnp

from mtf_experiments.mtf.dimension import Dimension, ShapeError
from mtf_experiments.mtf.elementwise import equal, logical_and, where
from mtf_experiments.mtf.indexing import arange
from mtf_experiments.mtf.reduction import reduce_logsumexp, reduce_mean, reduce_sum
from mtf_experiments.mtf.tensor import NamedTensor


def softmax_cross_entropy(
    logits: NamedTensor, labels: NamedTensor, dim: Dimension | str, label_smoothing: float = 0.0
) -> NamedTensor:
    """-log softmax(logits)[label] along `dim`, in f32 and nats. `[*labels.shape]`

    With `label_smoothing` e the target distribution is 1-e on the label and e spread evenly over the whole of `dim`.
    A label outside 0..size-1 yields NaN. Raises ShapeError for labels that are not integers.
    """
    dim = logits.shape.find(dim)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ShapeError(f"cross-entropy along {dim.name} needs integer labels, got {labels.dtype}")
    logits = logits.astype(jnp.float32)
    at_label = reduce_sum(where(equal(labels, arange(dim), output_shape=logits.shape), logits, 0.0), dim)
    normaliser = reduce_logsumexp(logits, dim)
    if label_smoothing:
        at_label = at_label * (1.0 - label_smoothing) + reduce_mean(logits, dim) * label_smoothing
    return where(logical_and(labels >= 0, labels < dim.size), normaliser - at_label, jnp.nan, normaliser.shape)
