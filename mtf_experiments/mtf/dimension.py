"""Dimensions and shapes: tensors are addressed by the names of their dimensions, never by axis numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


class ShapeError(ValueError):
    """Named shapes that do not fit together. The message names dimensions and sizes."""

    user_error = True


@dataclass(frozen=True, order=True)
class Dimension:
    """A tensor dimension: a name and its *global* size, whatever the layout does with it."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ShapeError(f"dimension name {self.name!r} is not an identifier")
        if self.size < 0:
            raise ShapeError(f"dimension {self.name} has the negative size {self.size}")

    def __repr__(self) -> str:
        return f"{self.name}={self.size}"


class Shape(tuple[Dimension, ...]):
    """An ordered tuple of dimensions with distinct names.

    Raises ShapeError where two dimensions share a name (whatever their sizes).
    """

    __slots__ = ()

    def __new__(cls, dimensions: Iterable[Dimension] = ()) -> Shape:
        """Checks that the names are distinct."""
        self = super().__new__(cls, dimensions)
        names = [d.name for d in self]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ShapeError(f"[{', '.join(map(repr, self))}] has two dimensions named {', '.join(twice)}; rename one")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dimensions."""
        return tuple(d.name for d in self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Global sizes of the dimensions."""
        return tuple(d.size for d in self)

    @property
    def elements(self) -> int:
        """Number of elements of the whole (global) tensor."""
        return math.prod(self.sizes)

    def axis(self, dimension: Dimension | str) -> int:
        """Position of `dimension`. Raises ShapeError naming the shape if it is not there."""
        return self.index(self.find(dimension))

    def find(self, dimension: Dimension | str) -> Dimension:
        """The dimension of that name. Raises ShapeError if it is absent or has another size."""
        name = dimension if isinstance(dimension, str) else dimension.name
        for d in self:
            if d.name == name:
                if isinstance(dimension, Dimension) and d != dimension:
                    raise ShapeError(f"dimension {name} has size {d.size} in {self}, but {dimension.size} was meant")
                return d
        raise ShapeError(f"no dimension named {name} in {self}")

    def has(self, dimension: Dimension | str) -> bool:
        """Whether a dimension of that name is there."""
        return (dimension if isinstance(dimension, str) else dimension.name) in self.names

    def without(self, *dimensions: Dimension | str) -> Shape:
        """The shape less `dimensions`, each of which must be in it."""
        drop = {self.find(d).name for d in dimensions}
        return Shape(d for d in self if d.name not in drop)

    def renamed(self, names: dict[str, str]) -> Shape:
        """The shape with dimensions `old: new` renamed. Raises ShapeError for an absent old name."""
        for old in names:
            self.find(old)
        return Shape(Dimension(names.get(d.name, d.name), d.size) for d in self)

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self))}]"


def union(shapes: Iterable[Shape]) -> Shape:
    """All dimensions of `shapes` in order of first appearance. Raises ShapeError if a name has two sizes."""
    seen: dict[str, Dimension] = {}
    for shape in shapes:
        for d in shape:
            if seen.setdefault(d.name, d) != d:
                raise ShapeError(
                    f"dimension {d.name} has size {seen[d.name].size} in one tensor and {d.size} in another"
                )
    return Shape(seen.values())
