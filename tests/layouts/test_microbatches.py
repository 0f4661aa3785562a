"""Microbatches and the type of activations change memory and time, and the result not at all, or as stated."""

import functools

import numpy as np
import pytest

from tests.layouts import tiny
from tests.layouts.test_invariance import BOTH, ROWS

# As for layouts: f32 sums in another order.
TOLERANCE = 1e-5
ALONE = ("all:1", "")


@functools.cache
def results(mesh=ALONE[0], layout=ALONE[1], microbatches=1, label_smoothing=0.1, **model):
    made = tiny.programs(
        mesh, layout, config=tiny.model(**model), microbatches=microbatches, label_smoothing=label_smoothing
    )
    return tiny.numpy(tiny.step(made, ROWS))


def same(actual, expected):
    for metric in ("loss", "nll", "grad_norm"):
        tiny.close(actual["metrics"][metric], expected["metrics"][metric], TOLERANCE, metric)
    assert actual["metrics"]["tokens"] == expected["metrics"]["tokens"]
    assert actual["metrics"]["learning_rate"] == expected["metrics"]["learning_rate"]
    tiny.trees_close(actual["gradients"], expected["gradients"], TOLERANCE, "gradient of")
    tiny.trees_close(actual["after"], expected["after"], TOLERANCE, "after one update,")


@pytest.mark.parametrize(("mesh", "layout", "microbatches"), [(*ALONE, 4), (*ALONE, 8), ("rows:2;cols:2", BOTH, 2)])
def test_microbatches_of_unequal_numbers_of_tokens_weigh_by_tokens(mesh, layout, microbatches):
    # The last two of eight rows are padding: of four or eight microbatches, whole ones are. Rows hold 1 to 16 tokens.
    tokens = (ROWS["targets"] != 0).reshape(microbatches, -1).sum(axis=1)
    assert len(set(tokens)) > 1 and (tokens.min() == 0) == (microbatches >= 4)
    same(results(mesh, layout, microbatches), results())


def test_bfloat16_activations_stay_near_float32():
    # bf16 keeps 8 bits: each value rounds by up to 0.4 %; parameters, logits, loss and gradients are f32 all the same.
    half, full = results("rows:2;cols:2", BOTH, activations="bfloat16"), results()
    assert half["metrics"]["loss"].dtype == np.float32
    assert abs(half["metrics"]["loss"] - full["metrics"]["loss"]) < 0.01 * full["metrics"]["loss"]
    assert half["metrics"]["loss"] != full["metrics"]["loss"], "nothing was computed in bf16"
    for name, expected in full["gradients"].items():
        actual = half["gradients"][name]
        assert actual.dtype == half["after"][name].dtype == np.float32
        cosine = (actual * expected).sum() / np.sqrt((actual**2).sum() * (expected**2).sum())
        assert cosine > 0.995, (name, cosine)
        tiny.close(np.linalg.norm(actual), np.linalg.norm(expected), 0.03, name)
