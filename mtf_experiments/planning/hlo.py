"""What the compiler made of a program: the collectives in compiled HLO text, counted as `mtf.ledger` counts.

    compiled = mtf.spmd(step, mesh, layout).lower(*arguments).compile()
    made = hlo_ledger(compiled.as_text(), mtf.mesh_shape_of(mesh))
    made.elements() == mtf.ledger(step, mesh, layout, *arguments).elements()

The two agree, but for what XLA saves: equal collectives of the same value are shared, one in a loop whose operand does
not change is moved out of it, and the allreduce of a broadcast constant becomes a product. Several of one kind and
group are often combined into a single call with a tuple of results; they are listed one by one here. On CPU, bf16 sums
are made in f32: the elements are the same, the bytes twice as many.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mtf_experiments.mtf import Collective, Ledger, Product
from mtf_experiments.mtf.ledger import dearest

_KINDS = {
    "all-reduce": "allreduce",
    "all-gather": "allgather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "alltoall",
    "collective-permute": "exchange",
}
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min"}

_COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]")
_REFERENCE = re.compile(r"(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: its arrays as (type, sizes), several for a tuple; `attributes` is the text after operands."""

    name: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str


@dataclass
class Computation:
    """A named list of instructions."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""


def hlo_ledger(text: str, mesh: Mapping[str, int]) -> Ledger:
    """The collectives and matrix products of one run of a compiled program on a mesh of these names and sizes.

    `text` is `jax.jit(f).lower(...).compile().as_text()`. Matrix products are those left as such; a compiler may
    hand others to library calls. A while loop whose number of steps is not to be found is counted once and marked.
    Raises ValueError for text that is no HLO module, and for a collective whose groups lie along no mesh dimensions.
    """
    computations, entry = parse(text)
    return _count(computations, entry, mesh)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of an HLO module by name, and the name of the entry. Raises ValueError if there is none."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.split("\n"):
        if current is None:
            if match := _COMPUTATION.match(line):
                current = computations[match[2]] = Computation()
                entry = match[2] if match[1] else entry
        elif line.strip() == "}":
            current = None
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match[2], match[3])
            current.instructions[instruction.name] = instruction
            current.root = instruction.name if match[1] else current.root
    if not entry:
        raise ValueError("the text has no ENTRY computation: want that of a compiled HLO module")
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode, _, _ = text[end:].strip().partition("(")
    start = text.index("(", end)
    stop = _closing(text, start)
    arguments = text[start + 1 : stop - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    arrays = tuple(
        (dtype, tuple(int(n.removeprefix("<=")) for n in sizes.split(",") if n))
        for dtype, sizes in _ARRAY.findall(text[:end])
    )
    return Instruction(name, arrays, opcode, operands, arguments, text[stop:])


def _closing(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced brackets in HLO: {text[:200]}")


def _count(computations: dict[str, Computation], name: str, mesh: Mapping[str, int]) -> Ledger:
    computation = computations[name]
    return Ledger.sum(_count_instruction(computations, computation, i, mesh) for i in computation.instructions.values())


def _count_instruction(
    computations: dict[str, Computation], computation: Computation, instruction: Instruction, mesh: Mapping[str, int]
) -> Ledger:
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")):  # the ends of asynchronous operations, which name them again
        return Ledger()
    if opcode.removesuffix("-start") in _KINDS:
        return Ledger(_collectives(computations, computation, instruction, mesh))
    if opcode == "dot":
        (_, left), *_ = _operand_arrays(computation, instruction)
        contracted = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", instruction.attributes)
        depth = math.prod(left[int(i)] for i in contracted[1].split(",") if i) if contracted else 1
        (dtype, sizes), operands = instruction.arrays[0], _operand_arrays(computation, instruction)
        read = sum(math.prod(shape) * _bytes(kind) for kind, shape in [*operands, instruction.arrays[0]])
        return Ledger(products=(Product(2 * depth * math.prod(sizes), read, dtype, 1),))
    called = dict(_REFERENCE.findall(instruction.attributes))
    if opcode == "while":
        condition, body = (_count(computations, called[part], mesh) for part in ("condition", "body"))
        return Ledger.sum([condition, body]).repeated(_trip_count(instruction, computations[called["condition"]]))
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if opcode == "conditional":
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else called.values()
        return dearest([_count(computations, name, mesh) for name in names])
    return Ledger.sum(_count(computations, name, mesh) for name in called.values())


def _operand_arrays(computation: Computation, instruction: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    return [array for name in instruction.operands for array in computation.instructions[name].arrays]


def _collectives(
    computations: dict[str, Computation], computation: Computation, instruction: Instruction, mesh: Mapping[str, int]
) -> tuple[Collective, ...]:
    kind = _KINDS[instruction.opcode.removesuffix("-start")]
    axes = _mesh_dimensions(instruction, mesh)
    if not axes:
        return ()
    scope = re.search(r'op_name="([^"]*)"', instruction.attributes)
    reduction = ""
    if applied := dict(_REFERENCE.findall(instruction.attributes)).get("to_apply"):
        combine = computations[applied]
        reduction = _REDUCTIONS.get(opcode := combine.instructions[combine.root].opcode, opcode)
    grown = math.prod(mesh[a] for a in axes) if kind == "allgather" else 1  # an allgather is counted by its result
    collectives = []
    for dtype, sizes in _operand_arrays(computation, instruction):
        elements = math.prod(sizes) * grown
        collectives.append(
            Collective(kind, axes, elements, elements * _bytes(dtype), 1, scope[1] if scope else "", reduction)
        )
    return tuple(collectives)


def _bytes(dtype: str) -> int:
    """Bytes of one element of an HLO type, such as 2 for bf16."""
    bits = re.search(r"[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1  # pred


def _trip_count(instruction: Instruction, condition: Computation) -> int | None:
    """The number of steps of a while loop: as the compiler noted it, else the bound its counter is compared with."""
    _, _, config = instruction.attributes.partition("backend_config=")
    if config.startswith("{"):
        noted, _ = json.JSONDecoder().raw_decode(config)
        if "known_trip_count" in noted:
            return int(noted["known_trip_count"]["n"])
    bounds = [i for i in condition.instructions.values() if i.opcode == "constant" and i.arrays[0][0] in ("s32", "s64")]
    compared = re.search(r"direction=LT", condition.instructions[condition.root].attributes)
    return int(bounds[0].arguments) if len(bounds) == 1 and compared else None


def _mesh_dimensions(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh dimensions along which the groups of a collective lie, in the order of the mesh."""
    if instruction.opcode.startswith("collective-permute"):
        pairs = _lists(_attribute(instruction, "source_target_pairs"))
        return tuple(a for a, differs in zip(mesh, _spread(pairs, mesh), strict=True) if differs)
    groups = replica_groups(_attribute(instruction, "replica_groups"), math.prod(mesh.values()))
    axes = tuple(a for a, differs in zip(mesh, _spread(groups, mesh), strict=True) if differs)
    if any(len(group) != math.prod(mesh[a] for a in axes) for group in groups):
        raise ValueError(
            f"{instruction.name}: the groups {groups} do not lie along dimensions of the mesh {dict(mesh)}"
        )
    return axes


