"""What every test of the language needs: meshes of virtual devices, reference gradients, counted collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtf_experiments import mtf

KINDS = {
    "psum_invariant": "allreduce",
    "psum": "allreduce",
    "pmax": "allreduce max",
    "pmin": "allreduce min",
    "all_gather_invariant": "allgather",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "exchange",
}


def mesh_of(text: str) -> jax.sharding.Mesh:
    """A mesh over as many of the virtual devices as its sizes ask for."""
    shape = mtf.MeshShape(text)
    return mtf.make_mesh(shape, jax.devices()[: shape.processors])


def dims(text: str) -> list[mtf.Dimension]:
    """`"batch:4 io:6"` as dimensions."""
    return [mtf.Dimension(n, int(s)) for n, s in (item.split(":") for item in text.split())]


def tensor(shape: Sequence[mtf.Dimension] | str, seed: int = 0, scale: float = 1.0) -> mtf.NamedTensor:
    """Normal numbers, rounded so that no two ways to sum them are far apart in f32."""
    shape = dims(shape) if isinstance(shape, str) else list(shape)
    values = np.random.default_rng(seed).normal(size=[d.size for d in shape]) * scale
    return mtf.NamedTensor(np.round(values, 3).astype(np.float32), shape)


def integers(shape: Sequence[mtf.Dimension] | str, high: int, seed: int = 0, low: int = 0) -> mtf.NamedTensor:
    shape = dims(shape) if isinstance(shape, str) else list(shape)
    values = np.random.default_rng(seed).integers(low, high, size=[d.size for d in shape])
    return mtf.NamedTensor(values.astype(np.int32), shape)


def run(function: Callable[..., Any], mesh: str, layout: str, *arguments: Any) -> Any:
    return mtf.spmd(function, mesh_of(mesh), layout)(*arguments)


def collectives(function: Callable[..., Any], mesh: str, layout: str, *arguments: Any) -> Counter[str]:
    """How often each collective stands in the traced program. Needs no devices."""
    traced = jax.make_jaxpr(mtf.spmd(function, mtf.abstract_mesh(mesh), layout))(*arguments)
    return count(traced.jaxpr)


def count(jaxpr: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name in KINDS:
            found[KINDS[equation.primitive.name]] += 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += count(inner)
    return found


def weighted(function: Callable[..., mtf.NamedTensor], *arguments: Any) -> tuple[mtf.NamedTensor, list[Any]]:
    """Value of `function` and the gradients, for its floating arguments, of the value's sum weighted by 1, 2, 3, ..."""
    floating = [i for i, a in enumerate(arguments) if jnp.issubdtype(a.dtype, jnp.floating)]

    def loss(inputs: list[mtf.NamedTensor]) -> tuple[jax.Array, mtf.NamedTensor]:
        filled = list(arguments)
        for i, x in zip(floating, inputs, strict=True):
            filled[i] = x
        y = function(*filled)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            return jnp.zeros(()), y
        total = mtf.NamedTensor(jnp.asarray(1.0), [])
        for d in y.shape:  # weights that differ along every dimension, counted in the whole tensor
            total = mtf.multiply(total, mtf.arange(d, jnp.float32) + 1.0, output_shape=[*total.shape, d])
        return mtf.reduce_sum(y * total * (1.0 / max(y.shape.elements, 1))).array, y

    gradients, y = jax.grad(loss, has_aux=True)([arguments[i] for i in floating])
    return y, gradients


def weights(sizes: Sequence[int]) -> np.ndarray:
    """The weights of `weighted`, as one array."""
    total = np.ones([1] * len(sizes))
    for i, size in enumerate(sizes):
        total = total * (np.arange(size) + 1.0).reshape([-1 if j == i else 1 for j in range(len(sizes))])
    return np.broadcast_to(total, sizes) / max(total.size, 1)


def close(actual: Any, expected: Any, tolerance: float = 2e-5, what: str = "") -> None:
    actual, expected = (np.asarray(getattr(x, "array", x), np.float64) for x in (actual, expected))
    scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1.0)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale, err_msg=what)


def check(
    function: Callable[..., mtf.NamedTensor],
    reference: Callable[..., Any],
    arguments: Sequence[mtf.NamedTensor],
    cases: Sequence[tuple[str, str]],
    tolerance: float = 2e-5,
    outside: bool = False,
) -> None:
    """Value and gradients of `function` equal `reference` (plain arrays) on one device and in each (mesh, layout).

    Gradients are taken inside the program and, where `outside` is true, also through the first case's from outside.
    """
    floating = [i for i, a in enumerate(arguments) if jnp.issubdtype(a.dtype, jnp.floating)]

    def filled(inputs: Sequence[Any], full: Sequence[Any]) -> list[Any]:
        return [inputs[floating.index(i)] if i in floating else full[i] for i in range(len(full))]

    def expect(*arrays: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        def scalar(inputs: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            y = jnp.asarray(reference(*filled(inputs, arrays)))
            return (jnp.sum(y * weights(y.shape)) if jnp.issubdtype(y.dtype, jnp.floating) else jnp.zeros(())), y

        slopes, y = jax.grad(scalar, has_aux=True)([arrays[i] for i in floating])
        return y, slopes

    def compare(y: mtf.NamedTensor, gradients: list[mtf.NamedTensor], what: str) -> None:
        assert y.array.shape == expected.shape, what
        close(y, expected, tolerance, f"value, {what}")
        for i, gradient, slope in zip(floating, gradients, slopes, strict=True):
            close(gradient, slope, tolerance, f"gradient {i}, {what}")

    both = jax.jit(lambda *a: (expect(*(x.array for x in a)), weighted(function, *a)))
    (expected, slopes), alone = both(*arguments)
    compare(*alone, "one device")
    for mesh, layout in cases:
        compare(*run(lambda *a: weighted(function, *a), mesh, layout, *arguments), f"{layout} on {mesh}")
    if outside:
        mesh, layout = cases[0]
        program = mtf.spmd(function, mesh_of(mesh), layout)

        def whole(inputs: list[mtf.NamedTensor]) -> tuple[jax.Array, mtf.NamedTensor]:
            y = program(*filled(inputs, arguments))
            return jnp.sum(y.array * weights(y.array.shape)), y

        gradients, y = jax.jit(jax.grad(whole, has_aux=True))([arguments[i] for i in floating])
        compare(y, gradients, f"from outside, {layout} on {mesh}")
