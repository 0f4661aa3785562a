"""The ambient placement: under which mesh and layout the code that runs now is traced.

Outside `spmd` it is empty: one device, nothing split. Inside, every NamedTensor holds the processor's own slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from mtf_experiments.mtf.dimension import Dimension, Shape
from mtf_experiments.mtf.layout import Layout, MeshShape

if TYPE_CHECKING:
    from mtf_experiments.mtf.record import Recorder


class Placement:
    """A mesh and a layout, and whether arrays are slices (`applied`) or, in a check, still whole.

    `names` collects the dimensions that the traced program used, for the check that every layout rule matches one; a
    `recorder` notes every operation.
    """

    def __init__(self, mesh: MeshShape, layout: Layout, applied: bool, recorder: Recorder | None = None) -> None:
        self.mesh, self.layout, self.applied, self.recorder = mesh, layout, applied, recorder
        self.names: set[str] = set()
        self._checked: set[Shape] = set()

    def axes(self, shape: Shape) -> tuple[str | None, ...]:
        """The mesh dimension that each dimension of `shape` is split over, or None."""
        return self.layout.axes(shape, self.mesh) if self.applied else (None,) * len(shape)

    def axis(self, dimension: Dimension) -> str | None:
        """The mesh dimension that `dimension` is split over, or None."""
        return self.axes(Shape([dimension]))[0]

    def local_sizes(self, shape: Shape) -> tuple[int, ...]:
        """Sizes of this processor's slice of a tensor of `shape`."""
        return self.layout.local_sizes(shape, self.mesh) if self.applied else shape.sizes

    def check(self, shape: Shape) -> None:
        """Notes the names of `shape` and raises LayoutError if the layout is not legal for it."""
        if shape not in self._checked:
            self._checked.add(shape)
            self.names.update(shape.names)
            self.layout.check_shape(shape, self.mesh)


# Part of the key of JAX's trace caches: what `jax.checkpoint` or `jax.jit` traced under one layout is not used under
# another.
_current = jax.make_user_context(default_value=None)
_NOWHERE = Placement(MeshShape(""), Layout(""), applied=False)


def placement() -> Placement:
    """The placement in force."""
    return _current.value or _NOWHERE


def inside_spmd() -> bool:
    """Whether the code that runs now is being traced as an `spmd` program."""
    return _current.value is not None


@contextlib.contextmanager
def placed(value: Placement) -> Iterator[Placement]:
    """Runs its body under the placement `value`."""
    with _current(value):
        yield value
