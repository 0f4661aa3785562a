"""The paper's example of layouts: two fully connected layers, and how they may be split (paper, Table 1)."""

from __future__ import annotations

import jax

from mtf_experiments import mtf

Params = dict[str, mtf.NamedTensor]

EMPTY = ""
DATA_PARALLEL = "batch:all"
MODEL_PARALLEL = "hidden:all"
MIXED = "batch:rows;hidden:cols"
THREE_DIMENSIONAL = "batch:rows;hidden:cols;io:planes"
LAYOUTS = {
    "none": EMPTY,
    "data parallel": DATA_PARALLEL,
    "model parallel": MODEL_PARALLEL,
    "data and model parallel": MIXED,
    "three-dimensional": THREE_DIMENSIONAL,
}
"""The layouts of Table 1, for meshes whose dimensions are `all`, `rows` and `cols`, or `rows`, `cols` and `planes`."""


def shapes(batch: int, io: int, hidden: int) -> dict[str, mtf.Shape]:
    """The shapes of all tensors of the example, activations `h` and `y` included, by name."""
    b, d, h = mtf.Dimension("batch", batch), mtf.Dimension("io", io), mtf.Dimension("hidden", hidden)
    named = {"x": [b, d], "w": [d, h], "bias": [h], "h": [b, h], "v": [h, d], "y": [b, d], "targets": [b, d]}
    return {name: mtf.Shape(dimensions) for name, dimensions in named.items()}


def two_layers(params: Params, x: mtf.NamedTensor) -> mtf.NamedTensor:
    """`relu(x w + bias) v` of `x` `[batch, io]`, again `[batch, io]`.

    `params`: w `[io, hidden]`, bias `[hidden]`, v `[hidden, io]`.
    """
    batch, io, hidden = x.shape.find("batch"), x.shape.find("io"), params["w"].shape.find("hidden")
    h = mtf.relu(mtf.einsum([x, params["w"]], [batch, hidden]) + params["bias"])
    return mtf.einsum([h, params["v"]], [batch, io])


def loss(params: Params, x: mtf.NamedTensor, targets: mtf.NamedTensor) -> mtf.NamedTensor:
    """Mean over all elements of the squared difference of `two_layers` and `targets` `[batch, io]`. A scalar."""
    return mtf.reduce_mean(mtf.square(two_layers(params, x) - targets))


def loss_and_gradients(
    params: Params, x: mtf.NamedTensor, targets: mtf.NamedTensor
) -> tuple[mtf.NamedTensor, Params, mtf.NamedTensor]:
    """The loss, its gradient by `params` and, as a layer inside a deeper network would need, its gradient by `x`."""

    def scalar(params: Params, x: mtf.NamedTensor) -> tuple[jax.Array, mtf.NamedTensor]:
        value = loss(params, x, targets)
        return value.array, value

    (_, value), (by_params, by_x) = jax.value_and_grad(scalar, (0, 1), has_aux=True)(params, x)
    return value, by_params, by_x


def training_step(
    params: Params, x: mtf.NamedTensor, targets: mtf.NamedTensor, learning_rate: float = 0.1
) -> tuple[mtf.NamedTensor, Params]:
    """The loss and the parameters after one step of gradient descent on one batch."""

    def scalar(params: Params) -> tuple[jax.Array, mtf.NamedTensor]:
        value = loss(params, x, targets)
        return value.array, value

    (_, value), gradients = jax.value_and_grad(scalar, has_aux=True)(params)
    return value, {name: params[name] - gradients[name] * learning_rate for name in params}
