"""Vocabularies are reproducible, reversible where asked for, and never add or swallow an end of sentence."""

import io
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import sentencepiece

from mtf_experiments.data.sources import lines
from mtf_experiments.data.synthetic import SyntheticSource
from mtf_experiments.data.text_io import read_lines
from mtf_experiments.data.tokenizer import (
    EOS,
    UNKNOWN,
    Tokenizer,
    Vocabulary,
    require_known,
    reservoir_sample,
    round_trip,
    unknown_share,
)
from mtf_experiments.errors import UserError
from tests.data_location import real_text

TEXT = list(lines(SyntheticSource(seed=4, train_lines=300), "train"))
TORTURE = [
    "the  cat",
    " leading and trailing ",
    "tab\there",
    "\ufe30 and \u2026 and \u3000 wide",
    "line\u2028and\u2029and\x85 next",
    "\x0b\x0c\x1c\x1d\x1e",
    "ﬁ ½ ① Å Å",
    "你好 😀 naïve \u200d\u200b",
    "a\rb",
    "</s> <unk> <pad> <0x41>",
    "\ufeff\ufffd\u00ad",
    "",
    " ",
]


@pytest.fixture(scope="module")
def bpe():
    return Vocabulary(size=400, kind="bpe").train(TEXT)


def test_ids_of_the_special_pieces_are_fixed(bpe):
    assert bpe.pieces()[:3] == ["<pad>", "</s>", "<unk>"] and bpe.vocab_size == 400


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_identity_normalisation_gives_back_every_line(kind):
    size = 320 if kind == "unigram" else 400
    tokenizer = Vocabulary(size=size, kind=kind).train(TEXT)
    assert tokenizer.decode(tokenizer.encode(TORTURE)) == TORTURE
    assert round_trip(tokenizer, TORTURE + TEXT).changed == 0
    assert unknown_share(tokenizer, TORTURE) == 0.0


def test_lossy_normalisation_is_reported_with_the_changed_lines():
    tokenizer = Vocabulary(size=400, kind="bpe", normalization="nmt_nfkc").train(TEXT)
    report = round_trip(tokenizer, [*TEXT, "the  cat", "the\u2026cat"])
    assert (report.lines, report.changed) == (len(TEXT) + 2, 2)
    assert report.examples == (("the  cat", "the cat"), ("the\u2026cat", "the...cat"))
    assert report.summary().startswith(f"2 of {len(TEXT) + 2} lines (0.66 %)")


def test_encoding_never_contains_padding_or_end_of_sentence(bpe):
    ids = np.concatenate(bpe.encode([*TORTURE, *TEXT]))
    assert ids.dtype == np.int32 and ids.min() >= UNKNOWN


def test_a_model_that_appends_its_own_end_of_sentence_still_gives_exactly_one(bpe):
    eager = Tokenizer(bpe.model)
    eager._processor = sentencepiece.SentencePieceProcessor(model_proto=bpe.model, add_eos=True)
    assert eager._processor.encode("a")[-1] == EOS
    for tokenizer in (bpe, eager):
        flat, lengths = tokenizer.encode_flat(TEXT)
        assert (flat == EOS).sum() == len(TEXT) == len(lengths)
        assert np.array_equal(np.flatnonzero(flat == EOS), np.cumsum(lengths) - 1)


def test_flat_encoding_is_the_sentences_one_after_the_other(bpe):
    flat, lengths = bpe.encode_flat(TORTURE, threads=2)
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    assert [list(part) for part in parts] == [[*ids, EOS] for ids in bpe.encode(TORTURE, threads=1)]
    assert [len(array) for array in bpe.encode_flat([])] == [0, 0]


