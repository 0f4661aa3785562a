"""Text tokenised once: all ids of a split in one flat array on disk, each sentence with its EOS.

A blank line is a sentence too, of EOS alone, whatever spaces it is made of. A store is a directory that appears whole
or not at all:

    tokens.npy      [tokens] uint16 (uint32 for large vocabularies): ids of all sentences one after the other
    offsets.npy     [sentences + 1] int64: sentence i is tokens[offsets[i]:offsets[i + 1]], its last id is EOS
    manifest.json   what the text was, which vocabulary, all counts, size and hash of the two files
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import sentencepiece

from mtf_experiments.data.sources import CountedSource, Source, SourceInfo
from mtf_experiments.data.text_io import is_blank
from mtf_experiments.data.tokenizer import EOS, UNKNOWN, Tokenizer
from mtf_experiments.errors import UserError
from mtf_experiments.files import file_sha256, lock, write_directory

FORMAT = 1
"""Version of the layout and meaning of a store."""


@dataclass(frozen=True)
class TokenCounts:
    """What a store holds.

    Attributes:
        sentences: lines of the text, blank ones among them; equals the number of EOS.
        pieces: ids without EOS.
        eos: EOS ids.
        tokens: pieces + eos.
        unknown: ids of unknown pieces.
        longest: tokens of the longest sentence.
        largest_id: the largest id.
    """

    sentences: int
    pieces: int
    eos: int
    tokens: int
    unknown: int
    longest: int
    largest_id: int


@dataclass(frozen=True)
class Manifest:
    """The description of a store; see the module's text. It depends on the text and the vocabulary only."""

    source: SourceInfo
    tokenizer: str
    vocab_size: int
    counts: TokenCounts
    files: dict[str, dict[str, Any]]
    format: int = FORMAT
    sentencepiece: str = sentencepiece.__version__

    def as_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers."""
        return asdict(self) | {"source": self.source.as_json()}

    def all_counts(self) -> dict[str, int]:
        """Counts of the text and of the tokens."""
        text = asdict(self.source.whole)
        del text["sha256"]
        return text | asdict(self.counts)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Manifest":
        """Inverse of `as_json`."""
        source, counts = SourceInfo.from_json(data["source"]), TokenCounts(**data["counts"])
        return cls(**(data | {"source": source, "counts": counts}))


@dataclass(frozen=True, eq=False)
class TokenStore:
    """An opened store.

    Attributes:
        tokens: `[tokens]`, flat ids.
        offsets: `[sentences + 1]` int64.
        vocab_size: ids are below it.
        manifest: None for a store that lives in memory only.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    vocab_size: int
    manifest: Manifest | None = None

    @classmethod
    def of(cls, sentences: list[list[int]], vocab_size: int) -> "TokenStore":
        """A store in memory of sentences given as pieces without EOS."""
        flat = [np.array([*pieces, EOS], np.int64) for pieces in sentences]
        offsets = np.cumsum([0, *map(len, flat)]).astype(np.int64)
        return cls(np.concatenate([np.zeros(0, np.int64), *flat]), offsets, vocab_size)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sentence(self, number: int) -> np.ndarray:
        """Ids of one sentence, EOS included."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """`[sentences]` tokens of each sentence, EOS included."""
        return np.diff(self.offsets)

    def fingerprint(self) -> dict[str, Any]:
        """What identifies text and tokens, as plain JSON. The store has a manifest."""
        assert self.manifest is not None
        return self.manifest.source.as_json() | {"tokens_sha256": self.manifest.files["tokens.npy"]["sha256"]}

    def over_long(self, row_length: int) -> int:
        """The number of sentences that do not fit into one row."""
        return int((self.lengths > row_length).sum())


def build_store(path: Path, source: Source, split: str, tokenizer: Tokenizer, threads: int | None = None) -> TokenStore:
    """Open the store at `path`, tokenising the split first if there is none.

    A killed build leaves nothing that is taken for a store; the next one starts again and ends with the same
    manifest.

    Raises:
        UserError: the split is empty or unreadable, the disk is full, or the store at `path` is damaged.
    """
    with lock(path.with_name(path.name + ".lock")):
        if not path.exists():
            with write_directory(path) as directory:
                _fill(directory, source, split, tokenizer, threads)
        return open_store(path, tokenizer)


def open_store(path: Path, tokenizer: Tokenizer | None = None) -> TokenStore:
    """Open a store and compare it with its manifest, byte for byte, and with the vocabulary it is used with.

    Raises:
        UserError: a file is missing, damaged or does not belong to the manifest or the vocabulary.
    """
    remedy = "; delete the directory to have it made again"
    try:
        manifest = Manifest.from_json(json.loads((path / "manifest.json").read_bytes()))
    except FileNotFoundError as error:
        raise UserError(f"{path} is not a token store: no {Path(error.filename).name}{remedy}") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path / 'manifest.json'} is damaged ({error}){remedy}") from error
    if manifest.format != FORMAT:
        raise UserError(f"{path} has format {manifest.format}, this version reads {FORMAT}{remedy}")
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise UserError(f"{path} has no {name}{remedy}")
        if file.stat().st_size != expected["bytes"] or file_sha256(file) != expected["sha256"]:
            raise UserError(f"{file} does not match its manifest (size or sha256 differ){remedy}")
    if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer:
        raise UserError(f"{path} was made with another vocabulary ({manifest.tokenizer[:12]}){remedy}")
    tokens, offsets = np.load(path / "tokens.npy", mmap_mode="r"), np.load(path / "offsets.npy")
    return TokenStore(tokens, offsets, manifest.vocab_size, manifest)


def _fill(directory: Path, source: Source, split: str, tokenizer: Tokenizer, threads: int | None) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    counted = CountedSource(source, split)
    lengths: list[np.ndarray] = []
    unknown = eos = largest = 0
    with (directory / "tokens.npy").open("wb") as file:
        _write_header(file, dtype, 0)
        begin = file.tell()
        for block in counted.blocks():
            ids, block_lengths = tokenizer.encode_flat(["" if is_blank(line) else line for line in block], threads)
            file.write(ids.astype(dtype).tobytes())
            lengths.append(block_lengths)
            unknown += int((ids == UNKNOWN).sum())
            eos += int((ids == EOS).sum())
            largest = max(largest, int(ids.max()))
        offsets = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
        tokens = int(offsets[-1])
        file.seek(0)
        _write_header(file, dtype, tokens)
        assert file.tell() == begin  # numpy leaves room in the header for the length to grow
    np.save(directory / "offsets.npy", offsets)
    sentences = len(offsets) - 1
    if sentences == 0:
        raise UserError(f"the {split} split is empty")
    if eos != sentences:
        raise UserError(
            f"the vocabulary makes EOS out of text: {eos:,} EOS for {sentences:,} lines of the {split} split"
        )
    longest = int(np.diff(offsets).max())
    files = {
        name: {"bytes": (directory / name).stat().st_size, "sha256": file_sha256(directory / name)}
        for name in ("tokens.npy", "offsets.npy")
    }
    counts = TokenCounts(sentences, tokens - eos, eos, tokens, unknown, longest, largest)
    manifest = Manifest(counted.info(), tokenizer.fingerprint, tokenizer.vocab_size, counts, files)
    text = json.dumps(manifest.as_json(), indent=1, ensure_ascii=False) + "\n"
    (directory / "manifest.json").write_bytes(text.encode("utf-8"))


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
