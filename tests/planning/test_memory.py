"""What a program holds and moves: counted by hand on small programs, and against a compiler on whole training steps."""

import jax
import jax.numpy as jnp
import pytest

from mtf_experiments import mtf
from mtf_experiments.planning import compilers
from mtf_experiments.planning.forecast import forecast
from mtf_experiments.planning.memory import footprint
from tests.layouts import tiny

A, B, C, D = mtf.Dimension("a", 8), mtf.Dimension("b", 16), mtf.Dimension("c", 32), mtf.Dimension("d", 4)
LAYERS = mtf.Dimension("layers", 5)
PAPER = "batch:rows;vocab:cols;d_ff:cols;heads:cols"


def abstract(*dimensions):
    return mtf.NamedTensor(jax.ShapeDtypeStruct(tuple(d.size for d in dimensions), jnp.float32), dimensions)


def of(function, *arguments, mesh="all:1", layout=""):
    return footprint(mtf.spmd(function, mtf.abstract_mesh(mesh), layout), *arguments)


def test_a_chain_of_products_holds_two_of_its_results_at_once():
    def chain(x, v, w):
        return mtf.einsum([mtf.einsum([x, v], [A, C]), w], [A, D])

    # [a c], then [a d] beside it; the arguments are not counted.
    assert of(chain, abstract(A, B), abstract(B, C), abstract(C, D)).peak == 4 * (8 * 32 + 8 * 4)


def test_component_wise_results_are_not_stored_unless_a_product_reads_them():
    def summed(x):
        return mtf.reduce_sum(mtf.exp(x * 2) + 1)

    def multiplied(x, v):
        return mtf.einsum([mtf.exp(x * 2) + 1, v], [A, C])

    assert of(summed, abstract(A, B)).peak == 4
    assert of(multiplied, abstract(A, B), abstract(B, C)).peak == 4 * (8 * 16 + 8 * 32)


def test_a_component_wise_operation_writes_over_an_operand_that_dies():
    def program(x, v):
        return mtf.relu(mtf.einsum([x, v], [A, C]))

    def kept(x, v):
        y = mtf.einsum([x, v], [A, C])
        return mtf.relu(y), y

    x, v = abstract(A, B), abstract(B, C)
    assert of(program, x, v).peak == 4 * 8 * 32
    assert of(kept, x, v).peak == 2 * 4 * 8 * 32


def test_slices_count_not_whole_tensors():
    def program(x, v):
        return mtf.einsum([x, v], [A, C])

    x, v = abstract(A, B), abstract(B, C)
    assert of(program, x, v, mesh="rows:4;cols:2", layout="a:rows;c:cols").peak == 4 * 8 * 32 // 8
    # A sum over processors needs what goes in and what comes out.
    assert of(program, x, v, mesh="rows:4", layout="b:rows").peak == 2 * 4 * 8 * 32


def test_a_loop_keeps_its_stacks_from_start_to_last_use():
    def program(x, weights):
        def layer(x, w):
            y = mtf.einsum([x, w], [A, C])
            return mtf.einsum([y, w], [A, B]), y

        return mtf.scan(layer, x, weights, LAYERS)

    found = of(program, abstract(A, B), abstract(LAYERS, B, C))
    carry, stack = 4 * 8 * 16, 4 * 5 * 8 * 32
    inside = 4 * (16 * 32 + 8 * 32 + 8 * 16)  # a slice of the weights, y, and what is carried on
    assert found.peak == carry + stack + inside
    assert found.stacks == 4 * 5 * 16 * 32


def test_traffic_is_what_is_read_and_written_besides_products():
    def program(x):
        return mtf.reduce_sum(mtf.exp(x) * x, "b")

    assert of(program, abstract(A, B)).traffic == 4 * (8 * 16 + 8)

    def product(x, v):
        return mtf.einsum([x, v], [A, C])

    assert of(product, abstract(A, B), abstract(B, C)).traffic == 0


def test_rematerialisation_and_microbatches_hold_less():
    def held(microbatches=1, **model):
        config = tiny.model(**{"num_layers": 6, "unroll": 1} | model)
        made = tiny.programs("rows:2;cols:2", PAPER, config=config, microbatches=microbatches, rows=16, abstract=True)
        return forecast(made).activation_bytes

    assert held(remat="full") < held(remat="communication") < held() and held(4) < held(2) < held()


# Wide enough that activations outweigh what an optimizer step holds; few rows on a processor, as at scale.
BIG = {"d_model": 128, "d_ff": 1024, "num_heads": 8, "d_kv": 32, "num_layers": 4, "row_length": 64}


@pytest.mark.parametrize("layout", [PAPER, "batch:rows;d_ff:cols"])
def test_prediction_is_within_15_percent_of_what_the_cpu_compiler_holds(layout):
    config = tiny.model(**BIG)

    def programs(mesh):
        return tiny.programs(f"{mtf.mesh_shape_of(mesh)}", layout, config=config, rows=64, length=64)

    mesh = mtf.MeshShape("rows:2;cols:4")
    compiled = compilers.compile_step(programs, "cpu", mesh)
    predicted = forecast(programs(mtf.abstract_mesh(mesh)))
    assert compiled.argument_bytes == predicted.argument_bytes
    assert compiled.temporary_bytes == pytest.approx(predicted.temporary_bytes("cpu"), rel=0.15)
