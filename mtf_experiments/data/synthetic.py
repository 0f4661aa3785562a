"""Text made by a small grammar whose probabilities are known, so that "as good as possible" is a number.

A sentence is an opener followed by words of a Markov chain over word classes:

    opener ~ p(opener)                            each opener belongs to one topic
    class_t ~ p(class | class_t-1)                or the end of the sentence
    word_t ~ p(word | class_t, topic)

Every word belongs to one class and every opener to one topic, so a sentence has one derivation only and its
probability is a plain product. A model that reaches the entropy has to learn the classes, their order, and to look
back at the opener from anywhere in the sentence. All probabilities are ratios of integers and all random numbers are
raw Philox output: the text is the same on every platform.
"""

import hashlib
import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import gin
import numpy as np

from mtf_experiments.data.sources import SPLITS, Part, SourceInfo
from mtf_experiments.errors import UserError

_BLOCK = 2048  # sentences drawn at once; part of what a seed means


class Grammar:
    """The tables of one grammar: integer weights, drawn from a seed.

    Attributes:
        openers: words that begin a sentence.
        opener_weight: `[openers]`.
        opener_topic: `[openers]`, the topic that an opener announces.
        next_class: `[classes + 1, classes + 1]` weights of what follows a class (1..): a class or 0, the end. Row 0
            is for what follows the opener, which is never the end.
        words: the words of each class.
        word_weight: `[topics, classes, words]`.
    """

    def __init__(self, seed: int, topics: int = 4, openers: int = 24, classes: int = 6, words: int = 40):
        draw = _Raw(seed, 0)
        names = iter(_invented_words())
        self.openers = [next(names) for _ in range(openers)]
        self.words = [[next(names) for _ in range(words)] for _ in range(classes)]
        self.opener_topic = np.arange(openers) % topics
        self.opener_weight = 1 + draw.below(8, openers)
        # After each class one successor is likely, one less so, the others are rare; after some the sentence may end.
        self.next_class = np.ones((classes + 1, classes + 1), np.int64)
        favourite = 1 + draw.order(classes + 1, classes)
        for rank, weight in enumerate((24, 8)):
            np.put_along_axis(self.next_class, favourite[:, rank : rank + 1], weight, axis=1)
        self.next_class[:, 0] = 0
        closing = np.arange(classes + 1) > classes // 2
        self.next_class[closing, 0] = self.next_class[closing].sum(axis=1) // 2
        # About Zipf's law, over an order of the words of its own for each topic and class.
        ranked = 840 // (1 + np.arange(words))
        order = draw.order(topics * classes, words).reshape(topics, classes, words)
        self.word_weight = np.empty((topics, classes, words), np.int64)
        np.put_along_axis(self.word_weight, order, np.broadcast_to(ranked, order.shape), axis=2)

    def sentences(self, draw: "_Raw", count: int) -> list[str]:
        """Draw `count` sentences."""
        opener = _choose(self.opener_weight[None], np.zeros(count, np.int64), draw)
        topic = self.opener_topic[opener]
        columns = [np.array(self.openers, object)[opener]]
        words = np.array(self.words, object)
        last = np.zeros(count, np.int64)
        alive = np.arange(count)
        while len(alive):
            chosen = _choose(self.next_class, last[alive], draw)
            alive, chosen = alive[chosen > 0], chosen[chosen > 0]
            table = topic[alive] * len(self.words) + chosen - 1
            word = _choose(self.word_weight.reshape(-1, words.shape[1]), table, draw)
            column = np.full(count, "", object)
            column[alive] = words[chosen - 1, word]
            columns.append(column)
            last[alive] = chosen
        return [" ".join(word for word in row if word) for row in zip(*columns, strict=True)]

    def log_prob(self, line: str) -> float:
        """Natural logarithm of the probability of a sentence with its end; -inf for what the grammar cannot say."""
        first, *rest = line.split(" ")
        if first not in self._opener_number:
            return -np.inf
        opener = self._opener_number[first]
        topic = self.opener_topic[opener]
        total = np.log(self.opener_weight[opener] / self.opener_weight.sum())
        last = 0
        for text in [*rest, None]:
            if text is not None and text not in self._word_number:
                return -np.inf
            chosen, word = (0, None) if text is None else self._word_number[text]
            weights = self.next_class[last]
            if weights[chosen] == 0:
                return -np.inf
            total += np.log(weights[chosen] / weights.sum())
            if word is not None:
                weights = self.word_weight[topic, chosen - 1]
                total += np.log(weights[word] / weights.sum())
            last = chosen
        return float(total)

    @cached_property
    def expectation(self) -> tuple[float, float]:
        """Expected negative log probability of a sentence (nats) and its expected tokens (words and the end)."""
        step = self.next_class / self.next_class.sum(axis=1, keepdims=True)
        transition = step.copy()
        transition[:, 0] = 0.0  # nothing comes back to "after the opener"
        start = np.eye(len(step))[0]
        visits = np.linalg.solve(np.eye(len(step)) - transition.T, start)  # how often each class is the last one
        opener = self.opener_weight / self.opener_weight.sum()
        topic = np.bincount(self.opener_topic, opener)
        word = self.word_weight / self.word_weight.sum(axis=2, keepdims=True)
        nats = _entropy(opener) + float((visits * _entropies(step)).sum())
        nats += float(np.einsum("k,c,kc->", topic, visits[1:], _entropies(word)))
        return nats, float(1 + visits.sum())

    @cached_property
    def _opener_number(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.openers)}

    @cached_property
    def _word_number(self) -> dict[str, tuple[int, int]]:
        return {word: (c, n) for c, words in enumerate(self.words, start=1) for n, word in enumerate(words)}


