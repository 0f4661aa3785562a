"""Norm, feed-forward and embedding layers of the paper's Transformer: no biases, learned RMS-norm scales, ReLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mtf_experiments import mtf
from mtf_experiments.models.parameters import normal
from mtf_experiments.mtf import Dimension, NamedTensor, Random


def rms_norm(x: NamedTensor, scale: NamedTensor, epsilon: float = 1e-6) -> NamedTensor:
    """x / sqrt(mean(x², d_model) + epsilon) * scale, computed in f32. `[..., d_model]`, `scale: [d_model]`"""
    wide = x.astype(jnp.float32)
    (d_model,) = scale.shape
    mean_square = mtf.reduce_mean(mtf.square(wide), d_model)
    return (wide * mtf.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)


class FeedForward(nnx.Module):
    """wo(dropout(relu(wi(x)))). wi and wo are one variable `[2, d_model, d_ff]`, as in the authors' code."""

    def __init__(
        self, d_model: Dimension, d_ff: Dimension, dropout: float, random: Random, stack: tuple[Dimension, ...] = ()
    ) -> None:
        self.dropout = dropout
        self.d_ff = d_ff
        shape = [*stack, Dimension("in_out", 2), d_model, d_ff]
        self.wi_wo = normal(random, "wi_wo", shape, (d_ff.size * d_model.size) ** -0.25)

    def weights(self, dtype: Any) -> list[NamedTensor]:
        """wi and wo, each `[d_model, d_ff]`."""
        return [w.astype(dtype) for w in mtf.unstack(self.wi_wo.get_value(), "in_out")]

    def __call__(
        self, x: NamedTensor, random: Random | None, weights: Sequence[NamedTensor] | None = None
    ) -> NamedTensor:
        """`[..., d_model]` -> the same. `weights`: those of `weights(x.dtype)`, where they are at hand."""
        wi, wo = weights or self.weights(x.dtype)
        hidden = mtf.relu(mtf.einsum([x, wi], [*x.shape.without("d_model"), self.d_ff]))
        if random is not None:
            hidden = mtf.dropout(hidden, self.dropout, random.fold("relu"), shared=["length", "inputs_length"])
        return mtf.einsum([hidden, wo], x.shape)


class Embedding(nnx.Module):
    """Token and learned absolute position embeddings, N(0, 1), not scaled by sqrt(d_model)."""

    def __init__(self, vocab: Dimension, positions: Dimension, d_model: Dimension, random: Random) -> None:
        self.tokens = normal(random, "tokens", [vocab, d_model], 1.0)
        self.positions = normal(random, "positions", [positions, d_model], 1.0)

    def __call__(self, ids: NamedTensor, positions: NamedTensor, dtype: jnp.dtype) -> NamedTensor:
        """`ids, positions: [batch, length]` -> `[batch, length, d_model]`."""
        tokens = mtf.gather(self.tokens.get_value(), ids, "vocab")
        return (tokens + mtf.gather(self.positions.get_value(), positions, "positions")).astype(dtype)
