"""The translation model under layouts: the numbers of one device, and the communication of the paper's analysis.

Tolerance as in test_invariance.
"""

import functools

import numpy as np
import pytest

from mtf_experiments import experiment, mtf
from mtf_experiments.models.translation import TranslationModelConfig
from mtf_experiments.mtf.ledger import trace_ledger
from mtf_experiments.planning.hlo import hlo_ledger
from tests.layouts import tiny
from tests.layouts.test_communication import local_elements

TOLERANCE = 1e-5
MODEL = "vocab:cols;d_ff:cols;heads:cols"
BOTH = f"batch:rows;{MODEL}"
LAYOUTS = {
    "data on 8": ("rows:8", "batch:rows"),
    "data x model on 2 x 4": ("rows:2;cols:4", BOTH),
    "sources over planes": ("rows:2;cols:2;planes:2", f"{BOTH};inputs_length:planes"),
}
CONFIG = TranslationModelConfig(**tiny.MODEL)
PAIRS = {
    **{
        name: tiny.ragged_rows(seed=1)[old]
        for name, old in {"sources": "targets", "source_segments": "segments", "source_positions": "positions"}.items()
    },
    **tiny.ragged_rows(),
}


def programs(mesh, layout, **changes):
    return tiny.programs(mesh, layout, config=CONFIG, inputs_length=tiny.LENGTH, label_smoothing=0.1, **changes)


@functools.cache
def results(mesh, layout, microbatches=1):
    made = programs(mesh, layout, microbatches=microbatches)
    state = made.initialise()
    return tiny.numpy(tiny.step(made, PAIRS, state)) | {"nll": tiny.nll(made, state.params, PAIRS)}


@pytest.fixture(scope="module")
def alone():
    return results("all:1", "")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing_but_the_placement(name, alone):
    split = results(*LAYOUTS[name])
    for parameter, values in alone["params"].items():
        np.testing.assert_array_equal(split["params"][parameter], values, err_msg=f"initial {parameter}")
    for metric in ("loss", "nll", "grad_norm"):
        tiny.close(split["metrics"][metric], alone["metrics"][metric], TOLERANCE, metric)
    tiny.trees_close(split["gradients"], alone["gradients"], TOLERANCE, "gradient of")
    tiny.trees_close(split["after"], alone["after"], TOLERANCE, "after one update,")
    tiny.close(split["nll"], alone["nll"], TOLERANCE, "evaluation")


def test_microbatches_change_nothing(alone):
    parts = results("all:1", "", 4)
    for metric in ("loss", "nll", "tokens"):
        tiny.close(parts["metrics"][metric], alone["metrics"][metric], TOLERANCE, metric)
    tiny.trees_close(parts["gradients"], alone["gradients"], TOLERANCE, "gradient of")


def test_smoothing_is_in_the_loss_that_is_minimised_alone(alone):
    metrics, tokens = alone["metrics"], (PAIRS["targets"] != 0).sum()
    assert metrics["tokens"] == tokens and abs(metrics["loss"] - metrics["nll"]) > 1e-3
    unsmoothed = tiny.programs("all:1", "", config=CONFIG, inputs_length=tiny.LENGTH)
    params = unsmoothed.initialise().params
    np.testing.assert_array_equal(tiny.nll(unsmoothed, params, PAIRS), alone["nll"])


def traced(made):
    return trace_ledger(made.gradient_program, *made.abstract_gradient_arguments())


def over_cols(layers, targets, sources, d_model):
    """Elements over the model's mesh dimension, from the analysis: each sublayer's output is summed forward, the gradient
    of its input backward. An encoder layer has two sublayers, a decoder layer three; besides, both embeddings forward, the
    softmax layer's input backward, once for all layers the gradient of the encoder's output; and of each target the maximum,
    the sum of exponentials, its logit, and the sum of logits for label smoothing.
    """
    return (6 * layers + 2) * targets * d_model + (4 * layers + 2) * sources * d_model + 4 * targets


def test_layers_communicate_what_the_analysis_says():
    made = programs("rows:4;cols:2", BOTH, abstract=True)
    tokens = tiny.ROWS // 4 * tiny.LENGTH
    assert traced(made).elements_by_mesh_dimension() == {
        ("cols",): over_cols(CONFIG.num_layers, tokens, tokens, CONFIG.d_model),
        ("rows",): local_elements(made) + 3,  # loss, its unsmoothed part, number of tokens
    }


def test_compiler_communicates_what_the_ledger_says():
    made = programs("rows:2;cols:4", BOTH)
    compiled = made.gradient_program.lower(*made.abstract_gradient_arguments()).compile()
    made_of, expected = hlo_ledger(compiled.as_text(), made.mesh_shape), traced(made)
    assert made_of.elements() == expected.elements() and made_of.flops == expected.flops


@pytest.mark.parametrize("size", ["0.15b", "0.42b", "2.89b"])
def test_shipped_translation_models_communicate_what_the_analysis_says(size):
    exp = experiment.load([f"wmt_enfr_{size}.gin"], [])
    made = exp.programs(mtf.abstract_mesh(exp.dry_mesh(None)))
    rows, cols = made.mesh_shape["rows"], made.mesh_shape["cols"]
    tokens = 128 // rows * 256
    expected = {("rows",): local_elements(made) + 3}
    if cols > 1:
        expected[("cols",)] = over_cols(6, tokens, tokens, 1024)
    ledger = traced(made)
    assert ledger.elements_by_mesh_dimension() == expected
    assert ledger.flops * rows * cols == exp.model.flops_per_row(exp.task.lengths) * 128
