"""What a training step of the language model communicates: the ledger of its gradient program against hand counts."""

import math
from collections import Counter

import pytest

from mtf_experiments import experiment, mtf
from mtf_experiments.models import parameters
from mtf_experiments.mtf.ledger import trace_ledger
from mtf_experiments.planning.hlo import hlo_ledger
from tests.layouts import tiny

LAYOUT = "batch:rows;vocab:cols;d_ff:cols;heads:cols"
MESH = "rows:4;cols:2"
# Of [batch, length, d_model], a processor holds its rows' share. No other tensor of the model has so many elements.
ACTIVATION = tiny.ROWS // 4 * tiny.LENGTH * tiny.MODEL["d_model"]


def traced(layers=2, mesh=MESH, layout=LAYOUT, microbatches=1, rows=tiny.ROWS, **model):
    config = tiny.model(num_layers=layers, **model)
    made = tiny.programs(mesh, layout, config=config, microbatches=microbatches, rows=rows, abstract=True)
    return made, trace_ledger(made.gradient_program, *made.abstract_gradient_arguments())


def allreduces(ledger, elements, axes):
    """How many allreduces of that many elements over `axes`, (forward, backward)."""
    found = Counter()
    for c in ledger.collectives:
        if (c.kind, c.elements, c.mesh_dimensions, c.reduction) == ("allreduce", elements, axes, "sum"):
            found[c.backward] += c.count
    return found[False], found[True]


@pytest.mark.parametrize("unroll", [0, 1])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_each_layer_allreduces_activations_twice_forward_and_twice_backward(layers, unroll):
    # Section 5 of the paper: the sums over heads and over d_ff, and their mirror images. Besides, once: the embedding's
    # sum over the vocabulary forward, and the softmax layer's backward.
    _, ledger = traced(layers, unroll=unroll)
    assert allreduces(ledger, ACTIVATION, ("cols",)) == (2 * layers + 1, 2 * layers + 1)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_over_cols_travel_activations_and_three_numbers_a_token(microbatches):
    _, ledger = traced(2, microbatches=microbatches)
    # The cross-entropy: the maximum, the sum of exponentials and the logit of the label.
    tokens = tiny.ROWS // 4 * tiny.LENGTH
    assert ledger.elements_by_mesh_dimension()[("cols",)] == (4 * 2 + 2) * ACTIVATION + 3 * tokens


def local_elements(made):
    return sum(math.prod(made.layout.local_sizes(p.shape, made.mesh_shape)) for p in made.params.values())


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(("mesh", "layout"), [("rows:4;cols:2", LAYOUT), ("rows:4", "batch:rows")])
def test_gradients_are_summed_over_rows_once_a_step_whatever_the_microbatches(mesh, layout, microbatches):
    made, ledger = traced(mesh=mesh, layout=layout, microbatches=microbatches, rows=16)
    # Besides: the number of tokens, and each microbatch's loss.
    assert ledger.elements_by_mesh_dimension()[("rows",)] == local_elements(made) + 1 + microbatches


def test_one_processor_and_an_empty_layout_communicate_nothing():
    for mesh, layout in (("rows:1;cols:1", LAYOUT), ("all:8", "")):
        assert traced(mesh=mesh, layout=layout)[1].collectives == ()


def test_model_parallelism_alone_does_not_sum_gradients():
    _, ledger = traced(mesh="cols:2", layout="vocab:cols;d_ff:cols;heads:cols")
    tokens = tiny.ROWS * tiny.LENGTH
    assert ledger.elements_by_mesh_dimension() == {("cols",): 10 * 4 * ACTIVATION + 3 * tokens}


@pytest.mark.parametrize("layers", [2, 3])
def test_remat_repeats_allreduces_unless_it_keeps_what_was_communicated(layers):
    _, none = traced(layers)
    _, kept = traced(layers, remat="communication")
    _, full = traced(layers, remat="full")
    assert kept.elements() == none.elements()
    # Of a layer's two forward allreduces one is repeated: the other makes the layer's output, which nobody needs again.
    more = full.elements_by_mesh_dimension()[("cols",)] - none.elements_by_mesh_dimension()[("cols",)]
    assert more == layers * ACTIVATION
    assert full.flops > kept.flops > none.flops


@pytest.mark.parametrize(
    ("mesh", "layout"), [("rows:2;cols:4", LAYOUT), ("rows:2;cols:2;planes:2", f"{LAYOUT};d_model:planes")]
)
def test_compiler_communicates_what_the_ledger_says(mesh, layout):
    # One microbatch; layers are looped over, so that a loop's steps are counted as well.
    made = tiny.programs(mesh, layout)
    arguments = made.abstract_gradient_arguments()
    compiled = made.gradient_program.lower(*arguments).compile()
    made_of = hlo_ledger(compiled.as_text(), made.mesh_shape)
    expected = trace_ledger(made.gradient_program, *arguments)
    assert made_of.elements() == expected.elements()
    assert made_of.flops == expected.flops


# Table 2 of the paper, parameters in billions; from row to row d_ff and the number of heads double.
TABLE_2 = {"0.14b": 0.14, "0.22b": 0.22, "0.37b": 0.37, "0.67b": 0.67, "1.28b": 1.28, "2.48b": 2.48, "4.9b": 4.90}


@pytest.mark.parametrize("size", TABLE_2)
def test_shipped_language_models_have_the_parameters_and_the_communication_of_the_paper(size):
    exp = experiment.load([f"lm_{size}.gin"], [])
    made = exp.programs(mtf.abstract_mesh(exp.dry_mesh(None)))
    heads = 4 * 2 ** list(TABLE_2).index(size)
    # Embedding, softmax and positions; in each of six layers q, k, v, o and the two feed-forward matrices; norm scales.
    count = 2 * 32768 * 1024 + 256 * 1024 + 6 * (4 * heads * 256 * 1024 + 2 * 1024 * 1024 * heads) + 13 * 1024
    assert parameters.count(made.params) == count
    assert round(count / 1e9, 2) == TABLE_2[size]
    rows, cols = made.mesh_shape["rows"], made.mesh_shape["cols"]
    tokens = 256 // rows * 256
    expected = {("rows",): local_elements(made) + 2}
    if cols > 1:
        expected[("cols",)] = (4 * 6 + 2) * tokens * 1024 + 3 * tokens
    ledger = trace_ledger(made.gradient_program, *made.abstract_gradient_arguments())
    assert ledger.elements_by_mesh_dimension() == expected
    # 6 FLOPs for each weight of a matrix product and token; attention's products are not divided further.
    assert ledger.flops * rows * cols == exp.model.flops_per_row({"length": 256}) * 256