def test_same_text_and_settings_give_the_same_vocabulary_in_another_process(bpe):
    program = (
        "from tests.data.test_tokenizer import TEXT; "
        "from mtf_experiments.data.tokenizer import Vocabulary as V; "
        "print(V(size=400, kind='bpe').train(TEXT).fingerprint, V(size=50, sample_lines=50, seed=3, "
        "byte_fallback=False).train(TEXT).fingerprint)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    sampled = Vocabulary(size=50, sample_lines=50, seed=3, byte_fallback=False).train(TEXT)
    assert output.stdout.split() == [bpe.fingerprint, sampled.fingerprint]


def test_line_ends_and_byte_order_mark_of_the_text_file_do_not_change_the_vocabulary(tmp_path, bpe):
    plain = "".join(line + "\n" for line in TEXT).encode()
    for name, data in {"crlf": plain.replace(b"\n", b"\r\n"), "bom": b"\xef\xbb\xbf" + plain, "lf": plain}.items():
        (tmp_path / name).write_bytes(data)
        assert Vocabulary(size=400, kind="bpe").train(read_lines(tmp_path / name)).fingerprint == bpe.fingerprint


def test_a_piece_that_is_a_carriage_return_survives():
    text = [f"a\rb {word}\rc" for word in ("x", "y", "z")] * 20
    tokenizer = Vocabulary(size=270, kind="bpe").train(text)
    assert any("\r" in piece for piece in tokenizer.pieces())
    assert tokenizer.decode(Tokenizer(tokenizer.model).encode(text)) == text


@pytest.mark.parametrize("changed", [{"normalization": "nmt_nfkc"}, {"size": 399}, {"kind": "unigram", "size": 320}])
def test_whatever_changes_the_ids_changes_the_fingerprint(bpe, changed):
    other = Vocabulary(**({"size": 400, "kind": "bpe"} | changed)).train(TEXT)
    assert other.fingerprint != bpe.fingerprint


def test_word_vocabulary_makes_one_id_of_each_word():
    source = SyntheticSource(seed=0, train_lines=20_000)
    text = list(lines(source, "train"))
    tokenizer = Vocabulary(size=1000, kind="word").train(text)
    assert tokenizer.vocab_size == 3 + source.vocabulary_size
    assert [len(ids) for ids in tokenizer.encode(text)] == [len(line.split()) for line in text]
    assert tokenizer.decode(tokenizer.encode(text[:100])) == text[:100]
    assert unknown_share(tokenizer, text) == 0.0


def test_vocabulary_of_another_text_is_refused_by_its_share_of_unknown_ids():
    tokenizer = Vocabulary(size=500, kind="word").train(TEXT)
    assert require_known(tokenizer, TEXT, 0.05, "the train split") == 0.0
    with pytest.raises(UserError, match=r"100\.0 % .* of the train split are unknown \(allowed: 5\.0 %\)"):
        require_known(tokenizer, ["ganz andere Wörter"] * 10, 0.05, "the train split")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"size": 5000}, "5000"), ({"kind": "char"}, "char"), ({"normalization": "nfd"}, "nfd")],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Vocabulary(**settings).train(TEXT)


def test_text_without_words_is_refused():
    with pytest.raises(UserError, match="no text"):
        Vocabulary(size=300).train(["", " "])


def test_models_with_other_special_ids_and_other_files_are_refused():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=40, minloglevel=2
    )
    with pytest.raises(UserError, match=r"my\.model has ids pad -1, eos 2, unk 0, bos 1"):
        Tokenizer(model.getvalue(), "my.model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        Tokenizer(b"something else", "my.model")


def test_decoding_stops_at_the_first_end_of_sentence_and_refuses_foreign_ids(bpe):
    ids = list(bpe.encode(["the cat"])[0])
    assert bpe.decode([[*ids, EOS, *ids, 0, 0], [0, *ids]]) == ["the cat", "the cat"]
    with pytest.raises(UserError, match="cannot decode id 400"):
        bpe.decode([[400]])


def test_reservoir_holds_each_item_with_the_same_probability():
    counts = Counter()
    for seed in range(2000):
        counts.update(set(reservoir_sample(map(str, range(20)), 5, seed)))
    # 2000 draws with probability 1/4: mean 500, standard deviation 19.4
    assert sum(counts.values()) == 10_000 and all(abs(counts[str(i)] - 500) < 90 for i in range(20))
    assert reservoir_sample("abc", 5, 0) == ["a", "b", "c"]


def test_real_text_comes_back_from_its_vocabulary():
    text = list(read_lines(real_text("lm1b/lm1b_100.txt")))
    tokenizer = Vocabulary(size=800, kind="bpe").train(text)
    assert round_trip(tokenizer, text).changed == 0
