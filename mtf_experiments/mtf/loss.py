"""Softmax cross-entropy over a vocabulary that may be split: two numbers per position travel, never the vocabulary."""

from __future__ import annotations

import jax.numpy as jnp

from mtf_experiments.mtf.dimension import Dimension
from mtf_experiments.mtf.elementwise import equal, where
from mtf_experiments.mtf.indexing import arange
from mtf_experiments.mtf.reduction import reduce_logsumexp, reduce_mean, reduce_sum
from mtf_experiments.mtf.tensor import NamedTensor


def softmax_cross_entropy(
    logits: NamedTensor, labels: NamedTensor, dim: Dimension | str, label_smoothing: float = 0.0
) -> NamedTensor:
    """-log softmax(logits)[label] along `dim`, in f32 and nats. `[*labels.shape]`

    With `label_smoothing` e the target distribution is 1-e on the label and e spread evenly over the whole of `dim`.
    """
    dim = logits.shape.find(dim)
    logits = logits.astype(jnp.float32)
    at_label = reduce_sum(where(equal(labels, arange(dim), output_shape=logits.shape), logits, 0.0), dim)
    normaliser = reduce_logsumexp(logits, dim)
    if label_smoothing:
        at_label = at_label * (1.0 - label_smoothing) + reduce_mean(logits, dim) * label_smoothing
    return normaliser - at_label
