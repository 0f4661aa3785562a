"""Lines end at LF only, text is UTF-8 only, and everything counts alike."""

import gzip
import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtf_experiments.data.text_io import TextCounter, count_text, count_words, one_line, read_lines, write_lines
from mtf_experiments.errors import UserError
from tests.data_location import real_text

ODD = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


def written(tmp_path, data: bytes, name="text.txt"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_lone_carriage_return_does_not_split_a_line(tmp_path):
    assert list(read_lines(written(tmp_path, b"a\r b\nc\n"))) == ["a\r b", "c"]


def test_carriage_return_before_the_line_feed_belongs_to_the_line_end(tmp_path):
    assert list(read_lines(written(tmp_path, b"a\r\nb\r\r\n\r\nc"))) == ["a", "b\r", "", "c"]


@pytest.mark.parametrize("character", ODD)
def test_unicode_line_separators_do_not_split_a_line(tmp_path, character):
    text = f"one\ntwo {character} two\nthree\n"
    assert list(read_lines(written(tmp_path, text.encode()))) == ["one", f"two {character} two", "three"]


def test_byte_order_mark_is_dropped_at_the_start_of_the_file_only(tmp_path):
    data = b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n"
    assert list(read_lines(written(tmp_path, data))) == ["a", "\ufeffb"]


def test_bytes_that_are_not_utf8_are_refused_with_file_and_line(tmp_path):
    path = written(tmp_path, b"good\nalso good\nbad \xff here\n")
    with pytest.raises(UserError, match=r"text\.txt, line 3: not UTF-8 \(byte 0xff"):
        list(read_lines(path))


def test_cut_off_gzip_file_is_refused(tmp_path):
    packed = gzip.compress(b"".join(f"{i} some line\n".encode() for i in range(5000)))
    with pytest.raises(UserError, match="damaged or incomplete gzip"):
        list(read_lines(written(tmp_path, packed[: len(packed) // 2], "text.gz")))


def test_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="cannot read .*nowhere.txt"):
        list(read_lines(tmp_path / "nowhere.txt"))


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_written_lines_are_as_many_as_items_whatever_they_hold(tmp_path, suffix):
    items = ["a\nb", "a\r\nb", "a\rb\tc", "", *ODD]
    path = tmp_path / f"out.{suffix}"
    assert write_lines(path, items) == len(items)
    assert list(read_lines(path)) == ["a b", "a b", "a b c", "", *ODD]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@given(st.lists(st.text()))
def test_what_is_written_reads_back_but_for_line_ends_and_tabs(tmp_path_factory, items):
    items = [item.encode("utf-8", "ignore").decode() for item in items]
    path = tmp_path_factory.getbasetemp() / "any.txt"
    write_lines(path, items)
    expected = [one_line(item) for item in items]
    if expected:
        expected[0] = expected[0].removeprefix("\ufeff")
    assert list(read_lines(path)) == expected
    assert path.read_bytes().count(b"\n") == len(items)


def test_failed_writing_leaves_the_old_file(tmp_path):
    path = written(tmp_path, b"old\n")

    def lines():
        yield "new"
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_lines(path, lines())
    assert path.read_bytes() == b"old\n" and list(tmp_path.iterdir()) == [path]


def test_reading_and_writing_do_not_depend_on_the_locale(tmp_path):
    path = written(tmp_path, "übung \u2028 a\n".encode())
    program = (
        "import sys; from mtf_experiments.data.text_io import read_lines, write_lines;"
        "write_lines(sys.argv[1] + '.out', read_lines(sys.argv[1]))"
    )
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, str(path)], env=env, check=True, timeout=60)
    assert (tmp_path / "text.txt.out").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("line", "words"), [("", 0), (" ", 0), ("a", 1), (" a  b\tc ", 3), ("a\u00a0b", 1), ("a\u2028b c", 2)]
)
def test_words_are_what_space_and_tab_separate(line, words):
    assert count_words(line) == words


@given(st.lists(st.text(alphabet="ab \tü\u2028\u00a0", max_size=8), max_size=20), st.integers(0, 20))
def test_counting_in_blocks_equals_counting_line_by_line(items, cut):
    counter = TextCounter()
    counter.add(items[:cut])
    counter.add(items[cut:])
    counts = counter.counts()
    data = "".join(item + "\n" for item in items).encode()
    assert counts.lines == len(items)
    assert counts.words == sum(map(count_words, items))
    assert counts.blank == sum(count_words(item) == 0 for item in items)
    assert counts.characters == sum(map(len, items))
    assert (counts.bytes, counts.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_counts_of_real_text_are_those_of_independent_tools():
    shard = real_text("lm1b/heldout-monolingual.tokenized.shuffled/news.en.heldout-00013-of-00050")
    counts = count_text(read_lines(shard))
    lines, words, _ = map(int, subprocess.run(["wc", shard], capture_output=True, check=True).stdout.split()[:3])
    assert (counts.lines, counts.words) == (lines, words) == (6119, 155414)
    assert counts.bytes == 837746
    assert counts.sha256 == hashlib.sha256(shard.read_bytes()).hexdigest()
