"""Parameters: named tensors inside flax NNX modules, and as the flat dict that training and checkpoints work on."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from mtf_experiments import mtf

Parameters = dict[str, mtf.NamedTensor]
"""Path such as `decoder/attention/qkvo` -> tensor."""

ABSTRACT_KEY = jax.eval_shape(lambda: jax.random.key(0))
"""The shape of a random key, to trace initialisation with."""


def normal(random: mtf.Random, name: str, shape: list[mtf.Dimension], stddev: float) -> nnx.Param[mtf.NamedTensor]:
    """A parameter drawn from N(0, stddev²), f32, the same under every layout."""
    return nnx.Param(random.fold(name).normal(shape, stddev))


def split(module: nnx.Module) -> tuple[Any, Parameters]:
    """The structure of `module` and its parameters by path."""
    graphdef, state = nnx.split(module)
    return graphdef, {"/".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def merge(graphdef: Any, parameters: Parameters) -> Any:
    """The module of that structure with `parameters`."""
    return nnx.merge(graphdef, nnx.from_flat_state([(_path(k), nnx.Param(v)) for k, v in parameters.items()]))


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("/"))


def count(parameters: Parameters) -> int:
    """Number of elements of all parameters."""
    return sum(p.shape.elements for p in parameters.values())


def check_layout(parameters: Parameters, mesh: mtf.MeshShape, layout: mtf.Layout) -> None:
    """Raises LayoutError, naming the parameter, for the first that cannot be laid out."""
    for name, parameter in parameters.items():
        layout.check_shape(parameter.shape, mesh, name)


def abstract(parameters: Parameters) -> Parameters:
    """The parameters as shapes and types only."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), parameters)
