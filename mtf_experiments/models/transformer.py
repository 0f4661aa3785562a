"""A stack of identical pre-norm Transformer layers, scanned over the dimension `layers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mtf_experiments import mtf
from mtf_experiments.models.attention import Attention
from mtf_experiments.models.layers import FeedForward, rms_norm
from mtf_experiments.mtf import Dimension, NamedTensor, Random
from mtf_experiments.mtf.collective import COMMUNICATED

Remat = Literal["none", "full", "communication"]


@dataclass(frozen=True)
class Widths:
    """Sizes of a Transformer and how it is computed.

    `remat`: what the backward pass recomputes of a layer: `none` of it (all activations are kept), `full` (only the layer's
    input is kept), or all but results of `communication` (no collective is repeated). `unroll`: layers per loop iteration;
    0 chooses by backend (a CPU runs unrolled loops faster, accelerators compile scanned ones faster).
    """

    d_model: int
    d_ff: int
    num_heads: int
    d_kv: int
    num_layers: int
    attention_dropout: float = 0.1
    relu_dropout: float = 0.1
    residual_dropout: float = 0.1
    remat: Remat = "none"
    unroll: int = 0


class Transformer(nnx.Module):
    """num_layers x [self-attention, feed-forward], each x + dropout(f(norm(x))), and a final norm.

    All norm scales are one variable `[norms, d_model]` (two per layer, then the final one), as in the authors' code.
    """

    def __init__(self, widths: Widths, random: Random) -> None:
        d_model = Dimension("d_model", widths.d_model)
        self.layers = Dimension("layers", widths.num_layers)
        self.widths = widths
        stack = (self.layers,)
        self.attention = Attention(
            d_model,
            Dimension("heads", widths.num_heads),
            Dimension("d_kv", widths.d_kv),
            widths.attention_dropout,
            random.fold("attention"),
            stack,
        )
        self.feed_forward = FeedForward(
            d_model, Dimension("d_ff", widths.d_ff), widths.relu_dropout, random.fold("feed_forward"), stack
        )
        self.norm_scales = nnx.Param(mtf.full([Dimension("norms", 2 * widths.num_layers + 1), d_model], 1.0))

    def __call__(self, x: NamedTensor, bias: NamedTensor, random: Random | None) -> NamedTensor:
        """`x: [batch, length, d_model]`, `bias` as in Attention -> the same shape, normed. Without `random`: no dropout."""
        scales = self.norm_scales.get_value()
        per_layer = mtf.slice_dimension(scales, "norms", 0, 2 * self.layers.size)
        per_layer = mtf.reshape(per_layer, [self.layers, Dimension("sublayers", 2), scales.shape.find("d_model")])
        structure, state = nnx.split((self.attention, self.feed_forward))

        def residual(x: NamedTensor, y: NamedTensor, random: Random | None) -> NamedTensor:
            return x + (y if random is None else self.drop(y, random))

        def layer(x: NamedTensor, slices: Any) -> tuple[NamedTensor, None]:
            state, scales, number = slices
            attention, feed_forward = nnx.merge(structure, state)
            norm_attention, norm_feed_forward = mtf.unstack(scales, "sublayers")
            here = None if random is None else random.fold("layer").fold(number.array)
            with jax.named_scope("attention"):
                x = residual(
                    x, attention(rms_norm(x, norm_attention), bias, here), here and here.fold("after attention")
                )
            with jax.named_scope("feed_forward"):
                y = feed_forward(rms_norm(x, norm_feed_forward), here)
                return residual(x, y, here and here.fold("after feed-forward")), None

        if self.widths.remat != "none":
            policies = jax.checkpoint_policies
            keep = policies.save_only_these_names(COMMUNICATED) if self.widths.remat == "communication" else None
            layer = jax.checkpoint(layer, policy=keep, prevent_cse=False)
        unroll = self.widths.unroll or (self.layers.size if jax.default_backend() == "cpu" else 1)
        x, _ = mtf.scan(layer, x, (state, per_layer, mtf.arange(self.layers)), self.layers, unroll=unroll)
        x = rms_norm(x, mtf.index(scales, "norms", 2 * self.layers.size))
        return x if random is None else self.drop(x, random.fold("final"))

    def drop(self, x: NamedTensor, random: Random) -> NamedTensor:
        """Dropout of the residual stream; its noise is shared over `length`, as in the authors' code."""
        return mtf.dropout(x, self.widths.residual_dropout, random, shared=["length"])


def activation_type(name: str) -> Any:
    """The numpy type of activations called `name`, `float32` or `bfloat16`."""
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[name]
