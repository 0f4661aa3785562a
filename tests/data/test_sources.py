"""Files that are missing, empty, doubled or not the pinned ones are refused before anything is trained on them."""

import gzip

import pytest

from mtf_experiments.data.sources import TextSource, check_readable, describe, lines
from mtf_experiments.errors import UserError
from tests.data_location import real_text


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train").mkdir()
    for number in range(3):
        (tmp_path / "train" / f"part-{number}").write_bytes(f"first of {number}\n\nthird\n".encode())
    with gzip.open(tmp_path / "dev.gz", "wb") as file:
        file.write(b"one two\nthree\n")
    return tmp_path


def test_files_are_read_in_order_of_their_names_and_blank_lines_are_sentences(folder):
    source = TextSource(str(folder), train="train/*", validation="dev.gz")
    assert source.splits == ("train", "validation")
    assert list(lines(source, "train")) == [text for n in range(3) for text in (f"first of {n}", "", "third")]
    info = describe(source, "train")
    assert [file.name for file in info.files] == ["train/part-0", "train/part-1", "train/part-2"]
    assert (info.whole.lines, info.whole.blank, info.whole.words) == (9, 3, 12)


def test_how_the_text_is_cut_into_files_and_compressed_does_not_change_its_hash(folder):
    whole = b"".join((folder / "train" / f"part-{n}").read_bytes() for n in range(3))
    (folder / "all.gz").write_bytes(gzip.compress(whole))
    many = describe(TextSource(str(folder), "train/*", "dev.gz"), "train")
    one = describe(TextSource(str(folder), "all.gz", "dev.gz"), "train")
    assert many.whole == one.whole and len(many.files) == 3 and len(one.files) == 1


def test_missing_file_is_refused_with_what_exists_instead(folder):
    with pytest.raises(UserError, match=r"no file .*trian.* for the train split; .* holds dev\.gz, train/"):
        check_readable(TextSource(str(folder), train="trian/*", validation="dev.gz"))


def test_missing_folder_is_refused(folder):
    with pytest.raises(UserError, match="no folder .*elsewhere"):
        check_readable(TextSource(str(folder / "elsewhere"), train="*", validation="dev.gz"))


@pytest.mark.parametrize("name", ["train/part-9", "empty.gz"])
def test_empty_file_is_refused_by_name(folder, name):
    (folder / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    with pytest.raises(UserError, match=f"{name} is empty"):
        check_readable(
            TextSource(str(folder), train=["train/*", *([name] if "gz" in name else [])], validation="dev.gz")
        )


def test_a_file_of_the_training_text_is_not_evaluated_on(folder):
    with pytest.raises(UserError, match="part-1 is both in the train and the validation split"):
        check_readable(TextSource(str(folder), train="train/*", validation="train/part-1"))


def test_a_file_matched_twice_is_refused(folder):
    with pytest.raises(UserError, match="part-0 is matched twice"):
        check_readable(TextSource(str(folder), train=["train/*", "train/part-0"], validation="dev.gz"))


def test_wrong_encoding_in_the_first_lines_is_found_by_the_quick_check(folder):
    (folder / "train" / "part-2").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match="part-2, line 1: not UTF-8"):
        check_readable(TextSource(str(folder), train="train/*", validation="dev.gz"))


def test_changed_file_changes_the_signature(folder):
    source = TextSource(str(folder), train="train/*", validation="dev.gz")
    before = source.signature("train"), source.signature("validation")
    (folder / "train" / "part-1").write_bytes(b"other\n")
    assert source.signature("train") != before[0] and source.signature("validation") == before[1]


def test_pinned_counts_accept_the_right_text_and_refuse_other_text(folder):
    pins = {"validation": {"lines": 2, "words": 3}, "train": {"lines": 8}}
    source = TextSource(str(folder), train="train/*", validation="dev.gz", expected=pins)
    source.check_content(describe(source, "validation"))
    with pytest.raises(UserError, match=r"lines is 9, expected 8 \(read: train/part-0"):
        source.check_content(describe(source, "train"))


@pytest.mark.parametrize("pins", [{"validation": {"sentences": 2}}, {"dev": {"lines": 2}}])
def test_pins_that_mean_nothing_are_refused(folder, pins):
    source = TextSource(str(folder), train="train/*", validation="dev.gz", expected=pins)
    with pytest.raises(UserError, match="sentences|dev"):
        source.check_content(describe(source, "validation"))


def test_one_billion_word_shards_hold_their_published_counts():
    pins = {"train": {"lines": 18202, "words": 461257}, "validation": {"lines": 6119, "words": 155414}}
    folder = "heldout-monolingual.tokenized.shuffled/"
    train, dev = folder + "news.en.heldout-0001[0-2]-of-00050", folder + "news.en.heldout-00013-of-00050"
    source = TextSource(str(real_text("lm1b")), train=train, validation=dev, expected=pins)
    infos = [describe(source, split) for split in source.splits]
    for info in infos:
        source.check_content(info)
    assert [file.counts.lines for file in infos[0].files] == [6111, 6105, 5986]
