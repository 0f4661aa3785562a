"""Where lines of text come from.

A source gives the lines of its splits "train", "validation" and "test" (the last one may be absent), part by part: a
part is a file, or whatever else the source is made of. It says cheaply whether it changed (`signature`) and, while it
is read, what it holds (`SourceInfo`).
"""

import glob
import hashlib
import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import gin

from mtf_experiments.data.text_io import TextCounter, TextCounts, blocks, read_lines
from mtf_experiments.errors import UserError

SPLITS = ("train", "validation", "test")
Part = tuple[str, Iterator[str]]
"""Name of a part of a source, and its lines."""
Pins = Mapping[str, Mapping[str, Any]]
"""Pinned counts by split."""


@dataclass(frozen=True)
class FileInfo:
    """Name and content of one part of a source."""

    name: str
    counts: TextCounts


@dataclass(frozen=True)
class SourceInfo:
    """What a split holds: its parts in order, and the whole (`whole.sha256` is that of all lines in order)."""

    split: str
    files: tuple[FileInfo, ...]
    whole: TextCounts

    def as_json(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists."""
        return asdict(self) | {"files": [asdict(file) for file in self.files]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "SourceInfo":
        """Inverse of `as_json`."""
        files = tuple(FileInfo(file["name"], TextCounts(**file["counts"])) for file in data["files"])
        return cls(data["split"], files, TextCounts(**data["whole"]))


@runtime_checkable
class Source(Protocol):
    """Text in splits."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that this source has, in the order of `SPLITS`."""
        ...

    def parts(self, split: str) -> Iterator[Part]:
        """The parts of a split in a fixed order; each part's lines are read before the next part is asked for."""
        ...

    def signature(self, split: str) -> str:
        """A short text that changes when the split may have changed; found without reading its content."""
        ...

    def check_content(self, info: SourceInfo) -> None:
        """Raise `UserError` if a split that was read is not what the user pinned."""
        ...


def lines(source: Source, split: str) -> Iterator[str]:
    """All lines of a split."""
    for _, part in source.parts(split):
        yield from part


class CountedSource:
    """Reads a split block by block and knows afterwards what it held."""

    def __init__(self, source: Source, split: str):
        self._source, self._split = source, split
        self._whole = TextCounter()
        self._files: list[FileInfo] = []

    def blocks(self, size: int = 8192) -> Iterator[list[str]]:
        """Lists of up to `size` lines; a part's last list is shorter."""
        for name, part in self._source.parts(self._split):
            counter = TextCounter()
            for block in blocks(part, size):
                counter.add(block)
                self._whole.add(block)
                yield block
            self._files.append(FileInfo(name, counter.counts()))

    def info(self) -> SourceInfo:
        """What was read; complete once `blocks` has come to its end."""
        return SourceInfo(self._split, tuple(self._files), self._whole.counts())


def describe(source: Source, split: str) -> SourceInfo:
    """Read a whole split and say what it holds."""
    counted = CountedSource(source, split)
    for _ in counted.blocks():
        pass
    return counted.info()


def check_readable(source: Source, sample: int = 200) -> None:
    """A look, in seconds, at whether a source can be used: files exist, are not empty and start with UTF-8 text.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    for split in source.splits:
        empty = True
        for _, part in source.parts(split):
            for _ in islice(part, sample):
                empty = False
        if empty:
            raise UserError(f"the {split} split is empty")


def check_pins(source: Source, info: SourceInfo, expected: Pins | None, what: str) -> None:
    """Compare counts and hash of a split with pinned ones (keys: fields of `TextCounts`).

    Raises:
        UserError: naming each value that differs, the pinned one and the files; or a split that `source` does not have.
    """
    strange = sorted(set(expected or {}) - set(source.splits))
    if strange:
        raise UserError(f"{what}: expected names {strange[0]!r}; the splits here: {', '.join(source.splits)}")
    known = asdict(info.whole)
    pins = dict((expected or {}).get(info.split, {}))
    unknown = sorted(set(pins) - set(known))
    if unknown:
        raise UserError(f"{what}: cannot pin {', '.join(unknown)}; possible: {', '.join(sorted(known))}")
    wrong = [f"{key} is {known[key]}, expected {value}" for key, value in pins.items() if known[key] != value]
    if wrong:
        files = ", ".join(file.name for file in info.files[:5]) + (", ..." if len(info.files) > 5 else "")
        raise UserError(
            f"{what}: the {info.split} split is not the expected text: {'; '.join(wrong)} (read: {files}). "
            "Either the files are incomplete or others, or the expected counts are wrong"
        )


@gin.configurable
@dataclass(frozen=True)
class TextSource:
    """Plain text files, one sentence a line, `.gz` or not.

    This is also the One Billion Word benchmark as its archive unpacks: give the folder as `data_dir` and
    `train="training-monolingual.tokenized.shuffled/news.en-*"` and so on. A blank line is an empty sentence.

    Attributes:
        data_dir: folder that the patterns are relative to; only read. `~` is the home directory.
        train, validation, test: file names or glob patterns (`**` works), one or several. Files are read in the order
            of the patterns, within a pattern by name. `test` may be absent.
        expected: pinned counts, for example `{"validation": {"lines": 6075, "words": 153583}}`; other content is
            refused.
    """

    data_dir: str
    train: str | Sequence[str]
    validation: str | Sequence[str]
    test: str | Sequence[str] | None = None
    expected: Pins | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """Those splits that have a pattern."""
        return tuple(split for split in SPLITS if getattr(self, split))

    def files(self, split: str) -> list[Path]:
        """The files of a split, in reading order.

        Raises:
            UserError: no such folder or file, an empty file, a file matched twice or also used for training.
        """
        files = self._matches(split)
        for file in files:
            if file.stat().st_size == 0:
                raise UserError(f"{file} is empty ({split} split)")
        shared = set(files) & set(self._matches("train")) if split != "train" else ()
        if shared:
            raise UserError(f"{min(shared)} is both in the train and the {split} split")
        return files

    def parts(self, split: str) -> Iterator[Part]:
        """One part per file, named by its path under `data_dir`."""
        for file in self.files(split):
            yield file.relative_to(self._folder()).as_posix(), _not_empty(read_lines(file), file)

    def signature(self, split: str) -> str:
        """Hash of the names, sizes and modification times of the files."""
        listed = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files(split)]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def check_content(self, info: SourceInfo) -> None:
        """Compare with `expected`."""
        check_pins(self, info, self.expected, f"TextSource in {self._folder()}")

    def _folder(self) -> Path:
        return Path(self.data_dir).expanduser().absolute()

    def _matches(self, split: str) -> list[Path]:
        patterns = getattr(self, split)
        if not patterns:
            raise UserError(f"TextSource has no {split} split; set TextSource.{split}")
        folder = self._folder()
        if not folder.is_dir():
            raise UserError(f"no folder {folder} for the {split} split; {what_exists(folder)}")
        found: list[Path] = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matches = sorted(glob.glob(pattern, root_dir=folder, recursive=True))
            matched = [folder / name for name in matches if (folder / name).is_file()]
            if not matched:
                raise UserError(f"no file {folder / pattern} for the {split} split; {what_exists(folder / pattern)}")
            found += matched
        twice = {file for file in found if found.count(file) > 1} if len(set(found)) < len(found) else ()
        if twice:
            raise UserError(f"{min(twice)} is matched twice by the patterns of the {split} split")
        return found


def _not_empty(part: Iterator[str], file: Path) -> Iterator[str]:
    empty = True
    for line in part:
        empty = False
        yield line
    if empty:
        raise UserError(f"{file} is empty")


def what_exists(path: Path) -> str:
    """What a user finds where the path begins to be wrong."""
    while not path.is_dir():
        path = path.parent
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in path.iterdir() if entry.name[0] != ".")
    shown = ", ".join(names[:10]) + (f", ... ({len(names)} in all)" if len(names) > 10 else "")
    return f"{path} holds {shown or 'nothing'}"


@dataclass(frozen=True)
class ListSource:
    """Lines held in memory, for trying things out.

    Attributes:
        text: lines per split.
    """

    text: Mapping[str, Sequence[str]]

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits given."""
        return tuple(split for split in SPLITS if split in self.text)

    def parts(self, split: str) -> Iterator[Part]:
        """One part."""
        yield "memory", iter(self.text[split])

    def signature(self, split: str) -> str:
        """Hash of the lines."""
        return hashlib.sha256(json.dumps(list(self.text[split])).encode()).hexdigest()

    def check_content(self, info: SourceInfo) -> None:
        """Nothing is pinned."""


def first_lines(source: Source, split: str, count: int) -> list[str]:
    """The first `count` lines of a split."""
    return list(islice(lines(source, split), count))
