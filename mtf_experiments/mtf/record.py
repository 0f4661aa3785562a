"""The record of a program: its operations one by one, with named dimensions, before any layout.

    found = mtf.record(two_layers, x, w, v)
    for operation in found.operations:
        print(operation.name, operation.scope, [found.tensors[i].shape for i in operation.outputs])

What a program would compute, hold and communicate under any mesh and layout can be read off it without tracing it again
(`planning.estimate`): layout search does so for thousands of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.source_info_util
import numpy as np

from mtf_experiments.mtf.dimension import Dimension, Shape
from mtf_experiments.mtf.layout import Layout, MeshShape
from mtf_experiments.mtf.placement import Placement, placed, placement

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a program: its global shape, the type of its elements, and how often it is made (loops)."""

    shape: Shape
    dtype: np.dtype
    repeats: int = 1
    argument: bool = False
    """Whether it comes from outside: no operation of the record made it."""


@dataclass(frozen=True)
class Operation:
    """One call of the language; `inputs` and `outputs` number tensors of the record. What it calls inside is its own."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    repeats: int
    """How often it runs: the product of the lengths of the loops that it is in."""
    scope: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What else it was called with, by the names of the parameters."""


@dataclass
class Record:
    """Tensors and operations in the order of the program; `arguments` numbers the tensors it was called with."""

    tensors: list[Tensor] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)


class Recorder:
    """Writes a record while a program is traced. Tensors are known by the array and the shape that they have."""

    def __init__(self) -> None:
        self.record = Record()
        self.repeats = 1
        self._inside = False
        self._loops: set[int] = set()
        self._numbers: dict[tuple[int, Shape], int] = {}
        self._kept: list[Any] = []  # what is numbered must live, lest its identity be another's

    def number(self, tensor: Any) -> int:
        """The number of `tensor`; one not seen before comes from outside."""
        if _key(tensor) not in self._numbers:
            self._add(tensor, argument=True)
        return self._numbers[_key(tensor)]

    def same(self, new: Any, old: Any) -> None:
        """The tensors of the pytree `new` are those of `old` in a new guise."""
        for x, y in zip(_tensors(new), _tensors(old), strict=True):
            self._numbers[_key(x)] = self.number(y)
            self._kept.append(x.array)

    def _add(self, tensor: Any, argument: bool = False) -> int:
        self._numbers[_key(tensor)] = number = len(self.record.tensors)
        self._kept.append(tensor.array)
        self.record.tensors.append(Tensor(tensor.shape, np.dtype(tensor.dtype), self.repeats, argument))
        return number

    def loop(self, body: Callable[..., R], outside: tuple[Any, Any], given: tuple[Any, Any], dim: Dimension) -> R:
        """Runs the body of a loop along `dim`: what is recorded in it runs `dim.size` times.

        `outside` are the carry and the stacks as they were before the loop, `given` the carry and slices in it.
        """
        before = self.repeats, self._inside
        self.repeats *= dim.size
        self._inside = self._inside or id(body) in self._loops  # JAX may trace a body again; the record has it once
        self._loops.add(id(body))
        self._kept.append(body)
        if not self._inside:
            self.same(given[0], outside[0])
            for new, old in zip(_tensors(given[1]), _tensors(outside[1]), strict=True):
                inputs = (self.number(old),)
                made = self._add(new)
                self.record.operations.append(Operation("slice_of_loop", inputs, (made,), self.repeats, ""))
        try:
            return body(*given)
        finally:
            self.repeats, self._inside = before

    def call(self, function: Callable[..., R], given: inspect.BoundArguments) -> R:
        """Calls `function` and records it as one operation, unless it is part of another."""
        args, kwargs = given.args, given.kwargs
        if self._inside:
            return function(*args, **kwargs)
        name = function.__name__
        inputs = tuple(self.number(x) for x in _tensors((args, kwargs)))
        self._inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside = False
        outputs = []
        for y in _tensors(result):  # a cast to varying is an event, though it changes nothing here
            known = None if name == "vary_over" else self._numbers.get(_key(y))
            outputs.append(self._add(y) if known is None else known)
        if tuple(outputs) != inputs:
            plain = {key: value for key, value in given.arguments.items() if not _tensors(value)}
            scope = str(jax.extend.source_info_util.current_name_stack())
            self.record.operations.append(Operation(name, inputs, tuple(outputs), self.repeats, scope, plain))
        return result


def recorded(function: Callable[P, R]) -> Callable[P, R]:
    """An operation of the language, so that records hold it."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = placement().recorder
        if recorder is None:
            return function(*args, **kwargs)
        return recorder.call(function, signature.bind(*args, **kwargs))

    return operation


def record(function: Callable[..., Any], *arguments: Any) -> Record:
    """The record of `function`, a program in the language, called with `arguments` (arrays or shapes).

    Of what is inside a `jax.checkpoint`, `jax.grad` and the like the operations are recorded, but not which tensors of
    the surroundings they are given: those count as arguments.
    """
    recorder = Recorder()

    def traced(*arguments: Any) -> Any:
        recorder.record.arguments = [recorder.number(x) for x in _tensors(arguments)]
        return function(*arguments)

    with placed(Placement(MeshShape(""), Layout(""), applied=False, recorder=recorder)):
        jax.eval_shape(traced, *arguments)
    return recorder.record


def _key(tensor: Any) -> tuple[int, Shape]:
    return id(tensor.array), tensor.shape


def _tensors(tree: Any) -> list[Any]:
    """The NamedTensors of a pytree (or of anything that is none)."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "tree_flatten") and hasattr(x, "shape"))
    return [x for x in leaves if hasattr(x, "tree_flatten") and hasattr(x, "shape")]
