"""The paper's language model: a decoder-only Transformer over packed rows of sentences (paper, sections 9.1 and 9.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gin
import jax
import jax.numpy as jnp
from flax import nnx

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.attention import causal_bias
from mtf_experiments.models.layers import Embedding
from mtf_experiments.models.parameters import normal
from mtf_experiments.models.transformer import Remat, Transformer, Widths, activation_type
from mtf_experiments.mtf import Dimension, NamedTensor, Random


@gin.configurable
@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes of the language model. `vocab_size` is a lower bound: the dimension is padded to a multiple of 128.

    `row_length` is the longest position that a token can have, `activations` the type of everything between parameters
    (always f32) and logits (always f32).
    """

    vocab_size: int
    d_model: int
    d_ff: int
    num_heads: int
    d_kv: int
    num_layers: int
    row_length: int = 256
    attention_dropout: float = 0.1
    relu_dropout: float = 0.1
    residual_dropout: float = 0.1
    activations: Literal["float32", "bfloat16"] = "float32"
    remat: Remat = "none"
    unroll: int = 0

    @property
    def padded_vocab_size(self) -> int:
        """Size of the dimension `vocab`."""
        return -(-self.vocab_size // 128) * 128

    def flops_per_row(self, length: int) -> float:
        """Model FLOPs of training on a row of `length` tokens: 2 for each weight of a matrix product and token forward, 4
        backward, and attention's own products over all positions.
        """
        widths = 4 * self.num_heads * self.d_kv + 2 * self.d_ff
        weights = self.num_layers * self.d_model * widths + self.padded_vocab_size * self.d_model
        attention = self.num_layers * 2 * self.num_heads * self.d_kv * length
        return 6.0 * length * (weights + attention)

    def build(self, random: Random) -> LanguageModel:
        """The model with parameters drawn from `random`: the same values under every layout."""
        return LanguageModel(self, random)

    def abstract_parameters(self) -> tuple[Any, parameters.Parameters]:
        """Structure and parameters as shapes only; nothing is allocated."""
        model = nnx.eval_shape(lambda key: self.build(Random(key)), parameters.ABSTRACT_KEY)
        return parameters.split(model)


class LanguageModel(nnx.Module):
    """Next-token logits of packed rows."""

    def __init__(self, config: LanguageModelConfig, random: Random) -> None:
        widths = Widths(
            config.d_model,
            config.d_ff,
            config.num_heads,
            config.d_kv,
            config.num_layers,
            config.attention_dropout,
            config.relu_dropout,
            config.residual_dropout,
            config.remat,
            config.unroll,
        )
        self.dtype = activation_type(config.activations)
        self.vocab = Dimension("vocab", config.padded_vocab_size)
        d_model = Dimension("d_model", config.d_model)
        positions = Dimension("positions", config.row_length)
        self.embedding = Embedding(self.vocab, positions, d_model, random.fold("embedding"))
        self.decoder = Transformer(widths, random.fold("decoder"))
        self.softmax = normal(random, "softmax", [d_model, self.vocab], d_model.size**-0.5)

    def __call__(self, batch: Mapping[str, NamedTensor], random: Random | None = None) -> NamedTensor:
        """Logits, f32 `[batch, length, vocab]`, of a batch of packed rows: `inputs` (targets shifted right within each
        segment, 0 first), `segments` (0 = padding) and `positions` within the segment, all `[batch, length]`.

        With `random` dropout is on.
        """
        with jax.named_scope("embedding"):
            x = self.embedding(batch["inputs"], batch["positions"], self.dtype)
        if random is not None:
            x = self.decoder.drop(x, random.fold("embedding"))
        x = self.decoder(x, causal_bias(batch["segments"]), random)
        softmax = self.softmax.get_value().astype(self.dtype)
        with jax.named_scope("logits"):
            return mtf.einsum([x, softmax], [*x.shape.without("d_model"), self.vocab], dtype=jnp.float32)


def token_nll(logits: NamedTensor, targets: NamedTensor, label_smoothing: float = 0.0) -> NamedTensor:
    """Negative log-likelihood of each real target (id != 0) in nats, 0 on padding. f32 `[batch, length]`"""
    nll = mtf.softmax_cross_entropy(logits, targets, "vocab", label_smoothing)
    return mtf.where(mtf.not_equal(targets, 0), nll, 0.0)


def scaled_token_nll(logits: NamedTensor, targets: NamedTensor, scales: Sequence[float]) -> NamedTensor:
    """`token_nll` with the logits multiplied by each of `scales`. f32 `[scales, batch, length]`"""
    return mtf.stack([token_nll(logits * scale, targets) for scale in scales], "scales")
