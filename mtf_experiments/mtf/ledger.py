"""The ledger: what a traced program computes and communicates, on each processor (paper, sections 4 and 6).

    ledger = mtf.ledger(step, mtf.abstract_mesh("rows:4;cols:2"), "batch:rows;d_ff:cols", params, batch)
    ledger.elements_by_mesh_dimension()     # {("cols",): 65536, ("rows",): 1048577}
    print(ledger.table())

It is read off the jaxpr, so it needs no devices, and counts what the program needs for its results, as written: XLA
may merge collectives, share equal ones and move them out of loops. Only what runs inside `spmd` programs is seen; what
XLA's partitioner may add around them (an optimizer's global norm over split parameters, say) is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, Mesh

from mtf_experiments.mtf.layout import Layout
from mtf_experiments.mtf.program import spmd

KINDS = ("allreduce", "allgather", "reduce_scatter", "alltoall", "exchange")

# By name: differentiation emits variants (of invariant results) that JAX does not export. With the kind goes the name
# of the parameter that holds the mesh dimensions.
_COLLECTIVES = {
    "psum": ("allreduce", "axes"),
    "psum_invariant": ("allreduce", "axes"),
    "pmax": ("allreduce", "axes"),
    "pmin": ("allreduce", "axes"),
    "all_gather": ("allgather", "axis_name"),
    "all_gather_invariant": ("allgather", "axis_name"),
    "reduce_scatter": ("reduce_scatter", "axis_name"),
    "all_to_all": ("alltoall", "axis_name"),
    "ppermute": ("exchange", "axis_name"),
}


@dataclass(frozen=True)
class Collective:
    """One collective of a program, as each processor takes part in it.

    `elements` and `bytes` are those of one call on one processor: an allgather's result, every other kind's operand.
    """

    kind: str
    """One of `KINDS`."""
    mesh_dimensions: tuple[str, ...]
    """The mesh dimensions along which it communicates, in the order of the mesh; those of size 1 are left out."""
    elements: int
    bytes: int
    count: int
    """How often it runs."""
    scope: str = ""
    """Where: names given by `jax.named_scope` and the like; `transpose(...)` marks the backward pass."""
    reduction: str = ""
    """What an allreduce or reduce_scatter does: sum, max or min."""
    at_least: bool = False
    """Whether `count` leaves out the steps of a while loop, whose number is not known: one is counted."""

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass."""
        return is_backward(self.scope)

    @property
    def where(self) -> str:
        """The scope in words, such as `backward attention`; what is not differentiated has its scope alone."""
        return in_words(self.scope)


@dataclass(frozen=True)
class Product:
    """One matrix product or convolution of a program, of slices, as each processor computes it."""

    flops: int
    """2 m n k for an m x k and a k x n matrix."""
    bytes: int
    """What it reads and writes: both operands and the result."""
    dtype: str
    """The type of its operands; of different ones, that with more bits."""
    count: int
    """How often it runs."""
    scope: str = ""
    """Where, as in Collective."""
    mesh_dimensions: tuple[str, ...] = ()
    """The mesh dimensions that share its work: along the others all processors compute the same."""

    @property
    def where(self) -> str:
        """The scope in words."""
        return in_words(self.scope)


