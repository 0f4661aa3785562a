"""Where sentence pairs come from: two sources, line n of one being the translation of line n of the other."""

import hashlib
import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import gin

from mtf_experiments.data.sources import SPLITS, CountedSource, Part, Pins, Source, SourceInfo, TextSource, lines
from mtf_experiments.data.text_io import is_blank
from mtf_experiments.data.tfds_source import TfdsSource
from mtf_experiments.errors import UserError


@runtime_checkable
class PairSource(Protocol):
    """Aligned text in two languages, the source language first."""

    @property
    def languages(self) -> tuple[str, str]:
        """Codes such as ("en", "de")."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that this source has."""
        ...

    @property
    def inputs(self) -> Source:
        """The sentences to translate."""
        ...

    @property
    def targets(self) -> Source:
        """Their translations."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What the reader left out and why, for people."""
        ...


class Directed:
    """What pair sources share that have a `source_language`, a `target_language` and `inputs`."""

    source_language: str
    target_language: str
    inputs: Any

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return self.source_language, self.target_language

    @property
    def splits(self) -> tuple[str, ...]:
        """Those splits that there is something for."""
        return self.inputs.splits

    @property
    def notes(self) -> Sequence[str]:
        """Nothing is left out."""
        return ()

    def check_languages(self) -> None:
        """Raises UserError for languages that are the same or no names."""
        if self.source_language == self.target_language or not all(name.isidentifier() for name in self.languages):
            raise UserError(
                f"{type(self).__name__} translates {self.source_language!r} to {self.target_language!r}; name two "
                "languages, e.g. 'en' and 'de'"
            )


@gin.configurable
@dataclass(frozen=True)
class ParallelTextSource(Directed):
    """Line-aligned files, as WMT has them: plain, `.gz`, or `.sgm` with one segment a line.

    Attributes:
        data_dir: folder that the patterns are relative to; only read.
        source_language, target_language: what takes the place of `{lang}` in the patterns of either side; swapping them
            swaps the direction. `{role}` becomes `src` and `ref`.
        train, validation, test: patterns as in `TextSource`, with `{lang}`; `test` may be absent.
        expected: pinned counts of both sides, {"test": {"lines": 3003}}, or by language, {"test": {"en": {"words": 5}}}.
    """

    data_dir: str
    source_language: str
    target_language: str
    train: str | Sequence[str]
    validation: str | Sequence[str]
    test: str | Sequence[str] | None = None
    expected: Pins | None = None

    def __post_init__(self) -> None:
        self.check_languages()
        for split in SPLITS:
            patterns = getattr(self, split) or ()
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                if "{lang}" not in pattern:
                    raise UserError(
                        f"ParallelTextSource.{split}: {pattern!r} does not say where the language goes: {{lang}}"
                    )

    @cached_property
    def inputs(self) -> TextSource:
        """The files of the source language."""
        return self._side(self.source_language, "src")

    @cached_property
    def targets(self) -> TextSource:
        """The files of the target language."""
        return self._side(self.target_language, "ref")

    def _side(self, language: str, role: str) -> TextSource:
        def named(patterns: str | Sequence[str] | None) -> str | list[str] | None:
            if patterns is None:
                return None
            several = [patterns] if isinstance(patterns, str) else patterns
            try:
                return [pattern.format(lang=language, role=role) for pattern in several]
            except (KeyError, IndexError, ValueError) as error:
                raise UserError(f"ParallelTextSource: {several}: only {{lang}} and {{role}} are filled in") from error

        train, validation = named(self.train), named(self.validation)
        assert train and validation
        return TextSource(
            self.data_dir, train, validation, named(self.test), pins_of(self.expected, self.languages, language)
        )


@gin.configurable
@dataclass(frozen=True)
class TfdsPairSource(Directed):
    """A translation data set that TFDS prepared, read without TensorFlow, in either direction.

    TFDS keeps the entities of WMT's `.sgm` files: its newstest2014 holds `&amp;` and `&quot;`, which is left as it is.

    Attributes:
        name: with its configuration: "wmt14_translate/de-en".
        source_language, target_language: names of the two features.
        data_dir, train, validation, test: as in `TfdsSource`.
        expected: as in `ParallelTextSource`.
    """

    name: str
    source_language: str
    target_language: str
    data_dir: str = "~/tensorflow_datasets"
    train: str = "train"
    validation: str = "validation"
    test: str | None = "test"
    expected: Pins | None = None

    def __post_init__(self) -> None:
        self.check_languages()

    @cached_property
    def inputs(self) -> TfdsSource:
        """The feature of the source language."""
        return self._side(self.source_language)

    @cached_property
    def targets(self) -> TfdsSource:
        """The feature of the target language."""
        return self._side(self.target_language)

    def _side(self, language: str) -> TfdsSource:
        splits = (self.train, self.validation, self.test)
        return TfdsSource(self.name, self.data_dir, *splits, language, pins_of(self.expected, self.languages, language))