def _attribute(instruction: Instruction, name: str) -> str:
    match = re.search(rf"\b{name}=", instruction.attributes)
    if not match:
        raise ValueError(f"{instruction.name}: a {instruction.opcode} without {name}")
    rest = instruction.attributes[match.end() :]
    if rest.startswith("mesh["):
        return rest[: rest.index("}") + 1]
    return rest[: _closing(rest, 0)] if rest.startswith("{") else re.split(r",\s", rest)[0]


def replica_groups(text: str, processors: int) -> list[tuple[int, ...]]:
    """Groups of processors from HLO text: `{{0,1},{2,3}}` (`{}`: all), `[2,4]<=[4,2]T(1,0)` or `mesh['a'=4,'b'=2] {'b'}`.

    The second stands for the numbers 0, 1, ... as an array of sizes 4, 2, transposed, read as 2 groups of 4. The third
    for the groups along b of these numbers as an array of sizes 4, 2 (from `, device_ids=([2,4]T(1,0))`, if that is said
    before the braces). Raises ValueError for other text.
    """
    if text.startswith("{"):
        return _lists(text) or [tuple(range(processors))]
    if match := re.fullmatch(r"\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", text.strip()):
        sizes = _numbers(match[1])
        return _rows(_device_numbers(match[2], match[3]).reshape(sizes))
    pattern = r"mesh\[([^\]]*)\](?:, device_ids=\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\))? \{([^}]*)\}"
    if match := re.fullmatch(pattern, text.strip()):
        mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=([0-9]+)", match[1])}
        along = re.findall(r"'([^']+)'", match[4])
        if set(along) <= set(mesh):
            numbers = _device_numbers(match[2] or str(processors), match[3]).reshape(tuple(mesh.values()))
            order = [name for name in mesh if name not in along] + along
            members = math.prod(mesh[name] for name in along)
            return _rows(numbers.transpose([list(mesh).index(name) for name in order]).reshape(-1, members))
    raise ValueError(f"replica groups of unknown form: {text}")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _device_numbers(sizes: str, order: str | None) -> np.ndarray:
    numbers = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return numbers.transpose(_numbers(order) if order else range(numbers.ndim))


def _rows(groups: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in group) for group in groups]


def _lists(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([0-9,]+)\}", text.replace(" ", ""))]


def _spread(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> list[bool]:
    """For each mesh dimension whether the members of some group differ in it. Processors are numbered row by row."""
    coordinates = [np.stack(np.unravel_index(np.array(group), tuple(mesh.values()))) for group in groups]
    return [bool(any(np.ptp(c[i]) > 0 for c in coordinates)) for i in range(len(mesh))]
