"""Decoding one position at a time, for several hypotheses of each sentence, with keys and values remembered.

A decoder object offers `start() -> cache`, `step(cache, tokens, position) -> (logits, cache)` and
`follow(cache, parents) -> cache`; the searches in `evaluation` know nothing else of a model. A cache is a pytree of
tensors of fixed shapes, the carry of a loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from flax import nnx

from mtf_experiments import mtf
from mtf_experiments.models.attention import MASKED, Attention, attend, segment_bias
from mtf_experiments.models.language_model import LanguageModel
from mtf_experiments.models.layers import FeedForward, rms_norm
from mtf_experiments.models.translation import TranslationModel
from mtf_experiments.mtf import Dimension, NamedTensor


class Decoder(Protocol):
    """What a search needs of a model, for `batch` sentences of `beam` hypotheses of up to `steps` tokens."""

    batch: Dimension
    beam: Dimension
    steps: Dimension
    vocab: Dimension

    def start(self) -> Any:
        """The cache before the first position."""
        ...

    def step(self, cache: Any, tokens: NamedTensor, position: NamedTensor) -> tuple[NamedTensor, Any]:
        """Logits, f32 `[batch, beam, vocab]`, of the token at `position` (a scalar), given the one before it, `tokens`
        `[batch, beam]` (0 before the first one), and the cache of those earlier.
        """
        ...

    def follow(self, cache: Any, parents: NamedTensor) -> Any:
        """The cache of hypotheses that continue hypotheses `parents` `[batch, beam]` of those before."""
        ...


class Memory(NamedTuple):
    """The encoded source: `encoded: [batch, inputs_length, d_model]`, `segments: [batch, inputs_length]` (0 = padding)."""

    encoded: NamedTensor
    segments: NamedTensor


def encode(model: TranslationModel, sources: NamedTensor) -> Memory:
    """The memory of `sources: [batch, inputs_length]`, ids with EOS, one sentence a row, 0 = padding."""
    segments = mtf.not_equal(sources, 0).astype(jnp.int32)
    positions = segments * mtf.arange(sources.shape.find("inputs_length"))
    batch = {"sources": sources, "source_segments": segments, "source_positions": positions}
    return Memory(model.encode(batch), segments)


class Cache(NamedTuple):
    """Keys and values of every layer, `[batch, cache, heads, d_kv]`, and the places in `cache` that each hypothesis may see.

    Position p of hypothesis b lies at place p * beam + b and stays there. A hypothesis that continues another inherits
    what that one sees, `visible: [batch, beam, cache]`, so no key or value is ever moved.
    """

    keys: tuple[NamedTensor, ...]
    values: tuple[NamedTensor, ...]
    visible: NamedTensor


class CachedDecoder:
    """The decoder of a language or translation model with a cache: each step computes one position only."""

    def __init__(
        self, model: LanguageModel, batch: Dimension, beam: Dimension, steps: Dimension, memory: Memory | None = None
    ) -> None:
        self.batch, self.beam, self.steps, self.vocab = batch, beam, steps, model.vocab
        self._model = model
        self._places = Dimension("cache", steps.size * beam.size)
        stack, dtype = model.decoder, model.dtype
        # Slices of stacked parameters are taken here, once, and not at every step.
        scales = [mtf.unstack(s, "sublayers") for s in mtf.unstack(stack.layer_norm_scales(), "layers")]
        per_name = [_layers(module, dtype) for module in stack.sublayers.values()]
        self._layers = [list(zip(stack.sublayers, s, w, strict=True)) for s, *w in zip(scales, *per_name, strict=True)]
        self._memory: list[tuple[NamedTensor, NamedTensor]] = []
        if memory is not None:
            attention = stack.encoder_attention
            assert attention is not None
            encoded = mtf.vary_over(memory.encoded, ["heads"])
            for _, wk, wv, _ in _layers(attention, dtype):
                self._memory.append((attention.split_heads(encoded, wk), attention.split_heads(encoded, wv)))
            self._memory_bias = mtf.where(mtf.not_equal(memory.segments, 0), 0.0, MASKED)

    def start(self) -> Cache:
        """An empty cache."""
        attention = self._model.decoder.attention
        shape = [self.batch, self._places, attention.heads, attention.d_kv]
        nothing = tuple(mtf.zeros(shape, self._model.dtype) for _ in self._layers)
        return Cache(nothing, nothing, mtf.full([self.batch, self.beam, self._places], False, jnp.bool_))

    def follow(self, cache: Cache, parents: NamedTensor) -> Cache:
        """See `Decoder`."""
        own = Dimension("parent", self.beam.size)
        visible = mtf.gather(mtf.rename(cache.visible, beam=own.name), parents, own)
        return cache._replace(visible=visible)

    def step(self, cache: Cache, tokens: NamedTensor, position: NamedTensor) -> tuple[NamedTensor, Cache]:
        """See `Decoder`."""
        model, stack = self._model, self._model.decoder
        first = position * self.beam.size
        own = mtf.equal(mtf.arange(self._places), first + mtf.arange(self.beam), output_shape=[self.beam, self._places])
        visible = cache.visible | own
        bias = mtf.where(visible, 0.0, MASKED)
        x = model.embed(tokens, position, stack, None)
        keys, values = [], []
        for number, sublayers in enumerate(self._layers):
            for name, scale, weights in sublayers:
                y = rms_norm(x, scale)
                if name == "feed_forward":
                    x = x + stack.feed_forward(y, None, weights)
                    continue
                attention: Attention = stack.sublayers[name]  # pyright: ignore[reportAssignmentType]
                wq, wk, wv, wo = weights
                if name == "attention":
                    k, v = (mtf.rename(attention.split_heads(y, w), beam="cache") for w in (wk, wv))
                    k = mtf.update_slice(cache.keys[number], k, "cache", first.array)
                    v = mtf.update_slice(cache.values[number], v, "cache", first.array)
                    keys.append(k)
                    values.append(v)
                    y = attend(attention.split_heads(y, wq), k, v, bias)
                else:
                    y = attend(attention.split_heads(y, wq), *self._memory[number], self._memory_bias)
                x = x + mtf.einsum([y, wo], x.shape)
        logits = model.logits(stack.final_norm(x))
        return logits, Cache(tuple(keys), tuple(values), visible)


class UncachedDecoder:
    """The same by the model's own forward pass over all positions so far: slow, and what the cached one is held against."""

    def __init__(
        self, model: LanguageModel, batch: Dimension, beam: Dimension, steps: Dimension, memory: Memory | None = None
    ) -> None:
        self.batch, self.beam, self.steps, self.vocab = batch, beam, steps, model.vocab
        self._model, self._memory = model, memory

    def start(self) -> NamedTensor:
        """The inputs so far, `[batch, beam, length]`."""
        return mtf.zeros([self.batch, self.beam, Dimension("length", self.steps.size)], jnp.int32)

    def follow(self, cache: NamedTensor, parents: NamedTensor) -> NamedTensor:
        """See `Decoder`."""
        return mtf.gather(mtf.rename(cache, beam="parent"), parents, "parent")

    def step(self, cache: NamedTensor, tokens: NamedTensor, position: NamedTensor) -> tuple[NamedTensor, NamedTensor]:
        """See `Decoder`."""
        length = cache.shape.find("length")
        here = mtf.equal(mtf.arange(length), position)
        cache = mtf.where(here, tokens, cache, output_shape=cache.shape)
        logits = [self._forward(mtf.index(cache, "beam", b)) for b in range(self.beam.size)]
        return mtf.stack([mtf.index(x, "length", position.array) for x in logits], "beam", axis=1), cache

    def _forward(self, inputs: NamedTensor) -> NamedTensor:
        model, length = self._model, inputs.shape.find("length")
        ones = inputs * 0 + 1
        x = model.embed(inputs, mtf.arange(length), model.decoder, None)
        bias = segment_bias(ones, mtf.rename(ones, length="memory_length"), causal=True)
        if self._memory is None:
            return model.logits(model.decoder(x, bias, None))
        memory, segments = self._memory
        return model.logits(model.decoder(x, bias, None, memory, segment_bias(ones, segments)))


def _layers(module: nnx.Module, dtype: Any) -> list[list[NamedTensor]]:
    """The weights of each layer of a stacked sublayer."""
    assert isinstance(module, Attention | FeedForward)
    per_weight = [mtf.unstack(w, "layers") for w in module.weights(dtype)]
    return [list(weights) for weights in zip(*per_weight, strict=True)]
