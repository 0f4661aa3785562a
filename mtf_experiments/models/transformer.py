"""A stack of identical pre-norm Transformer layers, scanned over the dimension `layers`, and the sizes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.attention import Attention
from mtf_experiments.models.layers import FeedForward, rms_norm
from mtf_experiments.mtf import Dimension, NamedTensor, Random
from mtf_experiments.mtf.collective import COMMUNICATED

Remat = Literal["none", "full", "communication"]


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Sizes of a stack and how it is computed.

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


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Widths):
    """Sizes of a whole model. `vocab_size` is a lower bound: the dimension is padded to a multiple of 128.

    `row_length` is the longest position that a token can have, `activations` the type of everything between parameters
    (always f32) and logits (always f32). With `shared_softmax` the softmax is the input embedding / sqrt(d_model), as in
    Vaswani et al. 2017, instead of a matrix of its own.
    """

    FEATURES: ClassVar[Mapping[str, str]]
    """The arrays of a batch, and the dimension that each has after `batch`."""

    vocab_size: int
    row_length: int = 256
    activations: Literal["float32", "bfloat16"] = "float32"
    shared_softmax: bool = False

    @property
    def padded_vocab_size(self) -> int:
        """Size of the dimension `vocab`."""
        return -(-self.vocab_size // 128) * 128

    @property
    def dtype(self) -> Any:
        """The numpy type of activations."""
        return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[self.activations]

    def flops_per_row(self, lengths: Mapping[str, int]) -> float:
        """Model FLOPs of training on a row whose dimensions have these lengths."""
        raise NotImplementedError

    def build(self, random: Random) -> nnx.Module:
        """The model with parameters drawn from `random`: the same values under every layout."""
        raise NotImplementedError

    def abstract_parameters(self) -> tuple[Any, parameters.Parameters]:
        """Structure and parameters as shapes only; nothing is allocated."""
        return parameters.split(nnx.eval_shape(lambda key: self.build(Random(key)), parameters.ABSTRACT_KEY))


class Transformer(nnx.Module):
    """num_layers x [self-attention, (encoder attention,) feed-forward], each x + dropout(f(norm(x))), and a final norm.

    All norm scales are one variable `[norms, d_model]` (one per sublayer, then the final one), as in the authors' code.
    """

    def __init__(self, widths: Widths, random: Random, encoder_attention: bool = False) -> None:
        self.widths = widths
        self.layers = Dimension("layers", widths.num_layers)
        d_model, stack = Dimension("d_model", widths.d_model), (self.layers,)

        def attention(name: str) -> Attention:
            heads, d_kv = Dimension("heads", widths.num_heads), Dimension("d_kv", widths.d_kv)
            return Attention(d_model, heads, d_kv, widths.attention_dropout, random.fold(name), stack)

        self.attention = attention("attention")
        self.encoder_attention = attention("encoder_attention") if encoder_attention else None
        self.feed_forward = FeedForward(
            d_model, Dimension("d_ff", widths.d_ff), widths.relu_dropout, random.fold("feed_forward"), stack
        )
        norms = Dimension("norms", len(self.sublayers) * widths.num_layers + 1)
        self.norm_scales = nnx.Param(mtf.full([norms, d_model], 1.0))

    @property
    def sublayers(self) -> Mapping[str, nnx.Module]:
        """The sublayers by name, in the order of a layer, each with its parameters stacked along `layers`."""
        cross = {} if self.encoder_attention is None else {"encoder_attention": self.encoder_attention}
        return {"attention": self.attention, **cross, "feed_forward": self.feed_forward}

    def layer_norm_scales(self) -> NamedTensor:
        """`[layers, sublayers, d_model]`."""
        scales = self.norm_scales.get_value()
        count = Dimension("sublayers", len(self.sublayers))
        per_layer = mtf.slice_dimension(scales, "norms", 0, count.size * self.layers.size)
        return mtf.reshape(per_layer, [self.layers, count, scales.shape.find("d_model")])

    def final_norm(self, x: NamedTensor) -> NamedTensor:
        """The norm after the last layer."""
        scales = self.norm_scales.get_value()
        return rms_norm(x, mtf.index(scales, "norms", scales.shape.find("norms").size - 1))

    def __call__(
        self,
        x: NamedTensor,
        bias: NamedTensor,
        random: Random | None,
        memory: NamedTensor | None = None,
        memory_bias: NamedTensor | None = None,
    ) -> NamedTensor:
        """`x: [batch, length, d_model]`, `bias` as in Attention -> the same shape, normed. Without `random`: no dropout.

        `memory: [batch, inputs_length, d_model]` and `memory_bias: [batch, length, inputs_length]` are what encoder
        attention attends to.
        """
        if memory is not None:  # cast once, so that all layers' gradients of it are summed in one allreduce
            memory = mtf.vary_over(memory, ["heads"])
        names, modules = list(self.sublayers), tuple(self.sublayers.values())
        structure, state = nnx.split(modules)

        def layer(x: NamedTensor, slices: Any) -> tuple[NamedTensor, None]:
            state, scales, number = slices
            here = None if random is None else random.fold("layer").fold(number.array)
            for name, module, scale in zip(
                names, nnx.merge(structure, state), mtf.unstack(scales, "sublayers"), strict=True
            ):
                within = here and here.fold(name)
                more = (memory_bias, within, memory) if name == "encoder_attention" else (bias, within)
                with jax.named_scope(name):
                    y = module(rms_norm(x, scale), *(more if "attention" in name else (within,)))
                    x = x + (y if within is None else self.drop(y, within.fold("output")))
            return x, None

        if self.widths.remat != "none":
            policies = jax.checkpoint_policies
            keep = policies.save_only_these_names(COMMUNICATED) if self.widths.remat == "communication" else None
            layer = jax.checkpoint(layer, policy=keep, prevent_cse=False)
        unroll = self.widths.unroll or (self.layers.size if jax.default_backend() == "cpu" else 1)
        slices = (state, self.layer_norm_scales(), mtf.arange(self.layers))
        x, _ = mtf.scan(layer, x, slices, self.layers, unroll=unroll)
        x = self.final_norm(x)
        return x if random is None else self.drop(x, random.fold("final"))

    def drop(self, x: NamedTensor, random: Random) -> NamedTensor:
        """Dropout of the residual stream; its noise is shared over the length, as in the authors' code."""
        return mtf.dropout(x, self.widths.residual_dropout, random, shared=["length", "inputs_length"])
