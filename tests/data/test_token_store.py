"""A token store is whole or absent, holds exactly one end of sentence per line, and is refused when it was touched."""

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mtf_experiments.data.sources import ListSource, describe
from mtf_experiments.data.token_store import TokenStore, build_store, open_store
from mtf_experiments.data.tokenizer import EOS, UNKNOWN, Vocabulary
from mtf_experiments.errors import UserError
from mtf_experiments.files import write_atomically

LINES = ["the cat sat", "", "on the mat", "the dog  and the cat", "zebra"] * 5
SOURCE = ListSource({"train": LINES, "validation": LINES[:3]})


@pytest.fixture(scope="module")
def tokenizer():
    return Vocabulary(size=30, kind="word").train([line for line in LINES if line != "zebra"])


def test_store_holds_each_line_with_one_end_of_sentence(tmp_path, tokenizer):
    store = build_store(tmp_path / "store", SOURCE, "train", tokenizer, threads=2)
    assert len(store) == len(LINES)
    for number, ids in enumerate(tokenizer.encode(LINES)):
        assert list(store.sentence(number)) == [*ids, EOS]
    counts = store.manifest.counts
    assert (counts.sentences, counts.eos) == (len(LINES), len(LINES))
    assert counts.tokens == len(store.tokens) == counts.pieces + counts.eos
    assert counts.unknown == (np.asarray(store.tokens) == UNKNOWN).sum() >= 5
    assert counts.longest == store.lengths.max()
    assert store.over_long(4) == sum(len(ids) + 1 > 4 for ids in tokenizer.encode(LINES)) > 0
    assert store.manifest.source == describe(SOURCE, "train")
    assert store.tokens.dtype == np.uint16


def test_store_is_reused_and_equal_to_one_made_elsewhere(tmp_path, tokenizer):
    build_store(tmp_path / "a", SOURCE, "train", tokenizer, threads=1)
    written = (tmp_path / "a" / "tokens.npy").stat().st_mtime_ns
    build_store(tmp_path / "a", SOURCE, "train", tokenizer)
    build_store(tmp_path / "b", SOURCE, "train", tokenizer, threads=2)
    assert (tmp_path / "a" / "tokens.npy").stat().st_mtime_ns == written
    for name in ("manifest.json", "tokens.npy", "offsets.npy"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def damage_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens.npy", damage_byte, "tokens.npy does not match its manifest"),
        ("offsets.npy", lambda path: path.write_bytes(path.read_bytes()[:-8]), "offsets.npy does not match"),
        ("tokens.npy", lambda path: path.unlink(), "has no tokens.npy"),
        ("manifest.json", lambda path: path.unlink(), "is not a token store"),
        ("manifest.json", lambda path: path.write_bytes(path.read_bytes()[:100]), "manifest.json is damaged"),
        ("manifest.json", lambda path: path.write_text(json.dumps({"format": 1})), "manifest.json is damaged"),
    ],
)
def test_damaged_store_is_refused_naming_the_file(tmp_path, tokenizer, name, change, message):
    path = tmp_path / "store"
    build_store(path, SOURCE, "train", tokenizer)
    change(path / name)
    with pytest.raises(UserError, match=message):
        open_store(path)


def test_store_of_another_vocabulary_is_refused(tmp_path, tokenizer):
    build_store(tmp_path / "store", SOURCE, "train", tokenizer)
    other = Vocabulary(size=8, kind="word").train(LINES)
    with pytest.raises(UserError, match="made with another vocabulary"):
        open_store(tmp_path / "store", other)


def test_empty_split_is_refused_and_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(UserError, match="validation split is empty"):
        build_store(tmp_path / "store", ListSource({"train": LINES, "validation": []}), "validation", tokenizer)
    assert not (tmp_path / "store").exists() and not (tmp_path / "store.partial").exists()


def test_split_of_blank_lines_is_sentence_ends_only(tmp_path, tokenizer):
    store = build_store(tmp_path / "store", ListSource({"validation": ["", " ", ""]}), "validation", tokenizer)
    counts = store.manifest.counts
    assert (counts.sentences, counts.eos, store.manifest.source.whole.blank) == (3, 3, 3)


def test_failure_while_tokenising_leaves_no_store(tmp_path, tokenizer):
    class Failing(ListSource):
        def parts(self, split):
            yield "good", iter(LINES)
            raise UserError("bad, line 7: not UTF-8")

    with pytest.raises(UserError, match="line 7"):
        build_store(tmp_path / "store", Failing(SOURCE.text), "train", tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["store.lock"]


PROGRAM = """
import sys
from pathlib import Path
from mtf_experiments.data.sources import ListSource
from mtf_experiments.data.token_store import build_store
from mtf_experiments.data.tokenizer import Tokenizer
text = ["the cat sat on the mat"] * 60_000
print("begin", flush=True)
tokenizer = Tokenizer(Path(sys.argv[2]).read_bytes())
build_store(Path(sys.argv[1]), ListSource({"train": text}), "train", tokenizer, threads=1)
print("end", flush=True)
"""


def test_killed_at_any_moment_and_run_again_gives_the_same_manifest(tmp_path, tokenizer):
    (tmp_path / "model").write_bytes(tokenizer.model)

    def run(name, kill_after=None):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / name), str(tmp_path / "model")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        begin = time.monotonic()
        if kill_after is not None:
            time.sleep(kill_after)
            process.send_signal(signal.SIGKILL)
        output = process.stdout.read()
        process.wait(timeout=60)
        return b"end" in output, time.monotonic() - begin

    whole, duration = run("clean")
    assert whole
    draw = random.Random(0)
    killed = 0
    for _ in range(3):
        killed += not run("again", kill_after=draw.uniform(0, duration / 2))[0]
        if (tmp_path / "again").exists():  # if it is there, it is whole
            open_store(tmp_path / "again", tokenizer)
    assert killed and run("again")[0]
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (tmp_path / "clean" / "manifest.json").read_bytes()
    assert not (tmp_path / "again.partial").exists()


def test_large_vocabularies_get_wider_ids(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "vocab_size", 70_000)
    assert build_store(tmp_path / "store", SOURCE, "train", tokenizer).tokens.dtype == np.uint32


def test_unwritable_place_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write .*file"):
        with write_atomically(tmp_path / "file" / "inside"):
            pass


def test_store_in_memory_adds_the_sentence_ends():
    store = TokenStore.of([[5, 6], [], [7]], vocab_size=10)
    assert list(store.tokens) == [5, 6, 1, 1, 7, 1] and list(store.lengths) == [3, 1, 2]
    assert len(store) == 3
