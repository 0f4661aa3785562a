"""The paper's language model: a decoder-only Transformer over packed rows of sentences (paper, sections 9.1 and 9.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import gin
import jax
import jax.numpy as jnp
from flax import nnx

from mtf_experiments import mtf
from mtf_experiments.models.attention import causal_bias
from mtf_experiments.models.layers import Embedding
from mtf_experiments.models.parameters import normal
from mtf_experiments.models.transformer import Transformer, TransformerConfig
from mtf_experiments.mtf import Dimension, NamedTensor, Random


@gin.configurable
@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TransformerConfig):
    """Sizes of the language model."""

    FEATURES: ClassVar[Mapping[str, str]] = dict.fromkeys(("inputs", "targets", "segments", "positions"), "length")

    def flops_per_row(self, lengths: Mapping[str, int]) -> float:
        """Model FLOPs of training on a row: 2 for each weight of a matrix product and token forward, 4 backward, and
        attention's own products over all positions.
        """
        length = lengths["length"]
        widths = 4 * self.num_heads * self.d_kv + 2 * self.d_ff
        weights = self.num_layers * self.d_model * widths + self.padded_vocab_size * self.d_model
        attention = self.num_layers * 2 * self.num_heads * self.d_kv * length
        return 6.0 * length * (weights + attention)

    def build(self, random: Random) -> LanguageModel:
        """The model with parameters drawn from `random`: the same values under every layout."""
        return LanguageModel(self, random)


class LanguageModel(nnx.Module):
    """Next-token logits of packed rows."""

    def __init__(self, config: TransformerConfig, random: Random, encoder_attention: bool = False) -> None:
        self.dtype = config.dtype
        self.vocab = Dimension("vocab", config.padded_vocab_size)
        d_model = Dimension("d_model", config.d_model)
        positions = Dimension("positions", config.row_length)
        self.embedding = Embedding(self.vocab, positions, d_model, random.fold("embedding"))
        self.decoder = Transformer(config, random.fold("decoder"), encoder_attention)
        own = None if config.shared_softmax else normal(random, "softmax", [d_model, self.vocab], d_model.size**-0.5)
        self.softmax = own

    def __call__(self, batch: Mapping[str, NamedTensor], random: Random | None = None) -> NamedTensor:
        """Logits, f32 `[batch, length, vocab]`, of a batch of packed rows: `inputs` (targets shifted right within each
        segment, 0 first), `segments` (0 = padding) and `positions` within the segment, all `[batch, length]`.

        With `random` dropout is on.
        """
        x = self.embed(batch["inputs"], batch["positions"], self.decoder, random)
        return self.logits(self.decoder(x, causal_bias(batch["segments"]), random))

    def embed(self, ids: NamedTensor, positions: NamedTensor, stack: Transformer, random: Random | None) -> NamedTensor:
        """The input of `stack`: `[..., d_model]` for ids and positions `[...]`."""
        with jax.named_scope("embedding"):
            x = self.embedding(ids, positions, self.dtype)
        return x if random is None else stack.drop(x, random.fold("embedding"))

    def logits(self, x: NamedTensor) -> NamedTensor:
        """`[..., d_model]`, the output of the decoder -> f32 `[..., vocab]`."""
        if self.softmax is None:
            softmax = self.embedding.tokens.get_value() * x.shape.find("d_model").size ** -0.5
        else:
            softmax = self.softmax.get_value()
        softmax = softmax.astype(self.dtype)
        with jax.named_scope("logits"):
            return mtf.einsum([x, softmax], [*x.shape.without("d_model"), self.vocab], dtype=jnp.float32)
