"""Mesh shapes and layouts: which tensor dimension is split over which mesh dimension (paper, sections 3 and 4).

Both are written as strings in the grammar of the paper's library: `name:value` pairs separated by `;`, `,`, `.` or
space, as in `rows:16;cols:32` and `batch:rows;vocab:cols;d_ff:cols;heads:cols`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mtf_experiments.mtf.dimension import Shape


class LayoutError(ValueError):
    """A mesh shape or layout that cannot be used. The message names dimensions, sizes and what would be legal."""

    user_error = True


def _pairs(text: str, what: str) -> list[tuple[str, str]]:
    pairs = []
    for item in re.split(r"[;,.\s]+", text.strip()):
        if not item:
            continue
        name, colon, value = item.partition(":")
        plain = name.removesuffix("?") if what == "layout" else name
        if not colon or not plain.isidentifier() or not value:
            raise LayoutError(f"{what} {text!r}: {item!r} is not of the form name:value")
        if name in dict(pairs):
            raise LayoutError(f"{what} {text!r} names {name} twice: it is a map, one value for each name")
        pairs.append((name, value))
    return pairs


class MeshShape(Mapping[str, int]):
    """Names and sizes of the dimensions of the processor mesh; one size may be -1, "the devices that are left".

    A mesh is only a naming of the processors: it says nothing of what is split over it.
    """

    def __init__(self, text: str | Mapping[str, int]) -> None:
        if isinstance(text, str):
            self._sizes = {}
            for name, value in _pairs(text, "mesh shape"):
                if not re.fullmatch(r"-1|[1-9][0-9]*", value):
                    raise LayoutError(
                        f"mesh shape {text!r}: the size of {name} is {value!r}; want a positive integer or -1"
                    )
                self._sizes[name] = int(value)
        else:
            self._sizes = dict(text)
        for name, size in self._sizes.items():
            if size != -1 and size < 1:
                raise LayoutError(f"mesh shape {self}: the size of {name} is {size}; want a positive integer or -1")
        if list(self._sizes.values()).count(-1) > 1:
            raise LayoutError(f"mesh shape {self} leaves more than one size open (-1)")

    def resolve(self, devices: int) -> MeshShape:
        """The mesh on `devices` processors, -1 filled in. Raises LayoutError where the product is another number."""
        sizes = dict(self._sizes)
        known = math.prod(s for s in sizes.values() if s != -1)
        for name, size in sizes.items():
            if size == -1 and devices % known == 0:
                sizes[name] = devices // known
        product = math.prod(sizes.values())
        if -1 in sizes.values() or product != devices:
            raise LayoutError(
                f"mesh shape {self!r} has a product of {known if -1 in sizes.values() else product}, but there "
                f"{'is 1 device' if devices == 1 else f'are {devices} devices'}; "
                "the product of the mesh must equal the number of devices"
            )
        return MeshShape(sizes)

    @property
    def processors(self) -> int:
        """Number of processors in the mesh."""
        return math.prod(self._sizes.values())

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __str__(self) -> str:
        return ";".join(f"{n}:{s}" for n, s in self._sizes.items())

    def __repr__(self) -> str:
        return str(self) or "(empty)"


class Layout(Mapping[str, str]):
    """A partial map from tensor dimensions to mesh dimensions; dimensions without a rule are not split.

    A rule `name?:mesh` (a question mark after the name) is optional: it may match no dimension of a program.
    """

    def __init__(self, text: str | Mapping[str, str] = "") -> None:
        self._rules: dict[str, str] = {}
        self.optional: set[str] = set()
        items = _pairs(text, "layout") if isinstance(text, str) else text.items()
        for name, mesh_dimension in items:
            plain = name.removesuffix("?")
            if plain in self._rules:
                raise LayoutError(f"layout {text!r} names {plain} twice: it is a map, one value for each name")
            if plain != name:
                self.optional.add(plain)
            self._rules[plain] = mesh_dimension

    def check_mesh(self, mesh: MeshShape) -> None:
        """Raises LayoutError for a rule whose mesh dimension does not exist."""
        for name, mesh_dimension in self.items():
            if mesh_dimension not in mesh:
                raise LayoutError(
                    f"layout rule {name}:{mesh_dimension}: the mesh {mesh!r} has no dimension {mesh_dimension}"
                    f"{nearest(mesh_dimension, mesh)}; it has {', '.join(mesh) or 'none'}"
                )

    def check_shape(self, shape: Shape, mesh: MeshShape, name: str = "") -> None:
        """Raises LayoutError where `shape` cannot be laid out.

        That is: two of its dimensions on one mesh dimension, or a size that does not divide.
        """
        who = f"tensor {name} {shape}" if name else f"tensor {shape}"
        taken: dict[str, str] = {}
        for d in shape:
            mesh_dimension = self.get(d.name)
            if mesh_dimension is None or mesh_dimension not in mesh or mesh[mesh_dimension] == 1:
                continue
            if mesh_dimension in taken:
                raise LayoutError(
                    f"layout {self}: {who} has two dimensions, {taken[mesh_dimension]} and {d.name}, on the one mesh "
                    f"dimension {mesh_dimension}; give one of them another mesh dimension or none"
                )
            taken[mesh_dimension] = d.name
            if d.size % mesh[mesh_dimension]:
                raise LayoutError(
                    f"layout rule {d.name}:{mesh_dimension}: dimension {d.name} of {who} has size {d.size}, which does "
                    f"not divide over the {mesh[mesh_dimension]} processors of mesh dimension {mesh_dimension}; "
                    f"legal: a multiple of {mesh[mesh_dimension]}, or a size of {mesh_dimension} among "
                    f"{', '.join(str(k) for k in _divisors(d.size))}"
                )

    def check_used(self, names: Iterable[str]) -> None:
        """Raises LayoutError for a rule, not marked optional, that matches none of the program's dimensions `names`."""
        names = set(names)
        for rule in self:
            if rule not in names and rule not in self.optional:
                raise LayoutError(
                    f"layout rule {rule}:{self[rule]} matches no dimension of the program{nearest(rule, names)}; "
                    f"dimensions: {', '.join(sorted(names))} (write {rule}?:{self[rule]} if it may match none)"
                )

    def axes(self, shape: Shape, mesh: MeshShape) -> tuple[str | None, ...]:
        """For each dimension of `shape` the mesh dimension it is split over, or None.

        Mesh dimensions of size 1 split nothing.
        """
        return tuple(
            axis if (axis := self._rules.get(d.name)) is not None and mesh.get(axis, 1) > 1 else None for d in shape
        )

    def local_sizes(self, shape: Shape, mesh: MeshShape) -> tuple[int, ...]:
        """Sizes of one processor's slice of a tensor of `shape`."""
        return tuple(d.size // (mesh[a] if a else 1) for d, a in zip(shape, self.axes(shape, mesh), strict=True))

    def __getitem__(self, name: str) -> str:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash((tuple(self._rules.items()), frozenset(self.optional)))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Layout) and self._rules == other._rules and self.optional == other.optional

    def __str__(self) -> str:
        return ";".join(f"{n}{'?' if n in self.optional else ''}:{m}" for n, m in self._rules.items())

    def __repr__(self) -> str:
        return str(self) or "(empty)"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the known name closest to `name`, or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, min(n, 1 << 16) + 1) if n % k == 0]
