"""The paper's Table 1: what the layouts of two fully connected layers compute, communicate and hold, in symbols.

Nothing here knows the formulas: the training step is traced for sizes that are products of different primes, and each
number of its ledger is decomposed into them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import gin
import jax
import jax.numpy as jnp

from mtf_experiments import mtf
from mtf_experiments.models import two_layer
from mtf_experiments.planning.text import table

_DIMENSIONS = {"b": 13, "d": 17, "h": 19}
_MESH = {"n": 2, "r": 3, "c": 5, "p": 7}
_NAMES = {"all": "n", "rows": "r", "cols": "c", "planes": "p"}
_MESHES = {
    two_layer.EMPTY: ("all",),
    two_layer.DATA_PARALLEL: ("all",),
    two_layer.MODEL_PARALLEL: ("all",),
    two_layer.MIXED: ("rows", "cols"),
    two_layer.THREE_DIMENSIONAL: ("rows", "cols", "planes"),
}


@dataclass(frozen=True)
class Row:
    """A layout of Table 1 in symbols: b, d and h are the sizes of batch, io and hidden; n, r, c and p processors of the mesh.

    Each column is a sum of monomials with their factors, `{"bd/r": 2}`: FLOPs, elements communicated and elements held
    by each processor for loss, gradients by the parameters and by the input.
    """

    name: str
    layout: str
    compute: Mapping[str, int]
    communication: Mapping[str, int]
    memory: Mapping[str, int]


def symbolic() -> list[Row]:
    """The rows of the table."""
    return [_row(name, layout) for name, layout in two_layer.LAYOUTS.items()]


def _row(name: str, layout: str) -> Row:
    whole = math.prod(_MESH.values())
    b, d, h = (prime * whole for prime in _DIMENSIONS.values())
    mesh = mtf.MeshShape({axis: _MESH[_NAMES[axis]] for axis in _MESHES[layout]})
    shapes = two_layer.shapes(b, d, h)
    tensors = {n: mtf.NamedTensor(jax.ShapeDtypeStruct(s.sizes, jnp.float32), s) for n, s in shapes.items()}
    params = {n: tensors[n] for n in ("w", "bias", "v")}
    ledger = mtf.ledger(
        two_layer.loss_and_gradients, mtf.abstract_mesh(mesh), layout, params, tensors["x"], tensors["targets"]
    )
    communication: Counter[str] = Counter()
    for c in ledger.collectives:
        communication[_monomial(c.elements)] += c.count
    compute: Counter[str] = Counter()
    for p in ledger.products:
        factor = 2
        compute[_monomial(p.flops // factor)] += factor * p.count
    memory: Counter[str] = Counter()
    for held in ("x", "w", "bias", "h", "v", "y"):
        memory[_monomial(math.prod(mtf.Layout(layout).local_sizes(shapes[held], mesh)))] += 1
    return Row(name, layout, compute, communication, memory)


def _monomial(number: int) -> str:
    """A product of sizes, each a prime times all mesh sizes, divided by some mesh sizes: `bd/rp`."""
    above = "".join(name * _exponent(number, prime) for name, prime in _DIMENSIONS.items())
    below = "".join(name * (len(above) - _exponent(number, prime)) for name, prime in _MESH.items())
    return (above or "1") + (f"/{below}" if below else "")


def _exponent(number: int, prime: int) -> int:
    exponent = 0
    while number % prime == 0:
        number, exponent = number // prime, exponent + 1
    return exponent


def formula(terms: Mapping[str, int], factors: bool = True) -> str:
    """A sum of monomials, those of the highest degree first."""
    if not terms:
        return "0"
    ordered = sorted(terms.items(), key=lambda item: (-len(item[0].partition("/")[0].replace("1", "")), item[0]))
    return " + ".join(f"{n} {m}" if factors and n > 1 else m for m, n in ordered)


def value(terms: Mapping[str, int], sizes: Mapping[str, int]) -> float:
    """The number that a sum of monomials has for these sizes of b, d, h, n, r, c and p."""
    total = 0.0
    for monomial, n in terms.items():
        above, _, below = monomial.partition("/")
        total += n * math.prod(sizes[s] for s in above if s != "1") / math.prod(sizes[s] for s in below)
    return total


@gin.configurable
@dataclass(frozen=True)
class Table1:
    """Table 1, and the sizes for its numbers: those of the layers, and of a mesh of rows x cols x planes processors.

    Two mesh dimensions are rows x (cols planes), one is all.
    """

    batch: int = 65536
    io: int = 1024
    hidden: int = 262144
    rows: int = 16
    cols: int = 8
    planes: int = 4

    def render(self) -> str:
        """In symbols, and in numbers for these sizes."""
        return _render(self)


def _render(of: Table1) -> str:
    rows, cols, planes = of.rows, of.cols, of.planes
    sizes = {"b": of.batch, "d": of.io, "h": of.hidden, "n": rows * cols * planes, "r": rows, "c": cols, "p": planes}
    two = {**sizes, "c": cols * planes}
    lines: list[Sequence[str]] = [("layout", "compute (FLOPs)", "communication (elements)", "memory (elements)")]
    numbers: list[Sequence[str]] = [("layout", "compute", "communication", "memory", "FLOPs per element")]
    for row in symbolic():
        columns = (row.compute, row.communication, row.memory)
        lines.append((row.layout or "(empty)", *(formula(terms) for terms in columns)))
        here = sizes if row.layout == two_layer.THREE_DIMENSIONAL else two
        compute, communication, memory = (value(terms, here) for terms in columns)
        intensity = f"{compute / communication:,.0f}" if communication else "no communication"
        numbers.append((row.layout or "(empty)", *(f"{v:,.0f}" for v in (compute, communication, memory)), intensity))
    head = [
        "Table 1 of the paper: two fully connected layers, one training step (loss, gradients by parameters and by input),",
        "on each processor. b, d, h: sizes of batch, io, hidden; n, r, c, p: processors along all, rows, cols, planes.",
        "The terms of the highest order are the paper's; factors and lower terms are what the traced program really does.",
    ]
    shape = f"n = {sizes['n']} = {rows} x {cols * planes} = {rows} x {cols} x {planes}"
    values = f"b = {of.batch:,}, d = {of.io:,}, h = {of.hidden:,}, {shape}:"
    return "\n".join([*head, "", table(lines), "", values, table(numbers, right=(1, 2, 3, 4))])