@gin.configurable
@dataclass(frozen=True)
class SyntheticSource:
    """Sentences of a `Grammar`, drawn again, the same ones, each time they are read.

    Attributes:
        seed: of the grammar and of the sentences.
        train_lines, validation_lines, test_lines: number of sentences; no test split if 0.
        topics, classes, words_per_class: size of the grammar.
    """

    seed: int = 0
    train_lines: int = 50_000
    validation_lines: int = 1_000
    test_lines: int = 0
    topics: int = 4
    classes: int = 6
    words_per_class: int = 40

    @cached_property
    def grammar(self) -> Grammar:
        """The grammar."""
        if min(self.topics, self.classes - 1, self.words_per_class) < 1 or self.topics > 24:
            raise UserError("SyntheticSource needs 1 to 24 topics, at least 2 classes and at least 1 word per class")
        return Grammar(self.seed, self.topics, 24, self.classes, self.words_per_class)

    @property
    def vocabulary_size(self) -> int:
        """Number of different words."""
        return len(self.grammar.openers) + self.classes * self.words_per_class

    @property
    def splits(self) -> tuple[str, ...]:
        """Those splits that hold sentences."""
        return tuple(split for split in SPLITS if self._count(split) > 0)

    def parts(self, split: str) -> Iterator[Part]:
        """One part."""
        yield f"synthetic-{self.seed}", self._lines(split)

    def signature(self, split: str) -> str:
        """Hash of what decides the text: seed, number of sentences, and the grammar's tables."""
        digest = hashlib.sha256(f"synthetic 1 {split} {self.seed} {self._count(split)} {_BLOCK}".encode())
        for table in (self.grammar.opener_weight, self.grammar.next_class, self.grammar.word_weight):
            digest.update(table.astype("<i8").tobytes())
        return digest.hexdigest()

    def check_content(self, info: SourceInfo) -> None:
        """Nothing is pinned: the settings decide the text."""

    @property
    def entropy_per_word(self) -> float:
        """Nats per token (words and sentence ends): the loss that a perfect model reaches on endless text."""
        nats, tokens = self.grammar.expectation
        return nats / tokens

    def source_nll(self, split: str) -> tuple[float, int]:
        """Nats that the true source gives a split in all, and its tokens (words and sentence ends)."""
        texts = list(self._lines(split))
        return -sum(map(self.grammar.log_prob, texts)), sum(text.count(" ") + 2 for text in texts)

    def _count(self, split: str) -> int:
        return {"train": self.train_lines, "validation": self.validation_lines, "test": self.test_lines}[split]

    def _lines(self, split: str) -> Iterator[str]:
        count = self._count(split)
        for block, first in enumerate(range(0, count, _BLOCK)):
            draw = _Raw(self.seed, 1 + SPLITS.index(split), block)
            yield from self.grammar.sentences(draw, _BLOCK)[: count - first]


class _Raw:
    """Random integers straight from Philox, whose raw stream numpy never changes (unlike its distributions)."""

    def __init__(self, *key: int):
        self._bits = np.random.Philox(np.random.SeedSequence(list(key)))

    def below(self, bound: int | np.ndarray, count: int) -> np.ndarray:
        """`[count]` integers from 0 to `bound` - 1; bounds are small, so the remainder is as good as uniform."""
        return (self._bits.random_raw(count) % np.asarray(bound, np.uint64)).astype(np.int64)

    def order(self, rows: int, size: int) -> np.ndarray:
        """`[rows, size]`, each row an order of 0 .. `size` - 1."""
        return np.argsort(self._bits.random_raw(rows * size).reshape(rows, size), axis=1, kind="stable")


def _choose(weights: np.ndarray, row: np.ndarray, draw: _Raw) -> np.ndarray:
    """For each entry of `row` a column of `weights[row]`, drawn in proportion to the weights."""
    ends = np.cumsum(weights, axis=1)
    ticket = draw.below(ends[row, -1], len(row))
    return (ticket[:, None] >= ends[row]).sum(axis=1)


def _entropies(p: np.ndarray) -> np.ndarray:
    """Entropy in nats over the last axis."""
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)


def _entropy(p: np.ndarray) -> float:
    return float(_entropies(p))


def _invented_words() -> Iterator[str]:
    """Different pronounceable words, short ones first."""
    syllables = [c + v for c, v in product("bdfgklmnprst", "aeiou")]
    for count in range(1, 5):
        for parts in product(syllables, repeat=count):
            yield "".join(parts)
