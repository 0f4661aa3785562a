"""Pairs as rows: both sides together, nothing lost, filters in training only, one vocabulary, one way to make inputs."""

import json

import numpy as np
import pytest

from mtf_experiments.data.packing import pack_pairs_first_fit
from mtf_experiments.data.pair_filter import PairFilter, sentence_hashes
from mtf_experiments.data.pair_sources import ParallelTextSource
from mtf_experiments.data.pipeline import EvalRows, TrainRows, shuffled
from mtf_experiments.data.rows import PairRows
from mtf_experiments.data.synthetic_pairs import SyntheticPairSource
from mtf_experiments.data.token_store import TokenStore
from mtf_experiments.data.tokenizer import EOS, Vocabulary
from mtf_experiments.data.translation_task import TranslationTask
from mtf_experiments.errors import UserError

VOCAB = 50_000
LENGTHS = (12, 16)


def stores(count=300, seed=0, longest=(12, 16)):
    """Pairs of which every token says where it belongs: 3 + 100 * pair + its place (+ 50 on the target side)."""
    rng = np.random.default_rng(seed)
    sides = []
    for side, most in enumerate(longest):
        lengths = rng.integers(0, most, count)
        sides.append(
            TokenStore.of([[3 + 100 * n + 50 * side + i for i in range(k)] for n, k in enumerate(lengths)], VOCAB)
        )
    return sides


def rows_of(inputs, targets, kept=None, lengths=LENGTHS):
    return PairRows(inputs, targets, *lengths, VOCAB, kept)


def segments(batch, tokens, name):
    """The tokens of each segment of each row, in order."""
    for row, numbers in zip(batch[tokens], batch[name], strict=True):
        yield [row[numbers == n].tolist() for n in range(1, numbers.max() + 1)]


def pairs_in(batch):
    """(source, target) of all segments, which must correspond."""
    for sources, targets in zip(
        segments(batch, "sources", "source_segments"), segments(batch, "targets", "segments"), strict=True
    ):
        assert len(sources) == len(targets)
        yield from zip(sources, targets, strict=True)


