"""What rows are made of: sentences of one store, or pairs of sentences of two. How they follow each other: `pipeline`."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from mtf_experiments.data.packing import (
    Packing,
    PairPacking,
    fill_rows,
    pack_first_fit,
    pack_in_order,
    pack_pairs_first_fit,
    pack_pairs_in_order,
)
from mtf_experiments.data.token_store import TokenStore
from mtf_experiments.data.tokenizer import EOS
from mtf_experiments.errors import UserError

Features = dict[str, np.ndarray]
"""int32 arrays `[rows, length]` by name; see `packing.fill_rows`."""


class RowMaker(Protocol):
    """Examples that can be packed into rows. Raises UserError if made of ids that the model does not have, or of nothing."""

    @property
    def lengths(self) -> Mapping[str, int]:
        """Length of a row by dimension."""
        ...

    @property
    def examples(self) -> int:
        """Number of examples that rows for training are made of."""
        ...

    def pack(self, order: np.ndarray) -> Any:
        """Rows for training, of the examples in this order."""
        ...

    def pack_in_order(self) -> Any:
        """Rows for evaluation: of everything, in order."""
        ...

    def fill(self, packing: Any, rows: np.ndarray) -> Features:
        """The features of some rows of a packing (-1: an empty row), and "source": each target's place in the store."""
        ...

    def sentence_of(self, source: np.ndarray) -> np.ndarray:
        """The number of the sentence (or target sentence) at each place; -1 stays -1."""
        ...


class SentenceRows:
    """Rows of `row_length` tokens of the sentences of `store`; longer ones are chopped. `vocab_size` is the model's."""

    def __init__(self, store: TokenStore, row_length: int, vocab_size: int) -> None:
        check_sizes(store, row_length, vocab_size)
        self._store, self._vocab_size = store, vocab_size
        self.lengths = {"length": row_length}
        self.examples = len(store)

    def pack(self, order: np.ndarray) -> Packing:
        """See `RowMaker`."""
        return pack_first_fit(self._store.offsets, self.lengths["length"], order)

    def pack_in_order(self) -> Packing:
        """See `RowMaker`."""
        return pack_in_order(self._store.offsets, self.lengths["length"])

    def fill(self, packing: Packing, rows: np.ndarray) -> Features:
        """The features "inputs", "targets", "segments", "positions"; see `packing.fill_rows`."""
        filled = fill_rows(packing, rows, self._store.tokens)
        check_ids(filled, self._store, self._vocab_size)
        return filled

    def sentence_of(self, source: np.ndarray) -> np.ndarray:
        """See `RowMaker`."""
        return sentence_of(source, self._store)


class PairRows:
    """Rows of pairs: `inputs` holds the sources of the sentences of `targets`.

    For training rows only the pairs numbered in `kept` are used, in evaluation all.
    """

    def __init__(
        self,
        inputs: TokenStore,
        targets: TokenStore,
        inputs_length: int,
        length: int,
        vocab_size: int,
        kept: np.ndarray | None = None,
    ) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} sources for {len(targets)} targets")
        self.lengths = {"inputs_length": inputs_length, "length": length}
        self._stores, self._vocab_size = (inputs, targets), vocab_size
        for store, row_length in zip(self._stores, self.lengths.values(), strict=True):
            check_sizes(store, row_length, vocab_size)
        self._kept = np.arange(len(targets)) if kept is None else kept
        self.examples = len(self._kept)
        if not self.examples:
            raise UserError("no sentence pair is left for training: every one is filtered out")

    def pack(self, order: np.ndarray) -> PairPacking:
        """See `RowMaker`."""
        offsets = [store.offsets for store in self._stores]
        return pack_pairs_first_fit(offsets, list(self.lengths.values()), self._kept[order])

    def pack_in_order(self) -> PairPacking:
        """See `RowMaker`."""
        return pack_pairs_in_order([store.offsets for store in self._stores], list(self.lengths.values()))

    def fill(self, packing: PairPacking, rows: np.ndarray) -> Features:
        """The features of the targets as for `SentenceRows`, and "sources", "source_segments", "source_positions"."""
        sides = [
            fill_rows(part, rows, store.tokens)
            for part, store in zip((packing.inputs, packing.targets), self._stores, strict=True)
        ]
        for side, store in zip(sides, self._stores, strict=True):
            check_ids(side, store, self._vocab_size)
        source, target = sides
        # A source that was cut to the length of the row still ends as the model knows sources to end.
        at_end = (source["segments"] > 0) & (source["positions"] == packing.inputs.row_length - 1)
        return {
            "sources": np.where(at_end, np.int32(EOS), source["targets"]),
            "source_segments": source["segments"],
            "source_positions": source["positions"],
            **target,
        }

    def sentence_of(self, source: np.ndarray) -> np.ndarray:
        """See `RowMaker`."""
        return sentence_of(source, self._stores[1])


def sentence_of(source: np.ndarray, store: TokenStore) -> np.ndarray:
    """The sentence that each place in the flat token array belongs to; -1 stays -1."""
    return np.where(source < 0, -1, np.searchsorted(store.offsets, source, side="right") - 1)


def check_ids(filled: Features, store: TokenStore, vocab_size: int) -> None:
    """Refuse ids that the model does not have.

    Raises:
        UserError: naming the sentence (counted from 1), the id and the model's vocabulary.
    """
    targets, source = filled["targets"], filled["source"]
    if not np.issubdtype(targets.dtype, np.integer):
        raise UserError(f"token ids must be integers, not {targets.dtype}")
    bad = (source >= 0) & ((targets < 0) | (targets >= vocab_size))
    if bad.any():
        sentence, token = int(sentence_of(source[bad], store)[0]), int(targets[bad][0])
        raise _foreign_id(store, sentence, token, vocab_size)


def _foreign_id(store: TokenStore, sentence: int, token: int, vocab_size: int) -> UserError:
    split = f" of the {store.manifest.source.split} split" if store.manifest else ""
    return UserError(f"example {sentence + 1:,}{split} holds id {token}; the model has ids 0 to {vocab_size - 1}")


def check_sizes(store: TokenStore, row_length: int, vocab_size: int) -> None:
    """Raises UserError if rows of that length cannot be made of `store` for a model with `vocab_size` ids."""
    if row_length < 1:
        raise UserError(f"row_length ({row_length}) must be at least 1")
    if len(store) == 0 or len(store.tokens) == 0:
        raise UserError("there are no sentences to make batches of")
    if not np.issubdtype(store.tokens.dtype, np.integer):
        raise UserError(f"token ids must be integers, not {store.tokens.dtype}")
    if store.vocab_size > vocab_size:
        raise UserError(
            f"the vocabulary has {store.vocab_size:,} ids but the model only {vocab_size:,}; "
            "raise the model's vocabulary size or make a smaller vocabulary"
        )
    if store.manifest is not None and not 0 <= store.tokens.min() <= store.tokens.max() < vocab_size:
        bad = np.flatnonzero((store.tokens < 0) | (store.tokens >= vocab_size))[:1]
        raise _foreign_id(store, int(sentence_of(bad, store)[0]), int(store.tokens[bad[0]]), vocab_size)
