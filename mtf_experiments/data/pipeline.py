"""Batches out of a token store, each a pure function of a number.

A training batch follows from (seed, step) and nothing else: there is no state to save, resuming needs the step alone,
and any process may make any part of any batch.
"""

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from mtf_experiments.data.packing import Packing, fill_rows, pack_first_fit, pack_in_order
from mtf_experiments.data.token_store import TokenStore
from mtf_experiments.errors import UserError

Batch = dict[str, np.ndarray]
"""int32 arrays `[batch, length]`: "inputs", "targets", "segments", "positions" (see `packing.fill_rows`)."""
Rows = slice | np.ndarray | None
"""Which rows of a batch are wanted: a slice or an array of row numbers within the batch; None means all of them."""


class TrainRows:
    """Endless training batches.

    Epoch e packs all sentences in an order that is a pure function of (seed, e), and then orders the rows likewise.
    Row number g of the whole run is row g mod batch of step g // batch; epochs follow each other without a gap, so
    the batch in which one ends holds rows of the next one too and nothing is dropped.

    Args:
        store: the tokens.
        row_length: tokens per row.
        batch_size: rows per batch.
        seed: decides the order.
        vocab_size: the model's; ids must lie below it.

    Raises:
        UserError: an id that the model does not have, or an empty store.
    """

    def __init__(self, store: TokenStore, row_length: int, batch_size: int, seed: int, vocab_size: int):
        _check_sizes(store, row_length, batch_size, vocab_size)
        self._store, self._vocab_size = store, vocab_size
        self.row_length, self.batch_size, self.seed = row_length, batch_size, seed
        self._ends: list[int] = []  # rows of the epochs so far
        # Batches are made in a thread of their own while the trainer asks for the epoch.
        self._lock = threading.RLock()
        self._epochs: OrderedDict[int, tuple[Packing, np.ndarray]] = OrderedDict()

    def batch(self, step: int, rows: Rows = None) -> Batch:
        """The batch of a step, or some of its rows: the same numbers whoever asks, in whatever order."""
        wanted = step * self.batch_size + np.arange(self.batch_size)[slice(None) if rows is None else rows]
        if np.any(wanted < 0):
            raise ValueError(f"there is no step {step}")
        epochs = np.array([self._epoch_of_row(int(row)) for row in wanted], np.int64)
        result = {
            name: np.zeros((len(wanted), self.row_length), np.int32)
            for name in ("inputs", "targets", "segments", "positions")
        }
        for epoch in np.unique(epochs):
            packing, order = self._epoch(int(epoch))
            here = epochs == epoch
            filled = fill_rows(packing, order[wanted[here] - self._first_row(int(epoch))], self._store.tokens)
            check_ids(filled, self._store, self._vocab_size)
            for name, array in result.items():
                array[here] = filled[name]
        return result

    def epoch_of(self, step: int) -> int:
        """The epoch that the first row of a step belongs to."""
        return self._epoch_of_row(step * self.batch_size)

    def rows_in_epoch(self, epoch: int) -> int:
        """The number of rows that an epoch is packed into; it differs a little between epochs."""
        self._know_epoch(epoch)
        return self._ends[epoch] - self._first_row(epoch)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that the first epoch takes; a fraction in general."""
        return self.rows_in_epoch(0) / self.batch_size

    @property
    def fill(self) -> float:
        """Share of the positions of the first epoch that hold a token."""
        return self._epoch(0)[0].fill

    @property
    def chopped(self) -> int:
        """Sentences longer than a row, which are cut into several pieces."""
        return self._store.over_long(self.row_length)

    def _epoch_of_row(self, row: int) -> int:
        with self._lock:
            while not self._ends or self._ends[-1] <= row:
                self._know_epoch(len(self._ends))
        return bisect.bisect_right(self._ends, row)

    def _first_row(self, epoch: int) -> int:
        return self._ends[epoch - 1] if epoch else 0

    def _know_epoch(self, epoch: int) -> None:
        with self._lock:
            while len(self._ends) <= epoch:
                packing, _ = self._epoch(len(self._ends))
                self._ends.append((self._ends[-1] if self._ends else 0) + len(packing))

    def _epoch(self, epoch: int) -> tuple[Packing, np.ndarray]:
        """Packing of an epoch and the order of its rows; the last two epochs used are kept."""
        with self._lock:
            if epoch not in self._epochs:
                packing = pack_first_fit(
                    self._store.offsets, self.row_length, shuffled(len(self._store), self.seed, epoch, 0)
                )
                self._epochs[epoch] = packing, shuffled(len(packing), self.seed, epoch, 1)
                while len(self._epochs) > 2:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(epoch)
            return self._epochs[epoch]


class EvalRows:
    """Every sentence of a store exactly once, in order, in batches of one size; empty rows fill the last batch.

    Args:
        store: the tokens.
        row_length: tokens per row; longer sentences are cut into several pieces, each seen without the one before
            (see `chopped`).
        batch_size: rows per batch.
        vocab_size: the model's; ids must lie below it.

    Raises:
        UserError: an id that the model does not have, or an empty store.
    """

    def __init__(self, store: TokenStore, row_length: int, batch_size: int, vocab_size: int):
        _check_sizes(store, row_length, batch_size, vocab_size)
        self._store, self._vocab_size = store, vocab_size
        self.row_length, self.batch_size = row_length, batch_size
        self._packing = pack_in_order(store.offsets, row_length)

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._packing) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(number) for number in range(len(self)))

    @property
    def sentences(self) -> int:
        """Number of sentences."""
        return len(self._store)

    @property
    def tokens(self) -> int:
        """Number of targets, EOS included."""
        return self._packing.tokens

    @property
    def chopped(self) -> int:
        """Sentences longer than a row."""
        return self._packing.chopped

    def batch(self, number: int, rows: Rows = None) -> Batch:
        """Batch `number`, or some of its rows."""
        filled = self._filled(number, rows)
        check_ids(filled, self._store, self._vocab_size)
        return {name: array for name, array in filled.items() if name != "source"}

    def sentence_numbers(self, number: int, rows: Rows = None) -> np.ndarray:
        """`[batch, length]` int64: the sentence that each target of a batch belongs to, from 0; -1 for padding.

        `np.bincount(numbers[numbers >= 0], nll[numbers >= 0], minlength=sentences)` adds up what a batch knows of
        each sentence.
        """
        return sentence_of(self._filled(number, rows)["source"], self._store)

    def _filled(self, number: int, rows: Rows) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        wanted = number * self.batch_size + np.arange(self.batch_size)[slice(None) if rows is None else rows]
        return fill_rows(self._packing, np.where(wanted < len(self._packing), wanted, -1), self._store.tokens)


def shuffled(count: int, *key: int) -> np.ndarray:
    """An order of 0 .. count - 1 that follows from the key (integers >= 0) alone, with any numpy version."""
    bits = np.random.Philox(np.random.SeedSequence([count, *key]))
    return np.argsort(bits.random_raw(count), kind="stable")


def sentence_of(source: np.ndarray, store: TokenStore) -> np.ndarray:
    """The sentence that each place in the flat token array belongs to; -1 stays -1."""
    return np.where(source < 0, -1, np.searchsorted(store.offsets, source, side="right") - 1)


def check_ids(filled: Batch, store: TokenStore, vocab_size: int) -> None:
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


def _check_sizes(store: TokenStore, row_length: int, batch_size: int, vocab_size: int) -> None:
    if row_length < 1 or batch_size < 1:
        raise UserError(f"row_length ({row_length}) and batch_size ({batch_size}) must be at least 1")
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
