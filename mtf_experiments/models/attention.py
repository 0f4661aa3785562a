"""Multi-head attention in named dimensions. Every head is computed where it lives; only its output is allreduced."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from mtf_experiments import mtf
from mtf_experiments.mtf import Dimension, NamedTensor, Random

MASKED = -1e9
"""Added to the logit of a position that may not be attended to: exp of it is exactly 0 in f32."""


def segment_bias(segments: NamedTensor, memory_segments: NamedTensor, causal: bool = False) -> NamedTensor:
    """0 where a position may attend (a position of its own segment, if `causal` not a later one), else MASKED.

    `segments: [batch, length]`, `memory_segments: [batch, memory]` with any two names -> f32 `[batch, length, memory]`.
    """
    length, memory = segments.shape[-1], memory_segments.shape[-1]
    allowed = mtf.equal(segments, memory_segments, output_shape=[*segments.shape, memory])
    if causal:
        allowed &= mtf.less_equal(mtf.arange(memory), mtf.arange(length), output_shape=[length, memory])
    return mtf.where(allowed, 0.0, MASKED)


def causal_bias(segments: NamedTensor) -> NamedTensor:
    """The bias of self-attention in a decoder: `[batch, length]` -> f32 `[batch, length, memory_length]`."""
    return segment_bias(segments, mtf.rename(segments, length="memory_length"), causal=True)


def attend(q: NamedTensor, k: NamedTensor, v: NamedTensor, bias: NamedTensor) -> NamedTensor:
    """softmax(q k + bias) v for each head; products and softmax in f32.

    `q: [batch, ..., heads, d_kv]`, `k, v: [batch, memory, heads, d_kv]`, `bias: [..., memory]` any part of
    `[batch, ..., memory]` -> as `q`.
    """
    batch, *others, heads, _ = q.shape
    memory = k.shape[1]
    logits = mtf.einsum([q, k], [batch, heads, *others, memory], dtype=jnp.float32)
    weights = mtf.softmax(logits + bias, memory).astype(q.dtype)
    return mtf.einsum([weights, v], q.shape)


class Attention(nnx.Module):
    """Queries, keys, values and outputs without biases; q, k, v, o are one variable `[4, heads, d_model, d_kv]`.

    The scale 1/sqrt(d_k) is folded into the initialisation of q and k, as in the authors' code.
    """

    def __init__(
        self,
        d_model: Dimension,
        heads: Dimension,
        d_kv: Dimension,
        dropout: float,
        random: Random,
        stack: tuple[Dimension, ...] = (),
    ) -> None:
        self.dropout = dropout
        self.heads, self.d_kv = heads, d_kv
        qkvo = Dimension("qkvo", 4)
        qk, v, o = (d_model.size**2 * d_kv.size) ** -0.25, d_model.size**-0.5, (d_model.size * heads.size) ** -0.5
        standard = random.fold("qkvo").normal([*stack, qkvo, heads, d_model, d_kv])
        self.qkvo = nnx.Param(standard * NamedTensor(jnp.array([qk, qk, v, o], jnp.float32), [qkvo]))

    def weights(self, dtype: Any) -> list[NamedTensor]:
        """Those of queries, keys, values and outputs, each `[heads, d_model, d_kv]`."""
        return [w.astype(dtype) for w in mtf.unstack(self.qkvo.get_value(), "qkvo")]

    def split_heads(self, x: NamedTensor, w: NamedTensor) -> NamedTensor:
        """`[..., d_model]` -> `[..., heads, d_kv]`."""
        return mtf.einsum([x, w], [*x.shape.without("d_model"), self.heads, self.d_kv])

    def __call__(
        self, x: NamedTensor, bias: NamedTensor, random: Random | None, memory: NamedTensor | None = None
    ) -> NamedTensor:
        """Attention of `x: [batch, length, d_model]` to itself, or to `memory: [batch, other, d_model]` -> as `x`.

        `bias: [batch, length, other]`, where in self-attention `other` is `memory_length`.
        """
        wq, wk, wv, wo = self.weights(x.dtype)
        q = self.split_heads(x, wq)
        k, v = (self.split_heads(x if memory is None else memory, w) for w in (wk, wv))
        if memory is None:
            k, v = (mtf.rename(t, {x.shape[-2].name: "memory_length"}) for t in (k, v))
        if random is not None:
            # The paper's noise on the weights is one for all of `length`, so it may as well scale the values: fewer elements.
            v = mtf.dropout(v, self.dropout, random.fold("attention"), shared=["d_kv"])
        return mtf.einsum([attend(q, k, v, bias), wo], x.shape)