@dataclass(frozen=True)
class PairSide:
    """One side of pairs that are held in memory, as a source of its own.

    Attributes:
        pairs: the pairs of each split.
        number: 0 for the source side, 1 for the target side.
        name: of its only part.
        key: a text that changes with the pairs.
    """

    pairs: Mapping[str, Sequence[tuple[str, str]]]
    number: int
    name: str
    key: str

    @property
    def splits(self) -> tuple[str, ...]:
        """Those splits that hold pairs."""
        return tuple(split for split in SPLITS if self.pairs.get(split))

    def parts(self, split: str) -> Iterator[Part]:
        """One part."""
        yield self.name, (pair[self.number] for pair in self.pairs[split])

    def signature(self, split: str) -> str:
        """Hash of the key and the split."""
        return hashlib.sha256(f"{self.key} {split} {self.number}".encode()).hexdigest()

    def check_content(self, info: SourceInfo) -> None:
        """Nothing is pinned."""


def pins_of(expected: Pins | None, languages: tuple[str, str], language: str) -> Pins | None:
    """The pins of one of two sides: the counts pinned for both, and those under the language's name."""
    for split, pins in (expected or {}).items():
        strange = [name for name, value in pins.items() if isinstance(value, Mapping) and name not in languages]
        if strange:
            raise UserError(f"expected of {split} names {strange[0]!r}; the languages here: {', '.join(languages)}")
    return expected and {
        split: {k: v for k, v in pins.items() if not isinstance(v, Mapping)} | dict(pins.get(language, {}))
        for split, pins in expected.items()
    }


def aligned_lines(source: PairSource, split: str) -> Iterator[str]:
    """All lines of the sources, then all of the targets; at their end the alignment is checked, see `check_aligned`."""
    sides = [CountedSource(side, split) for side in (source.inputs, source.targets)]
    for side in sides:
        for block in side.blocks():
            yield from block
    check_aligned(source, split, *(side.info() for side in sides))


def check_aligned(source: PairSource, split: str, inputs: SourceInfo, targets: SourceInfo) -> None:
    """Compares the lines of the two sides, file by file.

    Raises UserError that names both files, both counts and the first line that looks out of step: the first that is
    blank on one side only, or holds a carriage return, or is four times as long as the other and 20 words longer.
    """
    for one, other in zip(inputs.files, targets.files, strict=False):
        if one.counts.lines != other.counts.lines:
            suspect = _out_of_step(source, split, one.name, other.name)
            raise UserError(
                f"the {split} split is not aligned: {one.name} has {one.counts.lines:,} lines, {other.name} has "
                f"{other.counts.lines:,}; the first line that looks out of step is line {suspect:,}. "
                "Lines end at LF only; get files of equal length"
            )
    if len(inputs.files) != len(targets.files):
        raise UserError(
            f"the {split} split has {len(inputs.files)} files in {source.languages[0]} and {len(targets.files)} in "
            f"{source.languages[1]}: {', '.join(f.name for f in (*inputs.files, *targets.files))}"
        )


def _out_of_step(source: PairSource, split: str, one: str, other: str) -> int:
    number = 0
    sides = _part(source.inputs, split, one), _part(source.targets, split, other)
    for number, (a, b) in enumerate(zip(*sides, strict=False), 1):
        short, long = sorted((len(a.split()), len(b.split())))
        if is_blank(a) != is_blank(b) or "\r" in a + b or (long > 4 * short and long - short >= 20):
            return number
    return number + 1


def _part(side: Source, split: str, wanted: str) -> Iterator[str]:
    for name, part in side.parts(split):
        for line in part:
            if name == wanted:
                yield line


def pair_lines(source: PairSource, split: str) -> Iterator[tuple[str, str]]:
    """The pairs of a split."""
    return zip(lines(source.inputs, split), lines(source.targets, split), strict=True)
