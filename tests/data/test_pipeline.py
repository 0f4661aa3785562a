"""Batches are pure functions of (seed, step): complete, in a known order, the same for every split of the work."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_experiments.data.pipeline import EvalRows, TrainRows
from mtf_experiments.data.rows import SentenceRows
from mtf_experiments.data.sources import ListSource
from mtf_experiments.data.token_store import TokenStore, build_store
from mtf_experiments.data.tokenizer import Vocabulary
from mtf_experiments.errors import UserError

VOCAB = 200


def store_of(count, seed=0):
    """Sentences that name themselves: the first token of sentence i is 100 + i."""
    lengths = np.random.default_rng(seed).integers(0, 9, count)
    return TokenStore.of([[100 + i, *range(2, 2 + n)] for i, n in enumerate(lengths)], VOCAB)


def equal(a, b):
    return set(a) == set(b) and all(np.array_equal(a[key], b[key]) for key in a)


def names(batch):
    """The sentences of a batch, in order of rows and columns."""
    targets = batch["targets"]
    return [int(token) for token in targets[targets >= 100]]


def test_each_epoch_holds_every_sentence_once_although_batches_run_over_its_end():
    store = store_of(50)
    rows = TrainRows(SentenceRows(store, 16, VOCAB), 4, 7)
    ends = np.cumsum([rows.rows_in_epoch(epoch) for epoch in range(3)])
    assert any(end % 4 for end in ends)  # else nothing would be tested
    every = np.concatenate([rows.batch(step)["targets"] for step in range(ends[-1] // 4 + 1)])
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        epoch = every[first:end]
        assert sorted(epoch[epoch >= 100]) == list(range(100, 150))
        assert sorted(epoch[epoch > 0]) == sorted(store.tokens)
        assert (epoch == 1).sum() == 50


def test_order_changes_with_epoch_and_seed_and_with_nothing_else():
    store = store_of(10)

    def order(seed, epoch):
        rows = TrainRows(SentenceRows(store, 16, VOCAB), 1, seed)
        first = sum(rows.rows_in_epoch(e) for e in range(epoch))
        return [n for step in range(first, first + rows.rows_in_epoch(epoch)) for n in names(rows.batch(step))]

    orders = [tuple(order(seed, epoch)) for seed in (7, 8) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6
    assert all(sorted(names) == list(range(100, 110)) for names in orders)
    assert order(7, 2) == list(orders[2])


def test_two_processes_agree():
    program = (
        "import numpy as np; from tests.data.test_pipeline import *; "
        "print(TrainRows(SentenceRows(store_of(40), 16, VOCAB), 4, 3).batch(11)['targets'].tolist())"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == str(
        TrainRows(SentenceRows(store_of(40), 16, VOCAB), 4, 3).batch(11)["targets"].tolist()
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 60), st.integers(1, 7))
def test_resuming_at_any_step_gives_the_batches_of_the_unbroken_run(step, batch_size):
    store = store_of(30)
    unbroken = TrainRows(SentenceRows(store, 12, VOCAB), batch_size, 5)
    batches = [unbroken.batch(number) for number in range(step + 3)]
    resumed = TrainRows(SentenceRows(store, 12, VOCAB), batch_size, 5)
    assert all(equal(resumed.batch(number), batches[number]) for number in range(step, step + 3))
    assert equal(resumed.batch(0), batches[0])  # and back again


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_that_read_their_own_rows_read_the_whole_batch_and_nothing_twice(processes):
    store = store_of(60)
    whole = TrainRows(SentenceRows(store, 16, VOCAB), 8, 1)
    share = 8 // processes
    readers = [TrainRows(SentenceRows(store, 16, VOCAB), 8, 1) for _ in range(processes)]
    for step in (0, 3, 9, 20):
        parts = [reader.batch(step, slice(i * share, (i + 1) * share)) for i, reader in enumerate(readers)]
        together = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        assert equal(together, whole.batch(step))


def test_processes_that_hold_the_same_rows_read_the_same_rows():
    rows = TrainRows(SentenceRows(store_of(60), 16, VOCAB), 8, 1)
    other = TrainRows(SentenceRows(store_of(60), 16, VOCAB), 8, 1)
    wanted = np.array([6, 1, 1])
    batch = rows.batch(5, wanted)
    assert equal(batch, other.batch(5, wanted))
    assert np.array_equal(batch["targets"], rows.batch(5)["targets"][wanted])


def test_data_position_serves_another_number_of_processes():
    store, steps = store_of(40), 12

    def read(step, processes):
        return [
            names(TrainRows(SentenceRows(store, 16, VOCAB), 4, 2).batch(step, slice(i, 4, processes)))
            for i in range(processes)
        ]

    single = [sorted(read(step, 1)[0]) for step in range(steps)]
    elastic = [sorted(sum(read(step, 2 if step < 5 else 1 if step < 8 else 4), [])) for step in range(steps)]
    assert elastic == single


def test_epoch_of_a_step_is_that_of_its_first_row():
    rows = TrainRows(SentenceRows(store_of(50), 16, VOCAB), 4, 7)
    first = rows.rows_in_epoch(0)
    assert rows.steps_per_epoch == first / 4
    for step in range(3 * first // 4):
        row, epoch = step * 4, 0
        while row >= rows.rows_in_epoch(epoch):
            row -= rows.rows_in_epoch(epoch)
            epoch += 1
        assert rows.epoch_of(step) == epoch


def test_batches_larger_than_the_text_repeat_it():
    rows = TrainRows(SentenceRows(TokenStore.of([[100], [101]], VOCAB), 2, VOCAB), 7, 0)
    assert sorted(names(rows.batch(0)) + names(rows.batch(1))) == [100] * 7 + [101] * 7


@pytest.mark.parametrize("batch_size", [*range(1, 17), 64])
def test_evaluation_reads_every_sentence_once_in_order_for_every_batch_size(batch_size):
    store = store_of(10)
    rows = EvalRows(SentenceRows(store, 16, VOCAB), batch_size)
    batches = list(rows)
    assert len(batches) == len(rows) and all(batch["targets"].shape == (batch_size, 16) for batch in batches)
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    assert targets[targets > 0].tolist() == store.tokens.tolist()
    assert rows.tokens == len(store.tokens) and (targets == 1).sum() == 10


def test_evaluation_denominator_is_words_and_one_end_per_sentence(tmp_path):
    text = ["a", "", " ".join(["b"] * 49), "a b c"]
    source = ListSource({"train": ["a b c"] * 3, "validation": text})
    tokenizer = Vocabulary(size=50, kind="word").train(["a b c"] * 3)
    store = build_store(tmp_path / "store", source, "validation", tokenizer)
    independent = sum(len(line.split()) for line in text) + len(text)
    for row_length, batch_size in ((64, 4), (8, 3)):
        rows = EvalRows(SentenceRows(store, row_length, tokenizer.vocab_size), batch_size)
        assert sum(int((batch["targets"] > 0).sum()) for batch in rows) == rows.tokens == independent == 57


def test_numbers_of_the_sentences_put_every_target_back_where_it_came_from():
    store = store_of(23)
    rows = EvalRows(SentenceRows(store, 6, VOCAB), 4)  # some sentences are cut into pieces
    assert store.over_long(6) > 0
    totals = np.zeros(23)
    for number in range(len(rows)):
        targets, sentence = rows.batch(number)["targets"], rows.sentence_numbers(number)
        assert ((sentence < 0) == (targets == 0)).all()
        real = sentence >= 0
        totals += np.bincount(sentence[real], targets[real], minlength=23)
    assert totals.tolist() == [int(store.sentence(i).sum()) for i in range(23)]


def test_parts_of_an_evaluation_batch_are_rows_of_the_whole():
    rows = EvalRows(SentenceRows(store_of(23), 16, VOCAB), 8)
    for number in range(len(rows)):
        whole, part = rows.batch(number), rows.batch(number, slice(2, 6))
        assert all(np.array_equal(part[key], whole[key][2:6]) for key in whole)
        assert np.array_equal(rows.sentence_numbers(number, slice(2, 6)), rows.sentence_numbers(number)[2:6])


def test_one_sentence_has_the_same_arrays_in_training_and_evaluation():
    store = TokenStore.of([[5, 6, 7]], VOCAB)
    train, evaluation = (
        TrainRows(SentenceRows(store, 8, VOCAB), 1, 0).batch(0),
        EvalRows(SentenceRows(store, 8, VOCAB), 1).batch(0),
    )
    assert equal(train, evaluation)
    assert all(array.dtype == np.int32 for array in train.values())


@pytest.mark.parametrize("bad", [32, 100, -1])
@pytest.mark.parametrize("make", [TrainRows, EvalRows])
def test_ids_outside_the_vocabulary_are_refused_with_example_and_id(make, bad):
    tokens = np.array([5, 1, 6, bad, 1])
    store = TokenStore(tokens, np.array([0, 2, 5]), vocab_size=32)
    rows = make(SentenceRows(store, 8, 32), 1, **({"seed": 0} if make is TrainRows else {}))
    with pytest.raises(UserError, match=rf"example 2 holds id {bad}; the model has ids 0 to 31"):
        rows.batch(0)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (TokenStore.of([[5]], 33), "vocabulary has 33 ids but the model only 32"),
        (TokenStore(np.array([5.0, 1.0]), np.array([0, 2]), 32), "must be integers, not float64"),
        (TokenStore.of([], 32), "no sentences"),
    ],
)
def test_stores_that_do_not_fit_the_model_are_refused_at_once(store, message):
    with pytest.raises(UserError, match=message):
        TrainRows(SentenceRows(store, 8, 32), 1, 0)
    with pytest.raises(UserError, match=message):
        EvalRows(SentenceRows(store, 8, 32), 1)


def test_threads_that_meet_a_new_epoch_together_agree_on_where_it_begins(monkeypatch):
    # The thread that makes batches ahead and the loop that logs the epoch: both count the rows of epochs not seen yet.
    def slow(*arguments, pack=SentenceRows.pack):
        time.sleep(0.05)
        return pack(*arguments)

    store = store_of(50)
    steps = range(0, 24, 6)
    alone = [TrainRows(SentenceRows(store, 16, VOCAB), 4, 7).batch(step) for step in steps]
    monkeypatch.setattr(SentenceRows, "pack", slow)
    shared = TrainRows(SentenceRows(store, 16, VOCAB), 4, 7)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(shared.batch, steps))
    assert all(map(equal, together, alone))
