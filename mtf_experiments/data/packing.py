"""Several sentences, or pairs of them, in one row of fixed length.

A sentence longer than a row is chopped into pieces of the row's length and a rest; all other pieces are whole
sentences. Each piece becomes a segment of its own: positions restart and attention stays inside. Training rows are
filled first-fit (as the paper's data were), rows for evaluation in the order of the text. Both give a `Packing`, and
`fill_rows` makes arrays of any `Packing`: there is one such code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BLOCK = 2048  # pieces that first-fit sees together; part of what a seed means
_BLOCKS_AT_ONCE = 512  # blocks packed side by side: keeps the working set in the cache


@dataclass(frozen=True, eq=False)
class Packing:
    """Which pieces lie in which row.

    Attributes:
        row_length: tokens that fit into a row.
        piece_start: `[pieces]` int64, first token of a piece in the flat token array; pieces of a row one after the
            other.
        piece_length: `[pieces]` int32.
        row_start: `[rows + 1]` int64, row r holds the pieces from row_start[r] to row_start[r + 1].
        chopped: sentences that did not fit into one row.
    """

    row_length: int
    piece_start: np.ndarray
    piece_length: np.ndarray
    row_start: np.ndarray
    chopped: int

    def __len__(self) -> int:
        return len(self.row_start) - 1

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.piece_length.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Share of the positions that hold a token."""
        return self.tokens / max(1, len(self) * self.row_length)


def pack_first_fit(offsets: np.ndarray, row_length: int, order: np.ndarray) -> Packing:
    """Fill rows with sentences in the given order, each piece going to the first row with room for it.

    First-fit looks at `_BLOCK` pieces at a time: with 28 tokens a sentence and rows of 256 that leaves less than 1 %
    of the positions empty, and it allows to pack all blocks side by side.

    Args:
        offsets: `[sentences + 1]`, sentence i is the tokens from offsets[i] to offsets[i + 1].
        row_length: tokens per row.
        order: the sentences in the order in which they are packed.
    """
    start, length, chopped = _pieces(offsets, row_length, order)
    by_row, row_start = _in_rows([length], [row_length])
    return _conserving(Packing(row_length, start[by_row], length[by_row], row_start, chopped), offsets, order)


def pack_in_order(offsets: np.ndarray, row_length: int) -> Packing:
    """Fill rows with all sentences in the order of the text: a row ends where the next piece does not fit."""
    order = np.arange(len(offsets) - 1)
    start, length, chopped = _pieces(offsets, row_length, order)
    return _conserving(
        Packing(row_length, start, length, _consecutive([length], [row_length]), chopped), offsets, order
    )


@dataclass(frozen=True, eq=False)
class PairPacking:
    """Two packings with the same rows: piece k of a row of `inputs` is the source of piece k of that row of `targets`.

    Attributes:
        inputs, targets: the two sides.
    """

    inputs: Packing
    targets: Packing

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def tokens(self) -> int:
        """Target tokens in all rows."""
        return self.targets.tokens

    @property
    def fill(self) -> tuple[float, float]:
        """Share of the positions of each side that hold a token."""
        return self.inputs.fill, self.targets.fill


def pack_pairs_first_fit(offsets: Sequence[np.ndarray], row_lengths: Sequence[int], order: np.ndarray) -> PairPacking:
    """Fill rows with pairs in the given order, each going to the first row with room for both of its sides.

    Args:
        offsets: of the sources and of the targets, as in `pack_first_fit`.
        row_lengths: source tokens and target tokens per row; no pair in `order` may have more.
        order: the pairs in the order in which they are packed.
    """
    starts = [o[order] for o in offsets]
    lengths = [(o[order + 1] - o[order]).astype(np.int32) for o in offsets]
    for length, row_length in zip(lengths, row_lengths, strict=True):
        if len(length) and length.max() > row_length:
            raise ValueError(f"a sentence of {length.max()} tokens does not fit into a row of {row_length}")
    by_row, row_start = _in_rows(lengths, row_lengths)
    inputs, targets = (
        _conserving(Packing(row_length, start[by_row], length[by_row], row_start, 0), o, order)
        for row_length, start, length, o in zip(row_lengths, starts, lengths, offsets, strict=True)
    )
    return PairPacking(inputs, targets)


