"""The translation task: pairs of sentences, their joint vocabulary and how they are put into rows."""

import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gin
import numpy as np

from mtf_experiments.data.cache import Cached, cache_key, check_name, check_splits, kept_vocabulary
from mtf_experiments.data.pair_filter import PairFilter
from mtf_experiments.data.pair_sources import PairSource, aligned_lines, check_aligned
from mtf_experiments.data.pipeline import EvalRows, TrainRows
from mtf_experiments.data.rows import PairRows
from mtf_experiments.data.sources import SourceInfo, check_readable, first_lines, lines
from mtf_experiments.data.tasks import CHECKED_LINES
from mtf_experiments.data.text_io import is_blank
from mtf_experiments.data.token_store import FORMAT, TokenStore, build_store
from mtf_experiments.data.tokenizer import Tokenizer, Vocabulary, require_known
from mtf_experiments.errors import UserError

Stores = tuple[TokenStore, TokenStore]


@dataclass(frozen=True, eq=False)
class PreparedTranslation:
    """A translation task whose vocabulary and token stores exist.

    Attributes:
        task: what was prepared.
        tokenizer: the joint vocabulary.
        stores: for each split the opened stores of sources and targets.
        kept: numbers of the training pairs that are used.
        filtered: how many training pairs are left out for each reason.
        unknown_share: share of unknown ids in the first examples of each split and language.
    """

    task: "TranslationTask"
    tokenizer: Tokenizer
    stores: Mapping[str, Stores]
    kept: np.ndarray
    filtered: Mapping[str, int]
    unknown_share: Mapping[str, float]

    @property
    def direction(self) -> str:
        """Such as "en-de"."""
        return "-".join(self.task.source.languages)

    def train_rows(self, batch_size: int, seed: int, vocab_size: int) -> TrainRows:
        """Training batches; `seed` decides their order, `vocab_size` is the model's."""
        return TrainRows(self._rows("train", vocab_size, self.kept), batch_size, seed)

    def eval_rows(self, split: str, batch_size: int, vocab_size: int) -> EvalRows:
        """Evaluation batches of a split, whole."""
        return EvalRows(self._rows(split, vocab_size, None), batch_size)

    def input_lines(self, split: str) -> list[str]:
        """The sentences to translate, all of them, in order."""
        self._check(split)
        return list(lines(self.task.source.inputs, split))

    def reference_lines(self, split: str) -> list[str]:
        """Their translations."""
        self._check(split)
        return list(lines(self.task.source.targets, split))

    def text(self, split: str) -> SourceInfo:
        """What the text of a split is, whose tokens are predicted: the target side."""
        manifest = self.stores[split][1].manifest
        assert manifest is not None
        return manifest.source

    def counts(self, split: str) -> dict[str, int | float]:
        """Counts of the target side of a split, those of the source side as `source_...`, and sentences too long."""
        sides = [store.manifest for store in self.stores[split]]
        source, target = (manifest.all_counts() for manifest in sides if manifest is not None)
        over = [s.over_long(n) for s, n in zip(self.stores[split], self.task.lengths.values(), strict=True)]
        more: dict[str, int | float] = {f"source_{name}": count for name, count in source.items()}
        more |= {"source_over_long": over[0], "over_long": over[1]}
        if split == "train":
            more |= {f"left out, {reason}": count for reason, count in self.filtered.items()}
        return target | more

    def all_counts(self) -> dict[str, dict[str, int | float]]:
        """The counts of every split."""
        return {split: self.counts(split) for split in self.stores}

    def source_perplexity(self, split: str) -> float | None:
        """None: how likely a translation is under the true distribution is not known."""
        return None

    def fingerprints(self) -> dict[str, Any]:
        """What identifies text and vocabulary: files, counts and hashes, as plain JSON."""
        languages = self.task.source.languages
        splits = {
            split: {lang: store.fingerprint() for lang, store in zip(languages, stores, strict=True)}
            for split, stores in self.stores.items()
        }
        vocabulary = {"sha256": self.tokenizer.fingerprint, "size": self.tokenizer.vocab_size}
        return {
            "task": self.task.name,
            "direction": self.direction,
            "vocabulary": vocabulary,
            "splits": splits,
            "training pairs": {"kept": len(self.kept), "left out": dict(self.filtered)},
        }

    def summary(self) -> list[str]:
        """Lines for people: the vocabulary, each split, and what is left out of training."""
        made, (source, target) = self.task.vocabulary, self.task.source.languages
        result = [
            f"{source} -> {target}; joint vocabulary {self.tokenizer.vocab_size:,} ids ({made.kind}), "
            f"{self.tokenizer.fingerprint[:12]}",
            *self.task.source.notes,
        ]
        for split in self.stores:
            c = self.counts(split)
            result.append(
                f"{split}: {c['sentences']:,} pairs; {source} {c['source_words']:,} words, {c['source_tokens']:,} tokens "
                f"({c['source_unknown']:,} unknown, {c['source_over_long']:,} sentences longer than "
                f"{self.task.inputs_length}); {target} {c['words']:,} words, {c['tokens']:,} tokens "
                f"({c['unknown']:,} unknown, {c['over_long']:,} longer than {self.task.length})"
            )
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self.filtered.items() if count) or "none"
        result.append(f"training uses {len(self.kept):,} pairs; left out: {left_out}")
        return result

    def _rows(self, split: str, vocab_size: int, kept: np.ndarray | None) -> PairRows:
        self._check(split)
        return PairRows(*self.stores[split], self.task.inputs_length, self.task.length, vocab_size, kept)

    def _check(self, split: str) -> None:
        if split not in self.stores:
            raise UserError(f"task {self.task.name} has no {split} split; it has {', '.join(self.stores)}")


