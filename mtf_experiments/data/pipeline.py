"""Batches of rows, each a pure function of a number.

A training batch follows from (seed, step) and nothing else: there is no state to save, resuming needs the step alone,
and any process may make any part of any batch.
"""

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from mtf_experiments.data.rows import RowMaker
from mtf_experiments.errors import UserError

Batch = dict[str, np.ndarray]
"""int32 arrays `[batch, length]` by feature (see `rows`)."""
Rows = slice | np.ndarray | None
"""Which rows of a batch are wanted: a slice or an array of row numbers within the batch; None means all of them."""


class TrainRows:
    """Endless training batches.

    Epoch e packs all examples in an order that is a pure function of (seed, e), and then orders the rows likewise.
    Row number g of the whole run is row g mod batch of step g // batch; epochs follow each other without a gap, so
    the batch in which one ends holds rows of the next one too and nothing is dropped.

    Args:
        maker: makes rows of examples.
        batch_size: rows per batch.
        seed: decides the order.

    Raises:
        UserError: an id that the model does not have, when a batch holds it.
    """

    def __init__(self, maker: RowMaker, batch_size: int, seed: int):
        check_batch_size(batch_size)
        self._maker = maker
        self.lengths, self.batch_size, self.seed = maker.lengths, batch_size, seed
        self._ends: list[int] = []  # rows of the epochs so far
        # Batches are made in a thread of their own while the trainer asks for the epoch.
        self._lock = threading.RLock()
        self._epochs: OrderedDict[int, tuple[Any, np.ndarray]] = OrderedDict()

    def batch(self, step: int, rows: Rows = None) -> Batch:
        """The batch of a step, or some of its rows: the same numbers whoever asks, in whatever order."""
        wanted = step * self.batch_size + np.arange(self.batch_size)[slice(None) if rows is None else rows]
        if np.any(wanted < 0):
            raise ValueError(f"there is no step {step}")
        epochs = np.array([self._epoch_of_row(int(row)) for row in wanted], np.int64)
        result: Batch = {}
        for epoch in np.unique(epochs) if len(wanted) else [0]:
            packing, order = self._epoch(int(epoch))
            here = epochs == epoch
            filled = self._maker.fill(packing, order[wanted[here] - self._first_row(int(epoch))])
            del filled["source"]
            for name, array in filled.items():
                result.setdefault(name, np.zeros((len(wanted), *array.shape[1:]), np.int32))[here] = array
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
    def fill(self) -> dict[str, float]:
        """Share of the positions of the first epoch that hold a token, by dimension as in `lengths`."""
        return dict(zip(self.lengths, np.atleast_1d(self._epoch(0)[0].fill).tolist(), strict=True))

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

    def _epoch(self, epoch: int) -> tuple[Any, np.ndarray]:
        """Packing of an epoch and the order of its rows; the last two epochs used are kept."""
        with self._lock:
            if epoch not in self._epochs:
                packing = self._maker.pack(shuffled(self._maker.examples, self.seed, epoch, 0))
                self._epochs[epoch] = packing, shuffled(len(packing), self.seed, epoch, 1)
                while len(self._epochs) > 2:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(epoch)
            return self._epochs[epoch]


class EvalRows:
    """Every example exactly once, in order, in batches of one size; empty rows fill the last batch.

    Args:
        maker: makes rows of examples; what is longer than a row is cut into several pieces, each seen without the one
            before.
        batch_size: rows per batch.

    Raises:
        UserError: an id that the model does not have, when a batch holds it.
    """

    def __init__(self, maker: RowMaker, batch_size: int):
        check_batch_size(batch_size)
        self._maker = maker
        self.lengths, self.batch_size = maker.lengths, batch_size
        self._packing = maker.pack_in_order()

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._packing) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(number) for number in range(len(self)))

    @property
    def tokens(self) -> int:
        """Number of targets, EOS included."""
        return self._packing.tokens

    def batch(self, number: int, rows: Rows = None) -> Batch:
        """Batch `number`, or some of its rows."""
        return {name: array for name, array in self._filled(number, rows).items() if name != "source"}

    def sentence_numbers(self, number: int, rows: Rows = None) -> np.ndarray:
        """`[batch, length]` int64: the sentence that each target of a batch belongs to, from 0; -1 for padding.

        `np.bincount(numbers[numbers >= 0], nll[numbers >= 0], minlength=sentences)` adds up what a batch knows of
        each sentence.
        """
        return self._maker.sentence_of(self._filled(number, rows)["source"])

    def _filled(self, number: int, rows: Rows) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        wanted = number * self.batch_size + np.arange(self.batch_size)[slice(None) if rows is None else rows]
        return self._maker.fill(self._packing, np.where(wanted < len(self._packing), wanted, -1))


def shuffled(count: int, *key: int) -> np.ndarray:
    """An order of 0 .. count - 1 that follows from the key (integers >= 0) alone, with any numpy version."""
    bits = np.random.Philox(np.random.SeedSequence([count, *key]))
    return np.argsort(bits.random_raw(count), kind="stable")


def check_batch_size(batch_size: int) -> None:
    """Raises UserError if there cannot be batches of so many rows."""
    if batch_size < 1:
        raise UserError(f"batch_size ({batch_size}) must be at least 1")
