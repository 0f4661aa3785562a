"""The paper's Table 1: what the layouts of two fully connected layers compute, communicate and hold, in symbols.

Nothing here knows the formulas: the training step is traced for sizes that are products of different primes, and each
number of its ledger is decomposed into them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gin
import jax
import jax.numpy as jnp

from mtf_experiments import mtf
from mtf_experiments.models import two_layer
from mtf_experiments.reporting.console import table

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


def draw(path: Path) -> None:
    """The efficiency condition (paper, section 5): FLOPs per element communicated, on r = c = sqrt(n) rows and columns.

    They stay what they are if the batch grows with the rows and the hidden layer with the columns, and fall otherwise.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    (row,) = (r for r in symbolic() if r.layout == two_layer.MIXED)
    b, d, h = 4096, 1024, 8192
    sides = [2**k for k in range(1, 7)]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for label, grow_b, grow_h in (
        (f"b = {b:,} r, h = {h:,} c", True, True),
        (f"b = {b:,} r, h = {2 * h:,}", True, False),
        (f"b = {2 * b:,}, h = {h:,} c", False, True),
        (f"b = {2 * b:,}, h = {2 * h:,}", False, False),
    ):
        points = []
        for side in sides:
            sizes = {"b": b * (side if grow_b else 2), "d": d, "h": h * (side if grow_h else 2), "r": side, "c": side}
            points.append(value(row.compute, sizes) / value(row.communication, sizes))
        axes.plot([side**2 for side in sides], points, "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([s**2 for s in sides], [f"{s**2:,} = {s} x {s}" for s in sides], fontsize=8)
    axes.set_xlabel("processors n = r c")
    axes.set_ylabel("FLOPs per element communicated")
    axes.set_title(f"Two layers, {two_layer.MIXED}, d = {d:,}: what keeps efficiency constant", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
