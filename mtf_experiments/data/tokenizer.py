"""SentencePiece vocabularies: training them, reproducibly, and using them.

Ids: 0 padding, 1 end of sentence (EOS), 2 unknown, pieces from 3 on; there is no id for the beginning of a sentence.
"""

import hashlib
import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
import io
import itertools
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gin
import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from mtf_experiments.errors import UserError

PAD, EOS, UNKNOWN = 0, 1, 2
_TRAINING_THREADS = 1  # pieces and their order depend on it
_LONGEST_LINE = 100_000  # bytes; SentencePiece skips longer ones in training


@gin.configurable
@dataclass(frozen=True)
class Vocabulary:
    """How a vocabulary is made.

    Attributes:
        size: number of ids, the three special ones included. A text too small for that many pieces is an error,
            except for "word", where it is an upper bound.
        kind: "unigram" or "bpe" subwords, or "word": whatever spaces separate.
        character_coverage: share of the characters of the text that get a piece; the rest becomes bytes or unknown.
        byte_fallback: spell characters without a piece in UTF-8 bytes (costs 256 ids) instead of giving up on them.
            Not for "word".
        normalization: "identity" leaves the text as it is, so that decoding gives it back; "nmt_nfkc" unifies
            compatible characters and white space.
        sample_lines: at most so many lines, drawn at random from the train split, are looked at.
        seed: of that draw.
    """

    size: int = 32_000
    kind: Literal["unigram", "bpe", "word"] = "unigram"
    character_coverage: float = 0.9995
    byte_fallback: bool = True
    normalization: Literal["identity", "nmt_nfkc"] = "identity"
    sample_lines: int = 1_000_000
    seed: int = 0

    def train(self, text: Iterable[str]) -> "Tokenizer":
        """Make a vocabulary for `text` (read once, as a stream). The same text and settings give the same vocabulary.

        Raises:
            UserError: the settings are impossible for this text; says why.
        """
        if self.kind not in ("unigram", "bpe", "word"):
            raise UserError(f"Vocabulary.kind is {self.kind!r}; possible: unigram, bpe, word")
        if self.normalization not in ("identity", "nmt_nfkc"):
            raise UserError(f"Vocabulary.normalization is {self.normalization!r}; possible: identity, nmt_nfkc")
        usable = (line for line in text if line.strip() and "\0" not in line)  # what SentencePiece can learn from
        sample = reservoir_sample(usable, self.sample_lines, self.seed)
        if not sample:
            raise UserError("there is no text to make a vocabulary of")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sample),
                model_writer=model,
                vocab_size=self.size,
                model_type=self.kind,
                hard_vocab_limit=self.kind != "word",
                character_coverage=self.character_coverage if self.kind != "word" else 1.0,
                byte_fallback=self.byte_fallback and self.kind != "word",
                normalization_rule_name=self.normalization,
                remove_extra_whitespaces=self.normalization != "identity",
                pad_id=PAD,
                eos_id=EOS,
                unk_id=UNKNOWN,
                bos_id=-1,
                num_threads=_TRAINING_THREADS,
                max_sentence_length=_LONGEST_LINE,
                shuffle_input_sentence=False,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            reason = str(error).split("] ")[-1]  # what stands before it is a place in SentencePiece's source
            raise UserError(
                f"cannot make a {self.kind} vocabulary of {self.size} ids: {reason} (Vocabulary.size)"
            ) from error
        return Tokenizer(model.getvalue())


def reservoir_sample(items: Iterable[str], count: int, seed: int) -> list[str]:
    """`count` items of a stream of unknown length (all of them if there are fewer), drawn without replacement."""
    draw = random.Random(seed)
    sample: list[str] = []
    for seen, item in enumerate(items):
        if seen < count:
            sample.append(item)
        elif (place := int(draw.random() * (seen + 1))) < count:
            sample[place] = item
    return sample


