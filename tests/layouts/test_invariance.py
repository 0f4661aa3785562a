"""The layout decides where things are computed, never what: one training step and evaluation are those of one device.

Tolerance: 1e-5 of the largest element of each tensor. Everything is f32 (relative rounding 6e-8); a sum of n terms in
another order differs by about sqrt(n) roundings, and n is at most a few thousand here. Whatever does not round (initial
parameters, counts, dropout's noise) is equal to the last bit.
"""

import functools

import jax
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.models import parameters
from mtf_experiments.models.loss import token_nll
from tests.layouts import tiny

TOLERANCE = 1e-5
MODEL = "vocab:cols;d_ff:cols;heads:cols"
BOTH = f"batch:rows;{MODEL}"
LAYOUTS = {
    "empty on 8": ("all:8", ""),
    "data on 2": ("rows:2", "batch:rows"),
    "model on 4": ("cols:4", MODEL),
    "data x model on 2 x 4": ("rows:2;cols:4", BOTH),
    "data x model on 8 x 1": ("rows:8;cols:1", BOTH),
    "d_model over planes": ("rows:2;cols:2;planes:2", f"{BOTH};d_model:planes"),
    "length over planes": ("rows:2;cols:2;planes:2", f"{BOTH};length:planes"),
    "memory length and d_kv": ("cols:2;planes:4", "memory_length:cols;d_kv:planes;vocab:planes;positions:cols"),
}
ROWS = tiny.ragged_rows()
SCALES = (1.0, 0.9)


@functools.cache
def results(mesh, layout):
    """Everything about one layout, computed once."""
    made = tiny.programs(mesh, layout)
    state = made.initialise()
    step = tiny.step(made, ROWS, state)
    drifted = [
        parameter
        for parameter, tensor in step["after"].items()
        if any(not np.array_equal(*pair) for pair in _replicas(tensor.array))
    ]
    return tiny.numpy(step) | {
        "nll": tiny.nll(made, state.params, ROWS, SCALES),
        "parameters whose replicas differ": drifted,
    }


def _replicas(array):
    """Pairs of copies of one slice on different processors."""
    first = {}
    for shard in array.addressable_shards:
        data = np.asarray(shard.data)
        yield first.setdefault(str(shard.index), data), data


@pytest.fixture(scope="module")
def alone():
    return results("all:1", "")


def test_the_step_that_is_compared_is_one_in_which_everything_matters(alone):
    assert all(np.abs(g).max() > 1e-4 for g in alone["gradients"].values())
    assert all(np.abs(after - before).max() > 1e-3 for after, before in _pairs(alone))
    assert alone["metrics"]["tokens"] == (ROWS["targets"] != 0).sum()
    # Dropout is on: the loss is far from the evaluation of the same rows.
    assert abs(alone["metrics"]["nll"] - alone["nll"][0].sum() / alone["metrics"]["tokens"]) > 0.01
    assert 0 in ROWS["segments"].max(axis=1) and ROWS["segments"].max() > 1


def _pairs(result):
    return [(result["after"][name], result["params"][name]) for name in result["params"]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing_but_the_placement(name, alone):
    split = results(*LAYOUTS[name])
    for parameter, values in alone["params"].items():
        np.testing.assert_array_equal(split["params"][parameter], values, err_msg=f"initial {parameter}")
    assert split["metrics"]["tokens"] == alone["metrics"]["tokens"]
    for metric in ("loss", "nll", "grad_norm"):
        tiny.close(split["metrics"][metric], alone["metrics"][metric], TOLERANCE, metric)
    tiny.trees_close(split["gradients"], alone["gradients"], TOLERANCE, "gradient of")
    tiny.trees_close(split["after"], alone["after"], TOLERANCE, "after one update,")
    tiny.close(split["nll"], alone["nll"], TOLERANCE, "evaluation")
    # Each processor updates its own copy: one that missed an allreduce would drift away from the others unseen.
    assert split["parameters whose replicas differ"] == []


@functools.cache
def noisy_nll(mesh, layout):
    """NLL with dropout of eight rows that are all the same, `[batch, length]`."""
    made = tiny.programs(mesh, layout)
    same = {name: np.repeat(array[:1], tiny.ROWS, axis=0) for name, array in ROWS.items()}

    def program(params, batch, key):
        return token_nll(parameters.merge(made.structure, params)(batch, mtf.Random(key)), batch["targets"])

    nll = mtf.spmd(program, made.mesh, made.layout)
    return tiny.numpy(nll(made.initialise().params, tiny.feed(made, same), jax.random.key(1)))


@pytest.mark.parametrize(("mesh", "layout"), [LAYOUTS["data x model on 8 x 1"], LAYOUTS["data x model on 2 x 4"]])
def test_dropout_is_neither_repeated_on_processors_nor_different_between_replicas(mesh, layout):
    whole, split = noisy_nll("all:1", ""), noisy_nll(mesh, layout)
    tiny.close(split, whole, TOLERANCE)
    totals = np.sort(split.sum(axis=1))
    assert np.diff(totals).min() > 1e-3, "two equal rows were given the same noise"
