"""The language-model task: a source, its vocabulary and how its text is put into rows."""

import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gin

from mtf_experiments.data.cache import Cached, cache_key, check_name, check_splits, kept_vocabulary
from mtf_experiments.data.pipeline import EvalRows, TrainRows
from mtf_experiments.data.rows import SentenceRows
from mtf_experiments.data.sources import Source, SourceInfo, check_readable, first_lines, lines
from mtf_experiments.data.synthetic import SyntheticSource
from mtf_experiments.data.text_io import is_blank
from mtf_experiments.data.token_store import FORMAT, TokenStore, build_store
from mtf_experiments.data.tokenizer import Tokenizer, Vocabulary, require_known
from mtf_experiments.errors import UserError

CHECKED_LINES = 1000
"""Examples whose share of unknown ids is looked at."""


@dataclass(frozen=True, eq=False)
class PreparedTask:
    """A task whose vocabulary and token stores exist.

    Attributes:
        task: what was prepared.
        tokenizer: the vocabulary.
        stores: an opened token store per split.
        unknown_share: share of unknown ids in the first examples of each split.
    """

    task: "LanguageModelTask"
    tokenizer: Tokenizer
    stores: Mapping[str, TokenStore]
    unknown_share: Mapping[str, float]

    def train_rows(self, batch_size: int, seed: int, vocab_size: int) -> TrainRows:
        """Training batches; `seed` decides their order, `vocab_size` is the model's."""
        return TrainRows(SentenceRows(self.stores["train"], self.task.row_length, vocab_size), batch_size, seed)

    def eval_rows(self, split: str, batch_size: int, vocab_size: int) -> EvalRows:
        """Evaluation batches of a split."""
        if split not in self.stores:
            raise UserError(f"task {self.task.name} has no {split} split; it has {', '.join(self.stores)}")
        return EvalRows(SentenceRows(self.stores[split], self.task.row_length, vocab_size), batch_size)

    def text(self, split: str) -> SourceInfo:
        """What the text of a split is, whose tokens are predicted."""
        manifest = self.stores[split].manifest
        assert manifest is not None
        return manifest.source

    def counts(self, split: str) -> dict[str, int | float]:
        """All counts of a split: of the text, of the tokens, and sentences longer than a row."""
        store = self.stores[split]
        assert store.manifest is not None
        return {**store.manifest.all_counts(), "over_long": store.over_long(self.task.row_length)}

    def all_counts(self) -> dict[str, dict[str, int | float]]:
        """The counts of every split."""
        return {split: self.counts(split) for split in self.stores}

    def source_perplexity(self, split: str) -> float | None:
        """Perplexity per word (ends counted) that the source itself gives a split, the best reachable; or None."""
        if not isinstance(self.task.source, SyntheticSource):
            return None
        nats, tokens = self.task.source.source_nll(split)
        return math.exp(nats / tokens)

    def fingerprints(self) -> dict[str, Any]:
        """What identifies text and vocabulary: files, counts and hashes, as plain JSON."""
        splits = {split: store.fingerprint() for split, store in self.stores.items()}
        vocabulary = {"sha256": self.tokenizer.fingerprint, "size": self.tokenizer.vocab_size}
        return {"task": self.task.name, "vocabulary": vocabulary, "splits": splits}

    def summary(self) -> list[str]:
        """Lines for people: one for the vocabulary and one per split."""
        made = self.task.vocabulary
        result = [f"vocabulary {self.tokenizer.vocab_size:,} ids ({made.kind}), {self.tokenizer.fingerprint[:12]}"]
        for split in self.stores:
            count = self.counts(split)
            result.append(
                f"{split}: {count['sentences']:,} sentences ({count['blank']:,} blank), {count['words']:,} words, "
                f"{count['characters']:,} characters, {count['tokens']:,} tokens ({count['pieces']:,} pieces + "
                f"{count['eos']:,} EOS), {count['unknown']:,} unknown, {count['over_long']:,} longer than a row "
                f"of {self.task.row_length}"
            )
        return result


@gin.configurable
@dataclass(frozen=True)
class LanguageModelTask(Cached):
    """Predict each next token of sentences.

    Attributes:
        source: the text.
        vocabulary: how the vocabulary is made from the train split.
        name: appears in the names of files.
        row_length: tokens per row, in training and evaluation.
        cache_dir: where vocabularies and token stores are kept; the source's own folder is only read.
        unknown_limit: refuse a vocabulary to which a larger share of the first examples is unknown.
        threads: tokenising threads; None takes all cores, up to 16. The result is the same.
    """

    source: Source
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    name: str = "lm"
    row_length: int = 256
    cache_dir: str = "~/.cache/mtf_experiments"
    unknown_limit: float = 0.05
    threads: int | None = None

    def __post_init__(self):
        check_name(self.name, "LanguageModelTask.name")
        if self.row_length < 2:
            raise UserError(f"LanguageModelTask.row_length is {self.row_length}; it must be at least 2")

    @property
    def lengths(self) -> dict[str, int]:
        """Length of a row by dimension."""
        return {"length": self.row_length}

    def check(self) -> None:
        """A look, in seconds, at whether the text is there: files, emptiness, encoding of their first lines.

        Raises:
            UserError: naming the file and what is wrong.
        """
        check_splits(self.source.splits, self.name)
        check_readable(self.source)

    def prepare(self) -> PreparedTask:
        """Make what is missing in `cache_dir` (vocabulary, token stores), check it all and open it.

        Raises:
            UserError: unreadable or unexpected text, impossible vocabulary settings, damaged cache.
        """
        self.check()
        tokenizer = kept_vocabulary(
            self.cache / "vocabularies",
            self.name,
            self.vocabulary,
            [self.source.signature("train")],
            lines(self.source, "train"),
        )
        unknown, stores = {}, {}
        for split in self.source.splits:
            first = [line for line in first_lines(self.source, split, CHECKED_LINES) if not is_blank(line)]
            unknown[split] = require_known(tokenizer, first, self.unknown_limit, f"the {split} split of {self.name}")
        for split in self.source.splits:
            key = cache_key(self.source.signature(split), tokenizer.fingerprint, FORMAT)
            path = self.cache / "tokens" / f"{self.name}-{split}-{key}"
            stores[split] = build_store(path, self.source, split, tokenizer, self.threads)
            manifest = stores[split].manifest
            assert manifest is not None
            self.source.check_content(manifest.source)
        return PreparedTask(self, tokenizer, stores, unknown)
