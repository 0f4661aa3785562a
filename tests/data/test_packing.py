"""Packing keeps every token, never mixes examples, and its arrays are those of a plain loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtf_experiments.data import packing
from mtf_experiments.data.packing import fill_rows, pack_first_fit, pack_in_order
from mtf_experiments.data.token_store import TokenStore

KEYS = {"inputs", "targets", "segments", "positions", "source"}
sentences = st.lists(st.lists(st.integers(2, 99), max_size=12), min_size=1, max_size=40)


def packings(store, row_length, seed=0):
    order = np.random.default_rng(seed).permutation(len(store))
    return [pack_first_fit(store.offsets, row_length, order), pack_in_order(store.offsets, row_length)]


def loop_rows(packed, tokens):
    """The rows of a packing, by hand."""
    rows = []
    for r in range(len(packed)):
        columns = {key: [] for key in ("inputs", "targets", "segments", "positions")}
        for segment, p in enumerate(range(packed.row_start[r], packed.row_start[r + 1]), start=1):
            start, length = int(packed.piece_start[p]), int(packed.piece_length[p])
            piece = [int(t) for t in tokens[start : start + length]]
            columns["targets"] += piece
            columns["inputs"] += [0, *piece[:-1]]
            columns["segments"] += [segment] * length
            columns["positions"] += list(range(length))
        rows.append({key: v + [0] * (packed.row_length - len(v)) for key, v in columns.items()})
    return {key: np.array([row[key] for row in rows], np.int32) for key in rows[0]}


def test_two_examples_in_a_row_of_eight():
    store = TokenStore.of([[5, 6], [7, 8]], 10)
    arrays = fill_rows(pack_in_order(store.offsets, 8), np.array([0]), store.tokens)
    assert arrays["targets"].tolist() == [[5, 6, 1, 7, 8, 1, 0, 0]]
    assert arrays["inputs"].tolist() == [[0, 5, 6, 0, 7, 8, 0, 0]]
    assert arrays["segments"].tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert arrays["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert arrays["source"].tolist() == [[0, 1, 2, 3, 4, 5, -1, -1]]


@pytest.mark.parametrize("eos", [1, 2, 3])
def test_first_input_of_each_example_is_zero_whatever_the_end_of_sentence_is(eos):
    tokens = np.array([5, 6, eos, 7, 8, eos])
    arrays = fill_rows(pack_in_order(np.array([0, 3, 6]), 6), np.array([0]), tokens)
    assert arrays["inputs"].tolist() == [[0, 5, 6, 0, 7, 8]]
    assert arrays["targets"].tolist() == [tokens.tolist()]


def test_sentence_of_one_token_gets_a_zero_input_and_is_a_target():
    store = TokenStore.of([[], [7], []], 10)
    arrays = fill_rows(pack_in_order(store.offsets, 5), np.array([0]), store.tokens)
    assert arrays["inputs"].tolist() == [[0, 0, 7, 0, 0]]
    assert arrays["targets"].tolist() == [[1, 7, 1, 1, 0]]
    assert arrays["segments"].tolist() == [[1, 2, 2, 3, 0]]


def test_long_sentences_are_cut_into_pieces_and_nothing_is_lost():
    store = TokenStore.of([[11, 12, 13], [21], [31, 32], []], 40)  # with their ends 4, 2, 3 and 1 tokens
    for packed in packings(store, 3):
        assert packed.chopped == 1 and packed.tokens == 10
        arrays = fill_rows(packed, np.arange(len(packed)), store.tokens)
        assert sorted(arrays["targets"][arrays["targets"] > 0]) == sorted(store.tokens)
        segments = {
            tuple(t[s == n]) for t, s in zip(arrays["targets"], arrays["segments"], strict=True) for n in (1, 2, 3)
        }
        assert segments - {()} == {(11, 12, 13), (1,), (21, 1), (31, 32, 1)}


@given(sentences, st.integers(1, 16), st.integers(0, 3))
def test_both_packers_give_the_arrays_of_a_plain_loop_and_keep_every_token(text, row_length, seed):
    store = TokenStore.of(text, 100)
    for packed in packings(store, row_length, seed):
        arrays = fill_rows(packed, np.arange(len(packed)), store.tokens)
        assert set(arrays) == KEYS
        for key, expected in loop_rows(packed, store.tokens).items():
            assert arrays[key].dtype == np.int32 and np.array_equal(arrays[key], expected), key
        assert sorted(arrays["source"][arrays["source"] >= 0]) == list(range(len(store.tokens)))
        assert (np.diff(packed.row_start) > 0).all()
        assert packed.chopped == store.over_long(row_length)


def first_fit_by_hand(lengths, row_length):
    rows = []
    for length in lengths:
        for number, used in enumerate(rows):
            if used + length <= row_length:
                rows[number] += length
                break
        else:
            rows.append(length)
    return rows


@given(st.lists(st.integers(1, 20), min_size=1, max_size=200), st.integers(20, 30))
def test_first_fit_is_the_textbook_one(lengths, row_length):
    offsets = np.cumsum([0, *lengths])
    packed = pack_first_fit(offsets, row_length, np.arange(len(lengths)))
    used = [
        int(packed.piece_length[a:b].sum()) for a, b in zip(packed.row_start[:-1], packed.row_start[1:], strict=True)
    ]
    assert used == first_fit_by_hand(lengths, row_length)


def test_blocks_are_packed_side_by_side_like_one_after_the_other(monkeypatch):
    monkeypatch.setattr(packing, "_BLOCK", 16)
    monkeypatch.setattr(packing, "_BLOCKS_AT_ONCE", 3)
    lengths = np.random.default_rng(0).integers(1, 30, 500)
    packed = pack_first_fit(np.concatenate([[0], np.cumsum(lengths)]), 32, np.arange(500))
    used = [
        int(packed.piece_length[a:b].sum()) for a, b in zip(packed.row_start[:-1], packed.row_start[1:], strict=True)
    ]
    assert used == [row for first in range(0, 500, 16) for row in first_fit_by_hand(lengths[first : first + 16], 32)]


def test_more_rows_in_a_block_than_were_foreseen():
    lengths = np.full(3000, 9)
    packed = pack_first_fit(np.concatenate([[0], np.cumsum(lengths)]), 10, np.arange(3000))
    assert len(packed) == 3000


def test_rows_of_typical_sentences_are_full():
    lengths = np.clip(np.random.default_rng(0).gamma(2.5, 11, 20_000).astype(int) + 2, 2, 256)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    packed = pack_first_fit(offsets, 256, np.random.default_rng(1).permutation(20_000))
    assert packed.fill > 0.985
    assert packed.fill == pytest.approx(lengths.sum() / (len(packed) * 256))


def test_rows_in_order_hold_the_text_in_order():
    store = TokenStore.of([list(range(2, 2 + n % 7)) for n in range(50)], 10)
    packed = pack_in_order(store.offsets, 8)
    arrays = fill_rows(packed, np.arange(len(packed)), store.tokens)
    assert arrays["source"][arrays["source"] >= 0].tolist() == list(range(len(store.tokens)))


def test_empty_rows_are_zero():
    store = TokenStore.of([[5]], 10)
    arrays = fill_rows(pack_in_order(store.offsets, 4), np.array([-1, 0, -1]), store.tokens)
    assert arrays["targets"].tolist() == [[0] * 4, [5, 1, 0, 0], [0] * 4]
    assert arrays["segments"][[0, 2]].sum() == 0 and (arrays["source"][[0, 2]] == -1).all()


def test_a_packing_that_loses_tokens_is_noticed(monkeypatch):
    def losing(lengths, row_lengths):
        lengths[0][-1] -= 1
        return np.arange(len(lengths[0])), len(lengths[0])

    monkeypatch.setattr(packing, "_first_fit", losing)
    with pytest.raises(AssertionError, match="lost tokens: 6 in, 5 out"):
        pack_first_fit(np.array([0, 3, 6]), 4, np.arange(2))
