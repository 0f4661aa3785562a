"""Pairs out of line-aligned files, SGML, TSV and archives: none lost, none shifted, none of the test set in training."""

import gzip
import zipfile

import pytest

from mtf_experiments.data.pair_sources import ParallelTextSource, TfdsPairSource, check_aligned, pair_lines
from mtf_experiments.data.sources import check_readable, describe, lines
from mtf_experiments.data.tsv_pairs import TsvPairSource, normalised
from mtf_experiments.errors import UserError
from tests.data_location import real_text

BREAKERS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def parallel(folder, **changes):
    patterns = {"train": "train.{lang}", "validation": "dev.{lang}"} | changes
    return ParallelTextSource(str(folder), "en", "de", **patterns)


@pytest.fixture
def folder(tmp_path):
    for lang, text in (("en", "a\nb\n"), ("de", "x\ny\n")):
        write(tmp_path, f"train.{lang}", text)
        write(tmp_path, f"dev.{lang}", text)
    return tmp_path


def aligned(source, split="train"):
    check_aligned(source, split, describe(source.inputs, split), describe(source.targets, split))
    return list(pair_lines(source, split))


def test_either_direction_reads_the_same_files(folder):
    source = parallel(folder)
    assert aligned(source) == [("a", "x"), ("b", "y")] and source.splits == ("train", "validation")
    back = ParallelTextSource(str(folder), "de", "en", "train.{lang}", "dev.{lang}")
    assert aligned(back) == [("x", "a"), ("y", "b")] and back.languages == ("de", "en")


def test_a_carriage_return_inside_a_line_does_not_split_it(folder):
    write(folder, "train.en", "a\r b\nc\n")
    assert aligned(parallel(folder)) == [("a\r b", "x"), ("c", "y")]


@pytest.mark.parametrize("breaker", BREAKERS)
def test_nothing_but_a_line_feed_ends_a_line(folder, breaker):
    write(folder, "train.en", f"one\ntw{breaker}o\nthree\n")
    write(folder, "train.de", "eins\nzwei\ndrei\n")
    assert aligned(parallel(folder))[1] == (f"tw{breaker}o", "zwei")


def test_compressed_and_several_files_are_read_in_the_order_of_the_patterns(folder):
    write(folder, "more.en.gz", "c\n")
    write(folder, "more.de.gz", "z\n")
    source = parallel(folder, train=("more.{lang}.gz", "train.{lang}"))
    assert aligned(source) == [("c", "z"), ("a", "x"), ("b", "y")]


def test_segments_of_an_sgml_file_are_its_lines(folder):
    sgm = '<doc>\n<hl>\n<seg id="1"> A &amp; B &quot;c&quot; </seg>\n</hl>\n<seg id="2">two\nlines</seg>\n'
    write(folder, "test-src.en.sgm", sgm)
    write(folder, "test-ref.de.sgm", '<seg id="1">x</seg><seg id="2"></seg>')
    source = parallel(folder, test="test-{role}.{lang}.sgm")
    assert aligned(source, "test") == [('A & B "c"', "x"), ("two lines", "")]


@pytest.mark.parametrize(
    ("english", "line"),
    [
        ("a\nb\nc\n", 3),  # nothing looks wrong but that one side goes on
        ("a\n\nb\n", 2),  # blank on one side
        ("a\rx\nb\nc\n", 1),  # a carriage return
        ("a\n" + "w " * 40 + "\nc\n", 2),  # 40 words against one
    ],
)
def test_sides_of_unequal_length_are_refused_with_files_counts_and_the_first_line_out_of_step(folder, english, line):
    write(folder, "train.en", english)
    message = rf"train\.en has 3 lines, train\.de has 2; the first line that looks out of step is line {line}\."
    with pytest.raises(UserError, match=message):
        aligned(parallel(folder))


def test_one_more_file_on_one_side_is_refused(folder):
    write(folder, "train2.en", "c\n")
    with pytest.raises(UserError, match="2 files in en and 1 in de: train.en, train2.en, train.de"):
        aligned(parallel(folder, train="train*.{lang}"))