def pack_pairs_in_order(offsets: Sequence[np.ndarray], row_lengths: Sequence[int]) -> PairPacking:
    """Fill rows with all pairs in the order of the text.

    A source longer than a row loses its end; a target longer than a row is chopped, and each piece gets the source.
    """
    order = np.arange(len(offsets[1]) - 1)
    start, length, chopped = _pieces(offsets[1], row_lengths[1], order)
    pieces = -(-np.diff(offsets[1]) // row_lengths[1])
    source_length = np.repeat(np.minimum(np.diff(offsets[0]), row_lengths[0]), pieces).astype(np.int32)
    row_start = _consecutive([source_length, length], row_lengths)
    targets = _conserving(Packing(row_lengths[1], start, length, row_start, chopped), offsets[1], order)
    inputs = Packing(row_lengths[0], np.repeat(offsets[0][:-1], pieces), source_length, row_start, 0)
    return PairPacking(inputs, targets)


def _consecutive(lengths: Sequence[np.ndarray], row_lengths: Sequence[int]) -> np.ndarray:
    """Where rows start if each takes pieces in their order until one does not fit on every side."""
    ends = [np.cumsum(length, dtype=np.int64) for length in lengths]
    row_start = [0]
    while row_start[-1] < len(lengths[0]):
        first = row_start[-1]
        before = [e[first - 1] if first else 0 for e in ends]
        sides = zip(ends, before, row_lengths, strict=True)
        row_start.append(min(int(np.searchsorted(e, b + row_length, side="right")) for e, b, row_length in sides))
    return np.array(row_start, np.int64)


def fill_rows(packing: Packing, rows: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of some rows.

    Args:
        packing: where everything lies.
        rows: `[batch]` numbers of rows; -1 stands for an empty row.
        tokens: the flat token array.

    Returns:
        int32 arrays `[batch, length]`: "targets" (0 = padding), "segments" (1, 2, ... per piece, 0 = padding),
        "positions" (from 0 in each segment, 0 = padding), "inputs" (targets shifted right within each segment, whose
        first input is 0), and "source", int64: each target's place in the flat token array, -1 for padding.
    """
    rows = np.asarray(rows)
    real = np.maximum(rows, 0)
    first = packing.row_start[real]
    count = np.where(rows < 0, 0, packing.row_start[real + 1] - first)
    piece = np.repeat(first, count) + _ramps(count)
    segment = 1 + _ramps(count)
    length = packing.piece_length[piece].astype(np.int64)
    row = np.repeat(np.repeat(np.arange(len(rows)), count), length)
    position = _ramps(length)
    source = np.repeat(packing.piece_start[piece], length) + position
    per_row = np.bincount(row, minlength=len(rows))
    column = _ramps(per_row)
    values = tokens[source].astype(np.int32)
    shifted = np.concatenate([np.zeros(1, np.int32), values[:-1]])[: len(values)]
    shifted[position == 0] = 0

    def spread(values: np.ndarray, empty: int, dtype: type) -> np.ndarray:
        array = np.full((len(rows), packing.row_length), empty, dtype)
        array[row, column] = values
        return array

    return {
        "inputs": spread(shifted, 0, np.int32),
        "targets": spread(values, 0, np.int32),
        "segments": spread(np.repeat(segment, length), 0, np.int32),
        "positions": spread(position, 0, np.int32),
        "source": spread(source, -1, np.int64),
    }


def _pieces(offsets: np.ndarray, row_length: int, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Start and length of each piece of the sentences in `order`, and how many sentences were chopped."""
    lengths = offsets[order + 1] - offsets[order]
    count = -(-lengths // row_length)
    inner = _ramps(count) * row_length
    start = np.repeat(offsets[order], count) + inner
    length = np.minimum(np.repeat(lengths, count) - inner, row_length).astype(np.int32)
    return start, length, int((count > 1).sum())


def _in_rows(lengths: Sequence[np.ndarray], row_lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """First-fit of pieces, in their order: the pieces sorted by row, and where among them each row starts.

    Each piece has one length for every side of the rows (a sentence pair has two) and needs room on all of them.
    """
    count = len(lengths[0])
    per_chunk = _BLOCK * _BLOCKS_AT_ONCE
    row_of, rows = np.empty(count, np.int64), 0
    for first in range(0, count, per_chunk):
        part = slice(first, first + per_chunk)
        row_of[part], used = _first_fit([length[part] for length in lengths], row_lengths)
        row_of[part] += rows
        rows += used
    by_row = np.argsort(row_of, kind="stable")  # pieces of a row keep the order in which they came
    row_start = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=row_start[1:])
    return by_row, row_start


def _first_fit(lengths: Sequence[np.ndarray], row_lengths: Sequence[int]) -> tuple[np.ndarray, int]:
    """First-fit of each block of `_BLOCK` pieces into rows of its own: row of each piece, and number of rows."""
    count = len(lengths[0])
    size = min(_BLOCK, count)
    blocks = -(-count // size)
    dtype = np.int16 if max(row_lengths) <= np.iinfo(np.int16).max else np.int32
    tables, spaces = [], []
    for length, row_length in zip(lengths, row_lengths, strict=True):
        padded = np.zeros(blocks * size, dtype)  # the last block is filled up with nothing, which fits anywhere
        padded[:count] = length
        tables.append(np.ascontiguousarray(padded.reshape(blocks, size).T))
        spaces.append(np.full((blocks, 64), row_length, dtype))
    chosen = np.empty((size, blocks), np.int32)
    block = np.arange(blocks)
    opened = 0  # rows opened by the block with most of them; all later ones are still empty
    for number in range(size):
        if opened == spaces[0].shape[1]:
            spaces = [
                np.concatenate([s, np.full_like(s, row_length)], axis=1)
                for s, row_length in zip(spaces, row_lengths, strict=True)
            ]
        fits = np.bool_(True)
        for space, table in zip(spaces, tables, strict=True):
            fits = fits & (space[:, : opened + 1] >= table[number][:, None])
        row = np.asarray(fits).argmax(axis=1)
        for space, table in zip(spaces, tables, strict=True):
            space[block, row] -= table[number]
        chosen[number] = row
        opened = max(opened, int(row.max()) + 1)
    used = chosen.max(axis=0) + 1
    row_of = (chosen + (np.cumsum(used) - used)).T.reshape(-1)[:count]
    return row_of, int(used.sum())


def _conserving(packing: Packing, offsets: np.ndarray, order: np.ndarray) -> Packing:
    """The same packing, after counting that each token is in it."""
    tokens_in = int((offsets[order + 1] - offsets[order]).sum())
    if packing.tokens != tokens_in:
        raise AssertionError(f"packing lost tokens: {tokens_in} in, {packing.tokens} out")
    return packing


def _ramps(counts: np.ndarray) -> np.ndarray:
    """0 .. c - 1 for each c of `counts`, one after the other, as int64."""
    counts = np.asarray(counts, np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)
