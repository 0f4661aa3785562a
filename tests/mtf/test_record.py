"""The record of a program: its operations, in order, with the tensors that go from one to the next."""

import jax
import jax.numpy as jnp
import pytest

from mtf_experiments import mtf
from tests.layouts import tiny

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 16), mtf.Dimension("c", 32)
LAYERS = mtf.Dimension("layers", 5)


def abstract(*dimensions, dtype=jnp.float32):
    return mtf.NamedTensor(jax.ShapeDtypeStruct(tuple(d.size for d in dimensions), dtype), dimensions)


def test_operations_are_linked_by_the_tensors_between_them():
    def program(x, w):
        with jax.named_scope("first"):
            h = mtf.relu(mtf.einsum([x, w], [A, C]))
        return mtf.reduce_sum(h, "c")

    found = mtf.record(program, abstract(A, B), abstract(B, C))
    einsum, relu, total = found.operations
    assert [einsum.name, relu.name, total.name] == ["einsum", "apply", "reduce_sum"]
    assert list(einsum.inputs) == found.arguments and relu.inputs == einsum.outputs and total.inputs == relu.outputs
    assert einsum.scope == "first" and total.scope == ""
    assert [found.tensors[i].shape.names for i in total.outputs] == [("a",)]
    assert [t.argument for t in found.tensors] == [True, True, False, False, False]


def test_what_an_operation_calls_inside_is_its_own():
    found = mtf.record(lambda x: mtf.softmax(mtf.dropout(x, 0.1, mtf.Random(jax.random.key(0))), "b"), abstract(A, B))
    assert [op.name for op in found.operations] == ["dropout", "softmax"]


def test_a_loop_is_recorded_once_and_counts_its_steps():
    def program(x, weights):
        def layer(x, w):
            return mtf.einsum([mtf.einsum([x, w], [A, C]), w], [A, B]), None

        x, _ = mtf.scan(layer, x, weights, LAYERS)
        return mtf.reduce_sum(x)

    found = mtf.record(program, abstract(A, B), abstract(LAYERS, B, C))
    assert [(op.name, op.repeats) for op in found.operations] == [
        ("slice_of_loop", 5),
        ("einsum", 5),
        ("einsum", 5),
        ("reduce_sum", 1),
    ]
    piece, first, second, total = found.operations
    assert first.inputs == (found.arguments[0], *piece.outputs) and second.inputs == (*first.outputs, *piece.outputs)
    assert total.inputs == (found.arguments[0],)  # what is carried is one tensor, before, in and after the loop


def test_a_cast_of_a_type_to_itself_is_no_operation():
    found = mtf.record(lambda x: x.astype(jnp.float32).astype(jnp.bfloat16) + 1, abstract(A))
    assert [op.name for op in found.operations] == ["astype", "apply"]
    assert found.tensors[found.operations[0].outputs[0]].dtype == jnp.bfloat16


@pytest.mark.parametrize("layers", [1, 3])
def test_the_record_of_a_training_loss_knows_all_parameters(layers):
    made = tiny.programs("all:1", "", config=tiny.model(num_layers=layers), abstract=True)
    found = made.record()
    parameters = found.arguments[: len(made.params)]
    assert [found.tensors[i].shape for i in parameters] == [made.params[n].shape for n in sorted(made.params)]
    read = {i for op in found.operations for i in op.inputs}
    assert set(parameters) <= read
    assert {t.shape.elements for t in found.tensors if t.argument} - {
        found.tensors[i].shape.elements for i in found.arguments
    } <= {1}
    einsums = [op for op in found.operations if op.name == "einsum"]
    assert (
        sum(op.repeats for op in einsums) == 8 * layers + 1
    )  # q, k, v, logits, sums, o, wi, wo; and the softmax layer


def test_recording_leaves_no_trace_behind():
    mtf.record(lambda x: x + 1, abstract(A))
    assert mtf.placement().recorder is None