def test_an_epoch_holds_every_pair_once_with_both_sides_in_one_segment():
    inputs, targets = stores()
    rows = TrainRows(rows_of(inputs, targets), 4, 7)
    count = rows.rows_in_epoch(0)
    found = [
        pair
        for step in range(-(-count // 4))
        for pair in pairs_in(rows.batch(step, slice(0, min(4, count - 4 * step))))
    ]
    expected = [(inputs.sentence(n).tolist(), targets.sentence(n).tolist()) for n in range(len(inputs))]
    assert sorted(found) == sorted(expected)
    sizes = {"inputs_length": len(inputs.tokens), "length": len(targets.tokens)}
    assert (
        rows.fill == {name: sizes[name] / (count * n) for name, n in rows.lengths.items()} and rows.fill["length"] > 0.8
    )


def test_positions_restart_and_inputs_shift_within_each_segment():
    inputs, targets = TokenStore.of([[5, 6], [7]], VOCAB), TokenStore.of([[8], [9, 10]], VOCAB)
    packing = pack_pairs_first_fit([inputs.offsets, targets.offsets], (8, 8), np.arange(2))
    batch = rows_of(inputs, targets, lengths=(8, 8)).fill(packing, np.array([0]))
    assert batch["sources"].tolist() == [[5, 6, 1, 7, 1, 0, 0, 0]]
    assert batch["source_segments"].tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
    assert batch["source_positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch["targets"].tolist() == [[8, 1, 9, 10, 1, 0, 0, 0]]
    assert batch["inputs"].tolist() == [[0, 8, 0, 9, 10, 0, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 2, 2, 2, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 2, 0, 0, 0]]


def test_first_fit_puts_each_pair_into_the_first_row_with_room_on_both_sides():
    """The plain rule, pair by pair, is the reference."""
    inputs, targets = stores(seed=3)
    order = shuffled(len(inputs), 1)
    packing = pack_pairs_first_fit([inputs.offsets, targets.offsets], LENGTHS, order)
    rows: list[list[int]] = []
    space: list[list[int]] = []
    for n in order:
        wanted = [int(inputs.lengths[n]), int(targets.lengths[n])]
        fits = [r for r, free in enumerate(space) if all(f >= w for f, w in zip(free, wanted, strict=True))]
        if not fits:
            rows.append([])
            space.append(list(LENGTHS))
            fits = [len(rows) - 1]
        rows[fits[0]].append(int(n))
        space[fits[0]] = [f - w for f, w in zip(space[fits[0]], wanted, strict=True)]
    starts = [inputs.offsets[row].tolist() for row in rows]
    p = packing.inputs
    assert [p.piece_start[a:b].tolist() for a, b in zip(p.row_start, p.row_start[1:], strict=False)] == starts


def test_batches_follow_from_seed_and_step_alone_whoever_makes_them():
    inputs, targets = stores()
    whole = TrainRows(rows_of(inputs, targets), 8, 1)
    for step in (11, 0, 5):
        batch = whole.batch(step)
        parts = [TrainRows(rows_of(inputs, targets), 8, 1).batch(step, slice(i, 8, 4)) for i in range(4)]
        for name, array in batch.items():
            for i, part in enumerate(parts):
                np.testing.assert_array_equal(part[name], array[i::4])


def test_evaluation_scores_every_target_token_once_and_cuts_only_sources():
    inputs, targets = stores(longest=(30, 40))
    for batch_size in (1, 3, 8):
        rows = EvalRows(rows_of(inputs, targets), batch_size)
        batches = list(rows)
        real = [b["targets"][b["segments"] > 0] for b in batches]
        np.testing.assert_array_equal(np.concatenate(real), targets.tokens)
        assert rows.tokens == len(targets.tokens)
        pairs = iter([pair for b in batches for pair in pairs_in(b)])
        for n in range(len(inputs)):
            source, target = inputs.sentence(n).tolist(), targets.sentence(n).tolist()
            cut = source if len(source) <= LENGTHS[0] else [*source[: LENGTHS[0] - 1], EOS]
            for start in range(0, len(target), LENGTHS[1]):
                assert next(pairs) == (cut, target[start : start + LENGTHS[1]])
        assert next(pairs, None) is None
        numbers = np.concatenate([rows.sentence_numbers(i)[b["segments"] > 0] for i, b in enumerate(batches)])
        np.testing.assert_array_equal(numbers, np.repeat(np.arange(len(targets)), targets.lengths))


def test_pairs_are_left_out_for_the_first_reason_that_applies():
    source = [[], [4], [4] * 12, [4], [5, 6], [5, 6], [7], [5, 6], [4] * 8]
    target = [[4], [], [4], [4] * 16, [5, 6], [8, 9], [7, 7], [8, 9], [4]]
    inputs, targets = TokenStore.of(source, VOCAB), TokenStore.of(target, VOCAB)
    kept, counts = PairFilter(*LENGTHS).kept(inputs, targets)
    assert kept.tolist() == [4, 5, 6, 7, 8]
    assert counts == {"empty source": 1, "empty target": 1, "source too long": 1, "target too long": 1}
    kept, counts = PairFilter(*LENGTHS, 4.0, True, True).kept(inputs, targets)
    assert kept.tolist() == [5, 6]
    assert {k: counts[k] for k in ("length ratio", "copy", "duplicate")} == {
        "length ratio": 1,
        "copy": 1,
        "duplicate": 1,
    }
    assert sum(counts.values()) + len(kept) == len(source)


def test_hashes_tell_order_and_length():
    store = TokenStore.of([[5, 6], [6, 5], [5, 6], [5, 6, 6], []], VOCAB)
    hashes = sentence_hashes(store).tolist()
    assert hashes[0] == hashes[2] and len(set(hashes)) == 4


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    source = SyntheticPairSource(train_pairs=400, validation_pairs=30, test_pairs=20, max_words=99)
    cache = str(tmp_path_factory.mktemp("cache"))
    return TranslationTask(source, Vocabulary(600, "word"), "toy", 16, 16, cache_dir=cache, unknown_limit=1.0).prepare()


def test_the_encoder_reads_what_decoding_will_give_it(prepared):
    """A source is the ids of its line and EOS: what `Tokenizer.encode_flat` makes, and nothing else."""
    rows = prepared.eval_rows("test", 4, 640)
    sources = [pair[0] for batch in rows for pair in pairs_in(batch)]
    lines = prepared.input_lines("test")
    flat, lengths = prepared.tokenizer.encode_flat(lines)
    ids = np.split(flat, np.cumsum(lengths)[:-1])
    assert all(i[-1] == EOS for i in ids)
    expected = [i.tolist() if len(i) <= 16 else [*i[:15].tolist(), EOS] for i in ids]
    assert [s for s, n in zip(sources, _pieces(prepared), strict=True) if n == 0] == expected


def _pieces(prepared):
    """For each piece of the test targets, which piece of its sentence it is."""
    return [i for n in prepared.stores["test"][1].lengths for i in range(-(-int(n) // 16))]


def test_counts_summary_and_fingerprints_cover_both_sides(prepared):
    counts = prepared.counts("validation")
    references = prepared.reference_lines("validation")
    assert counts["sentences"] == len(references) == 30
    assert counts["words"] == sum(len(r.split()) for r in references)
    assert counts["source_words"] == sum(len(line.split()) for line in prepared.input_lines("validation"))
    assert prepared.direction == "ba-zu" and prepared.text("validation").whole.lines == 30
    fingerprints = prepared.fingerprints()
    assert json.loads(json.dumps(fingerprints)) == fingerprints and set(fingerprints["splits"]["test"]) == {"ba", "zu"}
    assert fingerprints["training pairs"] == {"kept": len(prepared.kept), "left out": prepared.filtered}
    text = "\n".join(prepared.summary())
    train = prepared.counts("train")
    assert f"training uses {len(prepared.kept):,} pairs" in text and "joint vocabulary" in text
    assert len(prepared.kept) == train["sentences"] - sum(prepared.filtered.values())
    with pytest.raises(UserError, match="has no other split; it has train, validation, test"):
        prepared.eval_rows("other", 4, 640)


def test_misaligned_files_and_impossible_settings_are_refused(tmp_path):
    for name, text in {"train.en": "a b\nc\n", "train.de": "x\n", "dev.en": "a\n", "dev.de": "x\n"}.items():
        (tmp_path / name).write_text(text)
    source = ParallelTextSource(str(tmp_path), "en", "de", "train.{lang}", "dev.{lang}")
    made = TranslationTask(source, Vocabulary(100, "word"), cache_dir=str(tmp_path / "cache"), unknown_limit=1.0)
    with pytest.raises(UserError, match="train.en has 2 lines, train.de has 1"):
        made.prepare()
    assert not list((tmp_path / "cache").rglob("*.model"))  # noticed before a vocabulary is made of it
    with pytest.raises(UserError, match="TranslationTask.length is 1; it must be at least 2"):
        TranslationTask(source, length=1)
    with pytest.raises(UserError, match="max_length_ratio is 0.5"):
        TranslationTask(source, max_length_ratio=0.5)


def test_nothing_left_for_training_is_told(tmp_path):
    for name in ("train.en", "train.de", "dev.en", "dev.de"):
        (tmp_path / name).write_text("a\n" if "dev" in name else "a a a a\nb b b b b\n")
    source = ParallelTextSource(str(tmp_path), "en", "de", "train.{lang}", "dev.{lang}")
    vocabulary = Vocabulary(100, "word")
    task = TranslationTask(source, vocabulary, "toy", 4, 4, cache_dir=str(tmp_path / "cache"), unknown_limit=1.0)
    with pytest.raises(UserError, match=r"no pair of toy is left for training: .*'source too long': 2"):
        task.prepare()