def test_pins_hold_for_both_sides_or_one(folder):
    source = parallel(folder, expected={"train": {"lines": 2, "de": {"words": 3}}})
    source.inputs.check_content(describe(source.inputs, "train"))
    with pytest.raises(UserError, match="words is 2, expected 3"):
        source.targets.check_content(describe(source.targets, "train"))
    for pins, message in (
        ({"test": {"lines": 2}}, "expected names 'test'; the splits here: train, validation"),
        ({"train": {"fr": {"lines": 2}}}, "expected of train names 'fr'; the languages here: en, de"),
        ({"train": {"de": {"rows": 2}}}, "cannot pin rows; possible: .*lines"),
    ):
        with pytest.raises(UserError, match=message):
            source = parallel(folder, expected=pins)
            source.targets.check_content(describe(source.targets, "train"))


@pytest.mark.parametrize("lines_there", [2737, 3000, 3002])
def test_a_test_set_of_another_size_is_refused(folder, lines_there):
    for lang in ("en", "de"):
        write(folder, f"test.{lang}", "w\n" * lines_there)
    source = parallel(folder, test="test.{lang}", expected={"test": {"lines": 3003}})
    with pytest.raises(UserError, match=f"lines is {lines_there}, expected 3003"):
        source.inputs.check_content(describe(source.inputs, "test"))


def test_mistakes_are_named(folder):
    with pytest.raises(UserError, match="'train.en' does not say where the language goes"):
        parallel(folder, train="train.en")
    with pytest.raises(UserError, match="only {lang} and {role}"):
        parallel(folder, train="train.{lang}.{year}").inputs  # noqa: B018
    with pytest.raises(UserError, match="name two languages"):
        ParallelTextSource(str(folder), "en", "en", "train.{lang}", "dev.{lang}")
    with pytest.raises(UserError, match=r"no file .*nothing\.en.* holds dev\.de, dev\.en, train\.de, train\.en"):
        check_readable(parallel(folder, train="nothing.{lang}").inputs)
    assert TfdsPairSource("wmt14_translate/de-en", "en", "de").inputs.text_key == "en"
    assert TfdsPairSource("wmt14_translate/de-en", "de", "en").inputs.text_key == "de"


# Tab-separated pairs

ROWS = [(f"Sentence {n}.", f"Satz {n}.") for n in range(200)]


def tsv(folder, rows=ROWS, name="pairs.tsv", **changes):
    text = "".join("\t".join([*row, "CC-BY"]) + "\n" for row in rows)
    write(folder, name, text)
    settings = {"validation_pairs": 10, "test_pairs": 20} | changes
    return TsvPairSource(str(folder), name, "en", "de", **settings)


def splits(source):
    return {split: list(pair_lines(source, split)) for split in source.splits}


def test_held_out_sentences_are_fixed_distinct_and_in_no_other_split(tmp_path):
    found = splits(tsv(tmp_path))
    assert {s: len(pairs) for s, pairs in found.items()} == {"train": 170, "validation": 10, "test": 20}
    assert sorted(pair for pairs in found.values() for pair in pairs) == sorted(ROWS)
    # Another order of the file, and more of it, holds out the same sentences as far as they are there.
    again = splits(tsv(tmp_path, ROWS[::-1], "reversed.tsv"))
    assert {s: set(pairs) for s, pairs in again.items()} == {s: set(pairs) for s, pairs in found.items()}
    assert splits(tsv(tmp_path, seed=1))["test"] != found["test"]


def test_neither_a_source_nor_a_target_of_a_held_out_pair_is_left_in_training(tmp_path):
    """Every sentence has a second translation, every translation a second source, in other case and punctuation."""
    rows = ROWS + [(a.upper(), f"Anders {b}") for a, b in ROWS] + [(f"Other {a}", b.replace(".", "!")) for a, b in ROWS]
    source = tsv(tmp_path, rows)
    found = splits(source)
    held = found["validation"] + found["test"]
    assert len(held) == len({normalised(a) for a, _ in held}) == len({normalised(b) for _, b in held}) == 30
    for side in (0, 1):
        assert not {normalised(p[side]) for p in held} & {normalised(p[side]) for p in found["train"]}
    (note,) = source.notes
    left_out = len(rows) - 30 - len(found["train"])
    assert f"{len(rows):,} pairs, 0 repeated, 30 held out, {left_out} left out of training" in note


