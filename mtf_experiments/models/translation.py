"""The paper's translation model: an encoder and a decoder over packed rows of sentence pairs (paper, section 9.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import gin
import jax

from mtf_experiments import mtf
from mtf_experiments.models.attention import causal_bias, segment_bias
from mtf_experiments.models.language_model import LanguageModel, LanguageModelConfig
from mtf_experiments.models.transformer import Transformer, TransformerConfig
from mtf_experiments.mtf import NamedTensor, Random


@gin.configurable
@dataclass(frozen=True, kw_only=True)
class TranslationModelConfig(TransformerConfig):
    """Sizes of the translation model, of whose `num_layers` the encoder and the decoder have so many each."""

    FEATURES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("sources", "source_segments", "source_positions"), "inputs_length"),
        **LanguageModelConfig.FEATURES,
    }

    def flops_per_row(self, lengths: Mapping[str, int]) -> float:
        """Model FLOPs of training on a row: 2 for each weight of a matrix product and token forward, 4 backward, and
        attention's own products over all positions. Keys and values of the encoder attention are made of source tokens.
        """
        source, target = lengths["inputs_length"], lengths["length"]
        heads, ff = self.num_heads * self.d_kv, 2 * self.d_ff
        encoder = source * (self.d_model * (4 * heads + ff) + 2 * heads * source)
        decoder = target * (self.d_model * (6 * heads + ff) + 2 * heads * (source + target))
        decoder += source * 2 * heads * self.d_model
        return 6.0 * (self.num_layers * (encoder + decoder) + target * self.d_model * self.padded_vocab_size)

    def build(self, random: Random) -> TranslationModel:
        """The model with parameters drawn from `random`: the same values under every layout."""
        return TranslationModel(self, random)


class TranslationModel(LanguageModel):
    """A language model of target sentences that also attends to their encoded source sentences.

    Encoder and decoder share token and position embeddings; the softmax is a matrix of its own.
    """

    def __init__(self, config: TranslationModelConfig, random: Random) -> None:
        super().__init__(config, random, encoder_attention=True)
        self.encoder = Transformer(config, random.fold("encoder"))

    def __call__(self, batch: Mapping[str, NamedTensor], random: Random | None = None) -> NamedTensor:
        """Logits, f32 `[batch, length, vocab]`, of a batch of packed pairs: the decoder's `inputs`, `segments` and
        `positions` as in the language model, and the encoder's `sources`, `source_segments` and `source_positions`, all
        `[batch, inputs_length]`. A target attends to the source of its own segment number.

        With `random` dropout is on.
        """
        memory = self.encode(batch, random and random.fold("encoder"))
        random = random and random.fold("decoder")
        x = self.embed(batch["inputs"], batch["positions"], self.decoder, random)
        memory_bias = segment_bias(batch["segments"], batch["source_segments"])
        return self.logits(self.decoder(x, causal_bias(batch["segments"]), random, memory, memory_bias))

    def encode(self, batch: Mapping[str, NamedTensor], random: Random | None = None) -> NamedTensor:
        """What the decoder attends to, `[batch, inputs_length, d_model]`."""
        segments = batch["source_segments"]
        x = self.embed(batch["sources"], batch["source_positions"], self.encoder, random)
        bias = segment_bias(segments, mtf.rename(segments, inputs_length="memory_length"))
        with jax.named_scope("encoder"):
            return self.encoder(x, bias, random)
