"""What a program holds in memory at its fullest moment, and moves through it: the values of a traced program, one by one.

    found = footprint(programs.gradient_program, *programs.abstract_gradient_arguments())
    found.peak, found.held     # bytes on one processor, and what makes them up
    found.traffic              # bytes read and written

The model of a compiler behind it: operations run in the order of the trace; a component-wise result is not stored but
computed where it is used, unless what reads it needs it in memory (a matrix product, a collective, a loop, a lookup);
an operation writes into the place of an operand that dies with it, where the sizes are equal; the stacks that a loop
fills exist from its start to their last use. Compilers reorder, recompute and pad: `plan --compile` shows what one of
them makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mtf_experiments import mtf

_SAME_STORAGE = frozenset(
    """reshape squeeze expand_dims pvary pcast name stop_gradient transpose copy copy_p optimization_barrier
    random_wrap random_unwrap""".split()
)
"""Primitives whose result is their operand in another guise."""
_LOOPS = frozenset("scan while".split())
_FILLING = frozenset("scatter scatter-add scatter-mul scatter-min scatter-max dynamic_update_slice".split())
"""Primitives that write a part of their first operand, in its place."""
_COUNTED_ELSEWHERE = frozenset(
    """dot_general conv_general_dilated psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter
    all_to_all ppermute""".split()
)
"""Matrix products and collectives: the ledger has what they move."""
_STORING = _COUNTED_ELSEWHERE | _LOOPS | _FILLING | frozenset("gather sort top_k cond".split())
"""Primitives that want their operands in memory and put their results there."""
_REDUCING = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin cumsum".split())
"""Primitives that compute what they read on the way, and store their result."""


@dataclass(eq=False)
class _Value:
    """A value of the program; what comes in from outside has no producer and is not counted."""

    bytes: int
    label: str = ""
    producer: _Operation | None = None
    readers: list[_Operation] = field(default_factory=list)
    output: bool = False


@dataclass(eq=False)
class _Operation:
    """One step; `inside` is what its own program, a loop's body, holds besides its inputs and outputs.

    Of the inputs of a loop, those after `whole_inputs` are stacks.
    """

    position: int
    name: str
    inputs: list[_Value]
    outputs: list[_Value]
    inside: Footprint
    whole_inputs: int

    @property
    def may_write_over(self) -> bool:
        """Whether a result may take the place of an operand."""
        return self.name not in _STORING or self.name in _LOOPS | _FILLING


@dataclass(frozen=True)
class Footprint:
    """Bytes of one processor.

    `peak`: at the fullest moment; `held`: what makes that up, by what computed it, largest first. `traffic`: what all but
    matrix products and collectives reads and writes. `stacks`: those arguments that loops read slice by slice.
    """

    peak: int = 0
    held: tuple[tuple[str, int], ...] = ()
    traffic: int = 0
    stacks: int = 0


def footprint(function: Callable[..., Any], *arguments: Any) -> Footprint:
    """What one processor holds at the fullest moment of `function` besides its arguments (results included), and moves.

    What counts are the slices inside the `spmd` program that `function` is; arguments may be shapes.
    """
    return footprint_of(mtf.trace(function, *arguments))


def footprint_of(program: Jaxpr) -> Footprint:
    """The footprint of a program that `mtf.trace` made."""
    return _footprint(_slices(program) or program)


def _slices(jaxpr: Jaxpr) -> Jaxpr | None:
    """The program on a processor's slices, inside that of `spmd`."""
    for equation in jaxpr.eqns:
        for sub in _subprograms(equation):
            if found := sub if equation.primitive.name == "shard_map" else _slices(sub):
                return found
    return None


class _Flat:
    """A program with its calls inlined: operations in order, and the values between them."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.operations: list[_Operation] = []
        self.inputs = [_Value(_bytes(v), "input") for v in jaxpr.invars]
        self.outputs = self._inline(jaxpr, self.inputs)
        for value in self.outputs:
            value.output = True

    def _inline(self, jaxpr: Jaxpr, inputs: list[_Value]) -> list[_Value]:
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {v: _Value(_bytes(v), "constant") for v in jaxpr.constvars}

        def read(variable: Any) -> _Value:
            return _Value(0) if isinstance(variable, Literal) else values[variable]

        for equation in jaxpr.eqns:
            operands = [read(v) for v in equation.invars]
            name, subs = equation.primitive.name, list(_subprograms(equation))
            if name in _SAME_STORAGE and len(operands) == len(equation.outvars):
                results = operands
            elif subs and name not in _STORING:
                results = self._inline(subs[0], operands)
            else:
                results = self._operation(equation, operands, subs)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _operation(self, equation: JaxprEqn, operands: list[_Value], subs: list[Jaxpr]) -> list[_Value]:
        name = equation.primitive.name
        label = f"{name} {equation.source_info.name_stack}".strip()
        inside = max((_inside(equation, sub) for sub in subs), key=lambda found: found.peak, default=Footprint())
        whole = equation.params["num_consts"] + equation.params["num_carry"] if name == "scan" else len(operands)
        operation = _Operation(len(self.operations), name, operands, [], inside, whole)
        operation.outputs = [_Value(_bytes(v), label, operation) for v in equation.outvars]
        for value in operands:
            value.readers.append(operation)
        self.operations.append(operation)
        return operation.outputs


def _inside(equation: JaxprEqn, body: Jaxpr) -> Footprint:
    """What a loop's body or a branch holds besides its inputs and outputs, and what all its runs move."""
    if equation.primitive.name != "scan":
        return _footprint(body)
    carried = equation.params["num_carry"]
    once = _footprint(body, whole_inputs=equation.params["num_consts"] + carried, whole_outputs=carried)
    return replace(once, traffic=once.traffic * equation.params["length"])