def test_repeated_pairs_count_once_and_columns_may_be_swapped(tmp_path):
    assert "200 pairs, 0" not in tsv(tmp_path, ROWS + ROWS[:5]).notes[0]
    assert "205 pairs, 5 repeated" in tsv(tmp_path, ROWS + ROWS[:5]).notes[0]
    swapped = TsvPairSource(str(tmp_path), "pairs.tsv", "de", "en", 1, 0, None, 10, 20)
    assert all(a.startswith("Satz") and b.startswith("Sentence") for a, b in pair_lines(swapped, "test"))


def test_members_of_archives_and_compressed_files_are_read(tmp_path):
    plain = splits(tsv(tmp_path))
    with zipfile.ZipFile(tmp_path / "pairs.zip", "w") as archive:
        archive.write(tmp_path / "pairs.tsv", "deu.txt")
    zipped = TsvPairSource(str(tmp_path), "pairs.zip", "en", "de", 0, 1, "deu.txt", 10, 20)
    assert splits(zipped) == plain == splits(tsv(tmp_path, name="pairs.tsv.gz"))
    with pytest.raises(UserError, match="has no member 'fra.txt'; it has deu.txt"):
        splits(TsvPairSource(str(tmp_path), "pairs.zip", "en", "de", 0, 1, "fra.txt", 10, 20))


def test_what_is_wrong_with_a_file_of_pairs_is_told(tmp_path):
    write(tmp_path, "short.tsv", "a\tb\nc\n")
    with pytest.raises(UserError, match=r"short\.tsv, line 2: 1 tab-separated columns, but columns 0 and 1"):
        splits(TsvPairSource(str(tmp_path), "short.tsv", "en", "de"))
    with pytest.raises(UserError, match="no file .*gone.tsv; .* holds"):
        splits(TsvPairSource(str(tmp_path), "gone.tsv", "en", "de"))
    with pytest.raises(
        UserError, match="200 different sentences are too few to hold out 150 for test and 100 for validation"
    ):
        splits(tsv(tmp_path, validation_pairs=100, test_pairs=150))
    (tmp_path / "bad.tsv").write_bytes(b"a\tb\n\xff\tc\n")
    with pytest.raises(UserError, match=r"bad\.tsv, line 2: not UTF-8"):
        splits(TsvPairSource(str(tmp_path), "bad.tsv", "en", "de"))


# Real text


@pytest.mark.parametrize(("three", "lang", "pairs"), [("deu", "de", 169_197), ("fra", "fr", 142_787)])
def test_tatoeba_holds_out_no_sentence_that_is_in_training(three, lang, pairs):
    folder = real_text("tatoeba-anki")
    source = TsvPairSource(str(folder), f"{three}-eng.zip", "en", lang, member=f"{three}.txt")
    found = splits(source)
    assert len(found["validation"]) == len(found["test"]) == 2000 and f"{pairs:,} pairs" in source.notes[0]
    held = found["validation"] + found["test"]
    for side in (0, 1):
        assert not {normalised(p[side]) for p in held} & {normalised(p[side]) for p in found["train"]}
        assert len({normalised(p[side]) for p in held}) == 4000
    assert len(found["train"]) > 0.95 * pairs


def test_real_wmt_files_stay_aligned():
    folder = real_text("wmt14-train-sample-ende")
    source = ParallelTextSource(str(folder), "en", "de", "parallel[AB].de-en.{lang}", "newstest2013-{role}.{lang}.sgm")
    found = aligned(source)
    # 28 lines end in CR LF; 11 + 32 English and 20 + 17 German lines are empty.
    assert len(found) == 20_000 and not any("\r" in a + b for a, b in found)
    assert [sum(not pair[side] for pair in found) for side in (0, 1)] == [43, 37]
    sgm = aligned(source, "validation")
    assert len(sgm) == 3000
    plain = real_text("wmt-newstest") / "en-de"
    text = ParallelTextSource(str(plain), "en", "de", "newstest2009.{lang}", "newstest2013.{lang}")
    assert sgm == list(pair_lines(text, "validation"))
    assert len(aligned(text)) == 2525  # the German side has U+0085 inside lines


def test_lines_are_read_again_each_time(folder):
    source = parallel(folder)
    assert list(lines(source.inputs, "train")) == list(lines(source.inputs, "train")) == ["a", "b"]
