"""Multi-head attention in named dimensions. Every head is computed where it lives; only its output is allreduced."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from mtf_experiments import mtf
from mtf_experiments.mtf import Dimension, NamedTensor, Random

MASKED = -1e9
"""Added to the logit of a position that may not be attended to: exp of it is exactly 0 in f32."""


def causal_bias(segments: NamedTensor) -> NamedTensor:
    """0 where a position may attend (an earlier or the same position of its own segment), else MASKED.

    `segments: [batch, length]` -> f32 `[batch, length, memory_length]`.
    """
    length = segments.shape.find("length")
    memory = mtf.rename(segments, length="memory_length")
    memory_length = memory.shape.find("memory_length")
    shape = [*segments.shape, memory_length]
    earlier = mtf.less_equal(mtf.arange(memory_length), mtf.arange(length), output_shape=[length, memory_length])
    same = mtf.equal(segments, memory, output_shape=shape)
    return mtf.where(same & earlier, 0.0, MASKED)


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

    def __call__(self, x: NamedTensor, bias: NamedTensor, random: Random | None) -> NamedTensor:
        """Self-attention. `x: [batch, length, d_model]`, `bias: [batch, length, memory_length]` -> as `x`."""
        wq, wk, wv, wo = (w.astype(x.dtype) for w in mtf.unstack(self.qkvo.get_value(), "qkvo"))
        rows = x.shape.without("d_model")
        q, k, v = (mtf.einsum([x, w], [*rows, self.heads, self.d_kv]) for w in (wq, wk, wv))
        k, v = (mtf.rename(t, length="memory_length") for t in (k, v))
        memory_length = k.shape.find("memory_length")
        shape = [x.shape[0], self.heads, x.shape.find("length"), memory_length]
        logits = mtf.einsum([q, k], shape, dtype=jnp.float32)
        weights = mtf.softmax(logits + bias, memory_length).astype(x.dtype)
        if random is not None:
            # The paper's noise on the weights is one for all of `length`, so it may as well scale the values: fewer elements.
            v = mtf.dropout(v, self.dropout, random.fold("attention"), shared=["d_kv"])
        return mtf.einsum([mtf.einsum([weights, v], q.shape), wo], x.shape)