@dataclass(frozen=True)
class Ledger:
    """All collectives and matrix products (convolutions included) of one run of a program, per processor."""

    collectives: tuple[Collective, ...] = ()
    products: tuple[Product, ...] = ()
    at_least: bool = False
    """Whether a while loop was counted once, the number of its steps being unknown."""

    @classmethod
    def sum(cls, parts: Iterable[Ledger]) -> Ledger:
        """The ledger of programs that run one after the other. Equal entries become one, with a higher count."""
        parts = list(parts)
        collectives = _totals((replace(c, count=0), c.count) for part in parts for c in part.collectives)
        products = _totals((replace(p, count=0), p.count) for part in parts for p in part.products)
        return cls(
            tuple(replace(c, count=n) for c, n in collectives.items()),
            tuple(replace(p, count=n) for p, n in products.items()),
            any(p.at_least for p in parts),
        )

    @property
    def flops(self) -> int:
        """FLOPs of all matrix products."""
        return sum(p.flops * p.count for p in self.products)

    def repeated(self, times: int | None) -> Ledger:
        """The ledger of a loop with this body. If `times` is None, not known: counted once, and marked `at_least`."""
        if times is None:
            if not self.collectives and not self.products:
                return self
            return Ledger(tuple(replace(c, at_least=True) for c in self.collectives), self.products, True)
        if times == 0:
            return Ledger()
        return replace(
            self,
            collectives=tuple(replace(c, count=c.count * times) for c in self.collectives),
            products=tuple(replace(p, count=p.count * times) for p in self.products),
        )

    def elements_by_mesh_dimension(self) -> dict[tuple[str, ...], int]:
        """Elements communicated, by mesh dimensions: an allreduce over two at once is charged under that pair."""
        return _totals((c.mesh_dimensions, c.elements * c.count) for c in self.collectives)

    def bytes_by_mesh_dimension(self) -> dict[tuple[str, ...], int]:
        """Bytes communicated, keyed as in `elements_by_mesh_dimension`."""
        return _totals((c.mesh_dimensions, c.bytes * c.count) for c in self.collectives)

    def by_kind(self) -> dict[str, int]:
        """Elements communicated by each kind of collective that occurs."""
        return _totals((c.kind, c.elements * c.count) for c in self.collectives)

    def elements(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Elements communicated, by kind and mesh dimensions."""
        return _totals(((c.kind, c.mesh_dimensions), c.elements * c.count) for c in self.collectives)

    @property
    def total_elements(self) -> int:
        """Elements that each processor puts into collectives (allgather: gets out of them)."""
        return sum(c.elements * c.count for c in self.collectives)

    @property
    def total_bytes(self) -> int:
        """Bytes of `total_elements`."""
        return sum(c.bytes * c.count for c in self.collectives)

    def table(self) -> str:
        """One aligned line per collective, dearest first, then the totals. `+` after a count: at least so often."""
        rows = [("collective", "mesh dimensions", "elements", "count", "bytes", "where")]
        for c in sorted(self.collectives, key=lambda c: -c.bytes * c.count):
            kind = c.kind if c.reduction in ("", "sum") else f"{c.kind} ({c.reduction})"
            count = f"{c.count:,}{'+' if c.at_least else ''}"
            rows.append(
                (kind, " ".join(c.mesh_dimensions), f"{c.elements:,}", count, f"{c.bytes * c.count:,}", c.where)
            )
        for axes, size in sorted(self.bytes_by_mesh_dimension().items()):
            rows.append(("total", " ".join(axes), f"{self.elements_by_mesh_dimension()[axes]:,}", "", f"{size:,}", ""))
        lines = [] if self.collectives else ["no communication"]
        if self.collectives:
            widths = [max(len(row[i]) for row in rows) for i in range(5)]
            for row in rows:
                left = [cell.ljust(w) for cell, w in zip(row[:2], widths[:2], strict=True)]
                right = [cell.rjust(w) for cell, w in zip(row[2:5], widths[2:], strict=True)]
                lines.append("  ".join([*left, *right, row[5]]).rstrip())
        lines.append(f"matrix products: {self.flops:,} FLOPs per processor{' at least' if self.at_least else ''}")
        return "\n".join(lines)


def ledger(function: Callable[..., Any], mesh: Mesh | AbstractMesh, layout: Layout | str, *arguments: Any) -> Ledger:
    """The ledger of the named program `function` on `mesh` under `layout`.

    `arguments` are those of the program, with arrays or `jax.ShapeDtypeStruct`s of global sizes. Raises LayoutError as
    `spmd` does.
    """
    return trace_ledger(spmd(function, mesh, layout), *arguments)


def trace_ledger(function: Callable[..., Any], *arguments: Any) -> Ledger:
    """The ledger of any function that contains `spmd` programs: a whole jitted training step with its optimizer, say.

    Matrix products outside `spmd` are counted whole, as if every processor did them.
    """
    return ledger_of(trace(function, *arguments))


def trace(function: Callable[..., Any], *arguments: Any) -> Jaxpr:
    """The program of `function` without what its results do not need; arguments may be shapes."""
    jaxpr = jax.make_jaxpr(lambda *a: function(*a))(*arguments).jaxpr
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def ledger_of(program: Jaxpr) -> Ledger:
    """The ledger of a program that `trace` made."""
    return _count(program, {}, "")


def _count(jaxpr: Jaxpr, mesh: Mapping[str, int], scope: str) -> Ledger:
    return Ledger.sum(_count_equation(equation, mesh, scope) for equation in jaxpr.eqns)


def _count_equation(equation: JaxprEqn, mesh: Mapping[str, int], outer: str) -> Ledger:
    name, params = equation.primitive.name, equation.params
    scope = "/".join(s for s in (outer, str(equation.source_info.name_stack)) if s)
    if name in _COLLECTIVES:
        return Ledger(tuple(_collectives(equation, mesh, scope)))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(_sizes(equation.invars[0])[i] for i in contracted)
        return Ledger(products=(_product(equation, depth, mesh, scope),))
    if name == "conv_general_dilated":
        kernel, features = _sizes(equation.invars[1]), params["dimension_numbers"].rhs_spec[0]
        depth = math.prod(kernel) // kernel[features]  # products that make one element; those with padding included
        return Ledger(products=(_product(equation, depth, mesh, scope),))
    if name == "shard_map":
        mesh = params["mesh"].shape
    inner = [_count(sub, mesh, scope) for sub in _jaxprs(params.values())]
    if name == "cond":
        return dearest(inner)
    if name == "scan":
        return Ledger.sum(inner).repeated(params["length"])
    if name == "while":
        return Ledger.sum(inner).repeated(None)
    return Ledger.sum(inner)


def dearest(branches: Iterable[Ledger]) -> Ledger:
    """Of alternatives, of which one will run, that which communicates most (then: computes most)."""
    return max(branches, key=lambda branch: (branch.total_bytes, branch.flops))


def _collectives(equation: JaxprEqn, mesh: Mapping[str, int], scope: str) -> Iterator[Collective]:
    name = equation.primitive.name
    kind, key = _COLLECTIVES[name]
    named = equation.params[key]
    named = set(named if isinstance(named, tuple) else (named,))
    axes = tuple(a for a in mesh if a in named and mesh[a] > 1)
    reduction = {"pmax": "max", "pmin": "min"}.get(name, "sum") if kind in ("allreduce", "reduce_scatter") else ""
    for x in equation.outvars if kind == "allgather" else equation.invars:
        if axes:
            yield Collective(kind, axes, math.prod(_sizes(x)), _size(x), 1, scope, reduction)


def _product(equation: JaxprEqn, depth: int, mesh: Mapping[str, int], scope: str) -> Product:
    operands, result = equation.invars, equation.outvars[0]
    shared = {a for x in operands for a in x.aval.manual_axis_type.varying} if mesh else set()  # pyright: ignore[reportAttributeAccessIssue]
    return Product(
        flops=2 * depth * math.prod(_sizes(result)),
        bytes=sum(_size(x) for x in (*operands, result)),
        dtype=max((str(_dtype(x)) for x in operands), key=lambda name: np.dtype(name).itemsize),
        count=1,
        scope=scope,
        mesh_dimensions=tuple(a for a in mesh if a in shared and mesh[a] > 1),
    )


def is_backward(scope: str) -> bool:
    """Whether a scope is of the backward pass."""
    return "transpose(" in scope


def in_words(scope: str) -> str:
    """A scope in words: `forward attention`, `backward feed_forward`, with the subscripts of a product left out."""
    names = [name for name in re.findall(r"[^()/]+", scope) if name not in ("jvp", "transpose", "jit")]
    names = [name for name in names if not re.fullmatch(r"[a-zA-Z,]*->[a-zA-Z]*", name)]
    way = ["backward"] if is_backward(scope) else ["forward"] if "jvp(" in scope else []
    return " ".join([*way, *names])


def _dtype(variable: Any) -> np.dtype:
    return np.dtype(variable.aval.dtype)


def _size(variable: Any) -> int:
    return math.prod(_sizes(variable)) * _dtype(variable).itemsize


def _sizes(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _jaxprs(params: Iterable[Any]) -> Iterator[Jaxpr]:
    """The programs inside an equation: bodies, branches, calls (derivative rules not yet applied are functions)."""
    for p in params:
        if isinstance(p, ClosedJaxpr):
            yield p.jaxpr
        elif isinstance(p, Jaxpr):
            yield p
        elif isinstance(p, tuple | list):
            yield from _jaxprs(p)


def _totals(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    totals: dict[Any, int] = {}
    for key, n in pairs:
        totals[key] = totals.get(key, 0) + n
    return totals