def _footprint(jaxpr: Jaxpr, whole_inputs: int | None = None, whole_outputs: int | None = None) -> Footprint:
    """That of a program; inputs and outputs after the first so many are slices of the stacks of a loop."""
    flat = _Flat(jaxpr)
    sliced = set() if whole_inputs is None else set(flat.inputs[whole_inputs:])
    stacked = set() if whole_outputs is None else set(flat.outputs[whole_outputs:])
    counted = [
        v for v in flat.inputs if v in sliced
    ]  # a slice that is read from memory is a copy of its part of the stack
    for operation in flat.operations:
        counted += operation.outputs

    def is_stored(value: _Value) -> bool:
        if value.producer is not None and value.producer.name in _STORING | _REDUCING:
            return True
        return (value.output and value not in stacked) or any(r.name in _STORING for r in value.readers)

    stored = {value: is_stored(value) for value in counted}
    last_use: dict[_Value, int] = {}
    for value in reversed(counted):  # readers come later: theirs is known
        uses = [len(flat.operations)] if value.output else [-1]
        for reader in value.readers:
            uses += [reader.position, *(last_use[o] for o in reader.outputs if not stored[o])]
        last_use[value] = max(uses)

    dying: dict[int, list[_Value]] = {}
    for value in counted:
        if stored[value]:
            dying.setdefault(last_use[value], []).append(value)
    live: dict[_Value, int] = {}
    peak, held, now = 0, (), 0
    for operation in flat.operations:
        arriving = [v for v in operation.inputs if v in sliced and stored[v] and v not in live]
        ends = [v for v in dying.get(operation.position, ()) if v in live]
        places = list(ends) if operation.may_write_over else []
        for value in dict.fromkeys([*arriving, *(v for v in operation.outputs if stored[v])]):
            place = next((p for p in places if p.bytes == value.bytes and value not in sliced), None)
            if place is None:
                now += value.bytes
                live[value] = value.bytes
            else:
                places.remove(place)
                live[value] = live.pop(place)
        if now + operation.inside.peak > peak:
            peak, held = now + operation.inside.peak, _by_label(live, operation.inside)
        for value in dying.get(operation.position, ()):
            now -= live.pop(value, 0)
    traffic = sum(_traffic(operation, stored) for operation in flat.operations)
    stacks = {v for o in flat.operations if o.name == "scan" for v in o.inputs[o.whole_inputs :] if v.producer is None}
    return Footprint(peak, held, traffic, sum(v.bytes for v in stacks))


def _traffic(operation: _Operation, stored: dict[_Value, bool]) -> int:
    """Bytes that an operation reads and writes; of a table or stack only the part that it looks up or fills."""
    written = sum(v.bytes for v in operation.outputs if stored[v])
    if operation.name in _COUNTED_ELSEWHERE | _LOOPS or not written:
        return operation.inside.traffic
    if operation.name == "gather":
        return 2 * written
    if operation.name in _FILLING:
        return 2 * max(v.bytes for v in operation.inputs[1:])
    sources: set[_Value] = set()
    pending = list(operation.inputs)
    while pending:
        value = pending.pop()
        if stored.get(value, True):
            sources.add(value)
        elif value.producer is not None:
            pending += value.producer.inputs
    return written + sum(v.bytes for v in sources)


def _by_label(live: dict[_Value, int], inside: Footprint) -> tuple[tuple[str, int], ...]:
    held = dict(inside.held)
    for value, amount in live.items():
        held[value.label] = held.get(value.label, 0) + amount
    return tuple(sorted(held.items(), key=lambda item: -item[1]))


def _bytes(variable: Any) -> int:
    return math.prod(variable.aval.shape) * getattr(variable.aval.dtype, "itemsize", 8)  # a random key is two words


def _subprograms(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for parameter in equation.params.values():
        for p in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(p, ClosedJaxpr):
                yield p.jaxpr
            elif isinstance(p, Jaxpr):
                yield p
