"""A language model small enough to compile in a second or two, and packed rows for it.

Every dimension that a layout may split divides by eight; the vocabulary is padded (250 -> 256), rows are ragged.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mtf_experiments import mtf
from mtf_experiments.data.packing import fill_rows, pack_in_order
from mtf_experiments.models.language_model import LanguageModelConfig
from mtf_experiments.models.transformer import TransformerConfig
from mtf_experiments.training.feed import device_batch
from mtf_experiments.training.optimizers import Adafactor
from mtf_experiments.training.schedules import Constant
from mtf_experiments.training.step import Programs, StepSettings, TrainState

VOCAB, LENGTH, ROWS = 250, 16, 8
MODEL = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 8,
    "d_kv": 4,
    "num_layers": 2,
    "row_length": LENGTH,
    "attention_dropout": 0.2,
    "relu_dropout": 0.2,
    "residual_dropout": 0.2,
    "unroll": 1,
}
FACTORING = Adafactor(min_dim_size_to_factor=8)
"""Factors the moments of everything but the norm scales."""


def model(**changes: Any) -> LanguageModelConfig:
    return LanguageModelConfig(**(MODEL | changes))


def sentences(count: int, seed: int = 0, longest: int = LENGTH) -> list[list[int]]:
    """Sentences of 1 to `longest` tokens, each ending in 1 (EOS)."""
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, VOCAB, rng.integers(0, longest)).tolist(), 1] for _ in range(count)]


def packed(texts: list[list[int]], rows: int | None = None, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Sentences in order, as many as fit to a row; at the end empty rows, so that there are `rows`."""
    offsets = np.cumsum([0, *map(len, texts)])
    packing = pack_in_order(offsets, length)
    rows = len(packing) if rows is None else rows
    assert len(packing) <= rows, (len(packing), rows)
    numbers = np.where(np.arange(rows) < len(packing), np.arange(rows), -1)
    filled = fill_rows(packing, numbers, np.array([t for text in texts for t in text], np.int32))
    del filled["source"]
    return filled


def ragged_rows(rows: int = ROWS, empty: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows of very different fill, the last `empty` of them nothing but padding."""
    filled = packed(sentences(200, seed, longest=LENGTH // 2))
    chosen = {name: array[:rows].copy() for name, array in filled.items()}
    rng = np.random.default_rng(seed)
    for row in range(rows):
        keep = int(rng.integers(0, chosen["segments"][row].max())) + 1 if row < rows - empty else 0
        for array in chosen.values():
            array[row, filled["segments"][row] > keep] = 0
    return chosen


def mesh(text: str) -> jax.sharding.Mesh:
    shape = mtf.MeshShape(text)
    return mtf.make_mesh(shape, jax.devices()[: shape.processors])


def programs(
    mesh_shape: str,
    layout: str,
    *,
    config: TransformerConfig | None = None,
    rows: int = ROWS,
    microbatches: int = 1,
    label_smoothing: float = 0.0,
    seed: int = 7,
    schedule: Any = None,
    length: int = LENGTH,
    inputs_length: int | None = None,
    abstract: bool = False,
) -> Programs:
    """Everything of a run; `abstract`: on a mesh without devices, to be traced only."""
    lengths = {"length": length} | ({"inputs_length": inputs_length} if inputs_length else {})
    settings = StepSettings(rows, lengths, microbatches, seed, label_smoothing)
    on = mtf.abstract_mesh(mesh_shape) if abstract else mesh(mesh_shape)
    return Programs(config or model(), on, mtf.Layout(layout), FACTORING, schedule or Constant(0.05), settings)


def feed(made: Programs, rows: dict[str, np.ndarray], training: bool = False) -> dict[str, mtf.NamedTensor]:
    """The rows as a batch on the devices, of evaluation or of training."""
    shapes = made.train_shapes if training else made.eval_shapes(len(rows["targets"]))
    return device_batch(lambda wanted: {n: a[wanted] for n, a in rows.items()}, shapes, made.sharding)


def numpy(tree: Any) -> Any:
    """A pytree on the host, NamedTensors as plain arrays."""
    return jax.tree.map(
        np.asarray, jax.tree.map(lambda x: x.array if mtf.is_named(x) else x, tree, is_leaf=mtf.is_named)
    )


def step(made: Programs, rows: dict[str, np.ndarray], state: TrainState | None = None) -> dict[str, Any]:
    """What one update does: "params" before and "after" it, "gradients", "metrics"; in one compilation."""
    state = state or made.initialise()
    program = made.gradient_program

    def update(state: TrainState, batch: Any) -> Any:
        seen: list[Any] = []

        def spied(*arguments: Any) -> Any:
            seen.append(program(*arguments))
            return seen[0]

        made.gradient_program = spied
        try:
            after, metrics = made.update(state, batch)
        finally:
            made.gradient_program = program
        return {"after": after.params, "gradients": seen[0][0], "metrics": metrics}

    return {"params": state.params, **jax.jit(update)(state, feed(made, rows, training=True))}


def nll(made: Programs, params: Any, rows: dict[str, np.ndarray], scales: tuple[float, ...] = (1.0,)) -> np.ndarray:
    """NLL of every token without dropout, `[scales, rows, length]`."""
    return numpy(made.compiled_nll(scales)(params, feed(made, rows)))


def close(actual: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Equal within `tolerance` of the largest element: sums in another order round relative to what was summed."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    scale = max(np.abs(expected).max(initial=0.0), 1e-30)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale, err_msg=what)


def trees_close(actual: dict[str, Any], expected: dict[str, Any], tolerance: float, what: str = "") -> None:
    assert list(actual) == list(expected)
    for name in expected:
        close(actual[name], expected[name], tolerance, f"{what} {name}")