@gin.configurable
@dataclass(frozen=True)
class TranslationTask(Cached):
    """Predict each next token of a sentence's translation.

    Attributes:
        source: the pairs.
        vocabulary: how the joint vocabulary is made from both sides of the train split.
        name: appears in the names of files.
        inputs_length, length: source and target tokens per row.
        max_length_ratio, drop_copies, drop_duplicates: what is left out of training besides pairs that are empty or do not
            fit; see `PairFilter`.
        cache_dir: where vocabularies and token stores are kept; the source's own folder is only read.
        unknown_limit: refuse a vocabulary to which a larger share of the first examples is unknown.
        threads: tokenising threads; None takes all cores, up to 16. The result is the same.
    """

    source: PairSource
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    name: str = "translation"
    inputs_length: int = 256
    length: int = 256
    max_length_ratio: float = 0.0
    drop_copies: bool = False
    drop_duplicates: bool = False
    cache_dir: str = "~/.cache/mtf_experiments"
    unknown_limit: float = 0.05
    threads: int | None = None

    def __post_init__(self):
        check_name(self.name, "TranslationTask.name")
        for name, length in self.lengths.items():
            if length < 2:
                raise UserError(f"TranslationTask.{name} is {length}; it must be at least 2")
        if self.max_length_ratio and self.max_length_ratio < 1:
            raise UserError(f"TranslationTask.max_length_ratio is {self.max_length_ratio}; want 0 (any) or at least 1")

    @property
    def lengths(self) -> dict[str, int]:
        """Length of a row by dimension."""
        return {"inputs_length": self.inputs_length, "length": self.length}

    def check(self) -> None:
        """A look, in seconds, at whether the text is there: files, emptiness, encoding of their first lines.

        Raises:
            UserError: naming the file and what is wrong.
        """
        check_splits(self.source.splits, self.name)
        for side in (self.source.inputs, self.source.targets):
            check_readable(side)

    def prepare(self) -> PreparedTranslation:
        """Make what is missing in `cache_dir` (vocabulary, token stores), check it all and open it.

        Raises:
            UserError: unreadable, misaligned or unexpected text, impossible vocabulary settings, damaged cache.
        """
        self.check()
        sides = dict(zip(self.source.languages, (self.source.inputs, self.source.targets), strict=True))
        tokenizer = kept_vocabulary(
            self.cache / "vocabularies",
            self.name,
            self.vocabulary,
            [side.signature("train") for side in sides.values()],
            aligned_lines(self.source, "train"),
        )
        unknown, stores = {}, {}
        for split in self.source.splits:
            for language, side in sides.items():
                first = [line for line in first_lines(side, split, CHECKED_LINES) if not is_blank(line)]
                what = f"the {split} split of {self.name}, {language}"
                unknown[f"{split} {language}"] = require_known(tokenizer, first, self.unknown_limit, what)
        for split in self.source.splits:
            built = []
            for language, side in sides.items():
                key = cache_key(side.signature(split), tokenizer.fingerprint, FORMAT)
                path = self.cache / "tokens" / f"{self.name}-{split}-{language}-{key}"
                built.append(build_store(path, side, split, tokenizer, self.threads))
            infos = [store.manifest.source for store in built if store.manifest is not None]
            check_aligned(self.source, split, *infos)
            for side, info in zip(sides.values(), infos, strict=True):
                side.check_content(info)
            stores[split] = tuple(built)
        kept, filtered = PairFilter(
            self.inputs_length, self.length, self.max_length_ratio, self.drop_copies, self.drop_duplicates
        ).kept(*stores["train"])
        if not len(kept):
            raise UserError(f"no pair of {self.name} is left for training: {filtered}")
        return PreparedTranslation(self, tokenizer, stores, kept, filtered, unknown)