class Tokenizer:
    """Turns lines into ids and back.

    Attributes:
        model: the SentencePiece model file as bytes.
        vocab_size: number of ids.
        fingerprint: hash of everything that decides which ids a line gets: pieces, scores, kinds of pieces,
            normalisation. (The model file itself also holds settings that do not matter.)
    """

    def __init__(self, model: bytes, name: str = "the vocabulary"):
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            proto: Any = sentencepiece_model_pb2.ModelProto.FromString(model)  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:  # SentencePiece and protobuf have an exception class each for it
            raise UserError(f"{name} is not a SentencePiece model: {error}") from error
        processor = self._processor
        ids = (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id())
        if ids != (PAD, EOS, UNKNOWN, -1):
            raise UserError(
                f"{name} has ids pad {ids[0]}, eos {ids[1]}, unk {ids[2]}, bos {ids[3]}; "
                "needed are pad 0, eos 1, unk 2, bos -1"
            )
        self.vocab_size: int = processor.vocab_size()
        self.fingerprint = _fingerprint(proto)

    def encode(self, text: Sequence[str], threads: int | None = None) -> list[np.ndarray]:
        """Ids of each line as an int32 array, without any EOS. The number of threads does not change them."""
        return [np.array(ids, np.int32) for ids in self._encode(text, threads)]

    def encode_flat(self, text: Sequence[str], threads: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all lines in one int32 array, one EOS after each line, and the number of ids of each line (int64)."""
        encoded = self._encode(text, threads)
        lengths = np.array([len(ids) + 1 for ids in encoded], np.int64)
        end = (EOS,)
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable((ids, end) for ids in encoded))
        return np.fromiter(flat, np.int32, int(lengths.sum())), lengths

    def decode(self, sentences: Iterable[Iterable[int]]) -> list[str]:
        """Text of each sequence of ids, up to its first EOS; padding is left out."""
        cut = [list(itertools.takewhile(lambda i: i != EOS, map(int, ids))) for ids in sentences]
        bad = [i for ids in cut for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise UserError(f"cannot decode id {bad[0]}: the vocabulary has ids 0 to {self.vocab_size - 1}")
        return list(self._processor.decode([[i for i in ids if i != PAD] for ids in cut])) if cut else []

    def pieces(self) -> list[str]:
        """The text of each id, in order of the ids."""
        return [self._processor.id_to_piece(i) for i in range(self.vocab_size)]

    def _encode(self, text: Sequence[str], threads: int | None) -> list[list[int]]:
        if not text:
            return []
        threads = threads or min(16, os.cpu_count() or 1)
        return self._processor.encode(list(text), add_bos=False, add_eos=False, num_threads=threads)


@dataclass(frozen=True)
class RoundTrip:
    """Which lines come back changed from encoding and decoding.

    Attributes:
        lines: lines looked at.
        changed: lines that came back different.
        examples: the first ten of those, before and after.
    """

    lines: int
    changed: int
    examples: tuple[tuple[str, str], ...]

    def summary(self) -> str:
        """One line for people."""
        share = 100 * self.changed / max(1, self.lines)
        return f"{self.changed:,} of {self.lines:,} lines ({share:.2f} %) change in encode + decode"


def round_trip(tokenizer: Tokenizer, text: Sequence[str]) -> RoundTrip:
    """Encode and decode lines and compare."""
    back = tokenizer.decode(tokenizer.encode(text))
    changed = [(before, after) for before, after in zip(text, back, strict=True) if before != after]
    return RoundTrip(len(text), len(changed), tuple(changed[:10]))


def unknown_share(tokenizer: Tokenizer, text: Sequence[str]) -> float:
    """Share of unknown ids among the ids of the lines, EOS not counted; 0 for no ids."""
    ids = np.concatenate([np.zeros(0, np.int32), *tokenizer.encode(text)])
    return float((ids == UNKNOWN).mean()) if len(ids) else 0.0


def require_known(tokenizer: Tokenizer, text: Sequence[str], limit: float, what: str) -> float:
    """The share of unknown ids; `UserError` if above `limit`: then the vocabulary is not one for this text."""
    share = unknown_share(tokenizer, text)
    if share > limit:
        raise UserError(
            f"{100 * share:.1f} % of the ids of the first {len(text):,} lines of {what} are unknown "
            f"(allowed: {100 * limit:.1f} %); the vocabulary does not fit the text"
        )
    return share


def _fingerprint(proto: Any) -> str:
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    settings = (
        int(trainer.model_type),
        bool(trainer.byte_fallback),
        bool(trainer.treat_whitespace_as_suffix),
        bool(normalizer.add_dummy_prefix),
        bool(normalizer.remove_extra_whitespaces),
        bool(normalizer.escape_whitespaces),
        hashlib.sha256(normalizer.precompiled_charsmap).hexdigest(),
    )
    digest = hashlib.sha256(repr(settings).encode())
    for piece in proto.pieces:
        digest.update(f"{piece.piece!r} {piece.score.hex()} {int(piece.type)}\n".encode())
    return digest.hexdigest()
