"""Sentence pairs of a synchronous grammar: the translation of a sentence is known, so that BLEU 100 can be reached.

A source sentence is one of `synthetic.Grammar`: an opener, which announces a topic, and words of classes. Its
translation, a function of the sentence alone, takes what real ones take:

    lexicon     every word has a translation; those of class 1 have another one under each topic, so the opener decides
    order       a word of class 2 follows the word after it; words of class 3 move to the end of the sentence
    agreement   the opener's translation comes first, and a particle that its topic decides comes last
"""

import hashlib
import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import gin

from mtf_experiments.data.pair_sources import Directed, PairSide
from mtf_experiments.data.sources import SPLITS, lines
from mtf_experiments.data.synthetic import Grammar, SyntheticSource

_AMBIGUOUS, _SWAPS, _LAST = 1, 2, 3  # classes of words by what the translation does with them


@gin.configurable
@dataclass(frozen=True)
class SyntheticPairSource(Directed):
    """Pairs of a synchronous grammar. Sentences of the other splits are left out of training.

    Attributes:
        seed: of the grammar and of the sentences.
        train_pairs, validation_pairs, test_pairs: number of sentences drawn; no test split if 0.
        max_words: sentences that are longer do not belong to the language.
        topics, classes, words_per_class: size of the grammar.
    """

    seed: int = 0
    train_pairs: int = 50_000
    validation_pairs: int = 500
    test_pairs: int = 500
    topics: int = 4
    classes: int = 6
    words_per_class: int = 20
    max_words: int = 24
    source_language: str = "ba"
    target_language: str = "zu"

    def __post_init__(self) -> None:
        self.check_languages()

    @property
    def splits(self) -> tuple[str, ...]:
        """Those splits that hold sentences."""
        return self._source.splits

    @cached_property
    def inputs(self) -> PairSide:
        """The sentences."""
        return PairSide(self._pairs, 0, f"synthetic-{self.seed}", self._key)

    @cached_property
    def targets(self) -> PairSide:
        """Their translations."""
        return PairSide(self._pairs, 1, f"synthetic-{self.seed}", self._key)

    @property
    def notes(self) -> Sequence[str]:
        """How many of the sentences drawn for training are not used: those of other splits, and long ones."""
        left_out = self.train_pairs - len(self._pairs["train"])
        return [
            f"left out of training: {left_out:,} sentences that other splits hold or of over {self.max_words} words"
        ]

    def translate(self, line: str) -> str:
        """The translation of a sentence of the grammar."""
        opener, *words = line.split(" ")
        topic = int(self._grammar.opener_topic[self._grammar.openers.index(opener)])
        moved: list[str] = []
        order: list[str] = []
        waiting: list[str] = []
        for word in words:
            kind, spelled = self._class_of[word], self._spelled(word, topic)
            if kind == _LAST:
                moved.append(spelled)
            elif kind == _SWAPS:
                waiting.append(spelled)
            else:
                order += [spelled, *waiting]
                waiting = []
        return " ".join([self._spelled(opener, 0), *order, *waiting, *moved, f"zu{topic}"])

    @property
    def _source(self) -> SyntheticSource:
        counts = (self.train_pairs, self.validation_pairs, self.test_pairs)
        return SyntheticSource(self.seed, *counts, self.topics, self.classes, self.words_per_class)

    @cached_property
    def _grammar(self) -> Grammar:
        return self._source.grammar

    @cached_property
    def _class_of(self) -> dict[str, int]:
        return {word: number for number, words in enumerate(self._grammar.words, 1) for word in words}

    def _spelled(self, word: str, topic: int) -> str:
        ending = f"o{topic}" if self._class_of.get(word) == _AMBIGUOUS else "o"
        return f"{word[::-1]}{ending}"

    @cached_property
    def _pairs(self) -> dict[str, list[tuple[str, str]]]:
        drawn = {
            split: [line for line in lines(self._source, split) if line.count(" ") < self.max_words]
            for split in self.splits
        }
        held = {line for split, text in drawn.items() if split != "train" for line in text}
        drawn["train"] = [line for line in drawn["train"] if line not in held]
        return {split: [(line, self.translate(line)) for line in drawn[split]] for split in SPLITS if split in drawn}

    @cached_property
    def _key(self) -> str:
        text = "\n".join("\t".join(pair) for pairs in self._pairs.values() for pair in pairs)
        return hashlib.sha256(text.encode()).hexdigest()
