"""Sentence pairs in one tab-separated file, such as Tatoeba's, with a development and a test set held out of it."""

import hashlib
import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

import gin

from mtf_experiments.data.pair_sources import Directed, PairSide
from mtf_experiments.data.sources import SPLITS, what_exists
from mtf_experiments.data.text_io import decoded_lines, is_blank, open_bytes
from mtf_experiments.errors import UserError

Pair = tuple[str, str]


@gin.configurable
@dataclass(frozen=True)
class TsvPairSource(Directed):
    """Pairs of a TSV file: plain, `.gz`, or a `member` of a `.zip`.

    Development and test set hold so many distinct source sentences each, with the first translation in the file. Which
    they are follows from a hash of the sentence, not from its place in the file. No pair is left in training whose source or
    target, letters and digits alone and without case, is one of the other two sets'; nor do those share one. Repeated pairs
    count once.

    Attributes:
        data_dir, file: folder and name of the file; only read.
        source_language, target_language: codes of the two languages.
        source_column, target_column: from 0; swap them (and the languages) for the other direction.
        member: the file inside a zip archive.
        validation_pairs, test_pairs: sizes of the sets held out.
        seed: another one holds out other sentences.
    """

    data_dir: str
    file: str
    source_language: str
    target_language: str
    source_column: int = 0
    target_column: int = 1
    member: str | None = None
    validation_pairs: int = 2000
    test_pairs: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_languages()
        columns = (self.source_column, self.target_column)
        if min(columns) < 0 or columns[0] == columns[1]:
            raise UserError(
                f"TsvPairSource reads columns {columns[0]} and {columns[1]}; want two different ones from 0 on"
            )
        if self.validation_pairs < 1 or self.test_pairs < 0:
            raise UserError("TsvPairSource.validation_pairs must be at least 1, test_pairs at least 0")

    @property
    def splits(self) -> tuple[str, ...]:
        """Train, validation and, if it holds pairs, test."""
        return SPLITS if self.test_pairs else SPLITS[:2]

    @cached_property
    def inputs(self) -> PairSide:
        """The source column."""
        return PairSide(self._split[0], 0, self._name, self._key)

    @cached_property
    def targets(self) -> PairSide:
        """The target column."""
        return PairSide(self._split[0], 1, self._name, self._key)

    @property
    def notes(self) -> Sequence[str]:
        """Counts of the pairs of the file that are in none of the splits."""
        return [f"{self._name}: " + ", ".join(f"{count:,} {what}" for what, count in self._split[1].items())]

    @property
    def _path(self) -> Path:
        return Path(self.data_dir).expanduser().absolute() / self.file

    @property
    def _name(self) -> str:
        return self.file + (f"/{self.member}" if self.member else "")

    @property
    def _key(self) -> str:
        stat = self._path.stat()
        return repr((self, str(self._path), stat.st_size, stat.st_mtime_ns))

    @cached_property
    def _split(self) -> tuple[dict[str, list[Pair]], dict[str, int]]:
        pairs = list(dict.fromkeys(read := list(self._pairs())))  # in order of first appearance
        counts = {"pairs": len(read), "repeated": len(read) - len(pairs)}
        first: dict[str, int] = {}  # normalised source -> its first pair
        keys = [(normalised(a), normalised(b)) for a, b in pairs]
        for number, (source, _) in enumerate(keys):
            first.setdefault(source, number)
        order = sorted(first, key=lambda source: hashlib.sha256(f"{self.seed} {source}".encode()).digest())
        held: dict[str, list[int]] = {"test": [], "validation": []}
        wanted = {"test": self.test_pairs, "validation": self.validation_pairs}
        sources: set[str] = set()
        targets: set[str] = set()
        for source in order:
            split = next((s for s in held if len(held[s]) < wanted[s]), None)
            if split is None:
                break
            number = first[source]
            if keys[number][1] in targets or not source or not keys[number][1]:
                continue
            sources.add(source)
            targets.add(keys[number][1])
            held[split].append(number)
        if any(len(held[s]) < wanted[s] for s in held):
            raise UserError(
                f"{self._path}: {len(first):,} different sentences are too few to hold out {self.test_pairs:,} for test and "
                f"{self.validation_pairs:,} for validation"
            )
        train = [pair for pair, (s, t) in zip(pairs, keys, strict=True) if s not in sources and t not in targets]
        splits = {split: [pairs[n] for n in sorted(numbers)] for split, numbers in held.items()} | {"train": train}
        out = sum(map(len, held.values()))
        counts |= {"held out": out, "left out of training as too like one of those": len(pairs) - out - len(train)}
        return splits, counts

    def _pairs(self) -> Iterator[Pair]:
        last = max(self.source_column, self.target_column)
        with self._open() as file:
            for number, line in enumerate(decoded_lines(file, f"{self._path}"), 1):
                if is_blank(line):
                    continue
                columns = line.split("\t")
                if len(columns) <= last:
                    raise UserError(
                        f"{self._path}, line {number}: {len(columns)} tab-separated columns, but columns "
                        f"{self.source_column} and {self.target_column} are asked for (counted from 0)"
                    )
                yield columns[self.source_column], columns[self.target_column]

    def _open(self) -> BinaryIO:
        path = self._path
        if not path.is_file():
            raise UserError(f"no file {path}; {what_exists(path)}")
        if self.member is None:
            return open_bytes(path)
        try:
            with zipfile.ZipFile(path) as archive:
                return cast(BinaryIO, io.BytesIO(archive.read(self.member)))
        except KeyError:
            with zipfile.ZipFile(path) as archive:
                raise UserError(
                    f"{path} has no member {self.member!r}; it has {', '.join(archive.namelist())}"
                ) from None
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise UserError(f"{path} is not a readable zip archive: {error}") from error


def normalised(sentence: str) -> str:
    """Letters and digits of a sentence without case, words apart by one space: what makes two sentences the same here."""
    kept = "".join(c if c.isalnum() else " " for c in sentence.casefold())
    return " ".join(word for word in kept.split(" ") if word)
