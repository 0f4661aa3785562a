"""The one place that opens text files.

A line ends at LF and nowhere else; one CR before the LF belongs to the line end. Text is UTF-8, whatever the locale
says. Everything that reads, counts or writes lines goes through this module, so that all parts of the program agree
on how many lines a file has.
"""

import gzip
import hashlib
import html
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from mtf_experiments.errors import UserError
from mtf_experiments.files import write_atomically

_BOM = b"\xef\xbb\xbf"
_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)
_LINE_BREAKS = re.compile(r"\r\n|[\r\n\t]")


def open_bytes(path: str | Path) -> BinaryIO:
    """Open a file for reading bytes, decompressing it if its name ends in `.gz`; `UserError` if that is impossible."""
    path = Path(path)
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a text file without their line ends; of a `.sgm` file (WMT test sets) its segments, one a line.

    A byte order mark at the start of the file is dropped; characters such as U+2028, U+0085, form feed or a CR in the
    middle of a line stay part of it. A last line without LF counts as a line.

    Raises:
        UserError: the file cannot be read or is not UTF-8; the message names file and line number.
    """
    path = Path(path)
    if ".sgm" in path.suffixes[-2:]:
        text = "\n".join(_decoded_lines(path))
        return (one_line(html.unescape(segment)).strip() for segment in _SEGMENT.findall(text))
    return _decoded_lines(path)


def _decoded_lines(path: Path) -> Iterator[str]:
    with open_bytes(path) as file:
        yield from decoded_lines(file, str(path))


def decoded_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """The lines of an opened file; `name` stands for it in errors. See `read_lines`."""
    number = 0
    try:
        for number, raw in enumerate(file, start=1):  # a binary file iterates by LF only
            if number == 1:
                raw = raw.removeprefix(_BOM)
            yield raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}, line {number}: not UTF-8 (byte 0x{error.object[error.start]:02x}, number {error.start} of "
            "the line); convert the file to UTF-8"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{name}: damaged or incomplete gzip file after line {number}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror or error}") from error


def one_line(text: str) -> str:
    """`text` with every LF, CR, CR LF and TAB replaced by one space: exactly one line, and one field of a TSV file."""
    return _LINE_BREAKS.sub(" ", text)


def write_lines(path: str | Path, lines: Iterable[str]) -> int:
    """Write one line per item (see `one_line`): UTF-8, LF, gzip by suffix; the file appears whole or not at all.

    Returns the number of lines written.
    """
    path = Path(path)
    count = 0
    with write_atomically(path) as raw:
        # No time stamp and no name in the gzip header: the same lines give the same bytes.
        file = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) if path.suffix == ".gz" else raw
        for line in lines:
            file.write(one_line(line).encode("utf-8") + b"\n")
            count += 1
        if file is not raw:
            file.close()
    return count


def count_words(line: str) -> int:
    """The number of words of a line: the longest runs of characters other than space (U+0020) and TAB.

    On text that holds no other white space this is what `wc -w` counts. No-break spaces and other Unicode spaces do
    not separate.
    """
    pieces = line.replace("\t", " ").split(" ")
    return len(pieces) - pieces.count("")


def is_blank(line: str) -> bool:
    """Whether a line has no word (see `count_words`)."""
    return not line.strip(" \t")


@dataclass(frozen=True)
class TextCounts:
    """What a text holds.

    Attributes:
        lines: lines, the blank ones among them.
        blank: lines without a word.
        words: see `count_words`.
        characters: Unicode code points, line ends not counted.
        bytes: bytes of the text as UTF-8 with one LF per line.
        sha256: hash of those bytes. It does not depend on compression, byte order mark, CR LF or how the text is cut
            into files.
    """

    lines: int
    blank: int
    words: int
    characters: int
    bytes: int
    sha256: str


@dataclass
class TextCounter:
    """Counts lines as they pass."""

    lines: int = 0
    blank: int = 0
    words: int = 0
    characters: int = 0
    bytes: int = 0
    _hash: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def add(self, lines: list[str]) -> None:
        """Count a block of lines."""
        data = "".join([line + "\n" for line in lines]).encode("utf-8")
        octets = np.frombuffer(data, np.uint8)
        separator = (octets == ord(" ")) | (octets == ord("\t")) | (octets == ord("\n"))
        self.lines += len(lines)
        self.blank += sum(map(is_blank, lines))
        self.words += int(
            np.count_nonzero(separator[1:] & ~separator[:-1])
        )  # ends of words; every line ends with a separator
        self.characters += sum(map(len, lines))
        self.bytes += len(data)
        self._hash.update(data)

    def counts(self) -> TextCounts:
        """The counts so far."""
        return TextCounts(self.lines, self.blank, self.words, self.characters, self.bytes, self._hash.hexdigest())


def blocks(lines: Iterable[str], size: int = 8192) -> Iterator[list[str]]:
    """Cut a stream of lines into lists of `size`, the last one shorter."""
    block: list[str] = []
    for line in lines:
        block.append(line)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


def count_text(lines: Iterable[str]) -> TextCounts:
    """Count a stream of lines."""
    counter = TextCounter()
    for block in blocks(lines):
        counter.add(block)
    return counter.counts()
