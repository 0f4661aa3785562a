"""The ledger of small programs, whose communication is counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mtf_experiments import mtf
from mtf_experiments.mtf.ledger import KINDS

BATCH, IO, HIDDEN = mtf.Dimension("batch", 16), mtf.Dimension("io", 24), mtf.Dimension("hidden", 40)
STEPS = mtf.Dimension("steps", 5)


def abstract(*dimensions, dtype=jnp.float32):
    return mtf.NamedTensor(jax.ShapeDtypeStruct(tuple(d.size for d in dimensions), dtype), dimensions)


X = abstract(BATCH, IO)


def ledger_of(function, mesh, layout, *arguments):
    return mtf.ledger(function, mtf.abstract_mesh(mesh), layout, *arguments)


def sum_over_batch(x):
    return mtf.reduce_sum(x, "batch")


def product(x, w):
    return mtf.einsum([x, w], [BATCH, HIDDEN])


def reduce_scattered_product(x, w):
    return mtf.einsum([x, w], [BATCH, HIDDEN], rename={"hidden": "scattered"})


def gathered(x):
    return mtf.rename(x, io="whole")


def exchanged_layouts(x):
    return mtf.rename(x, batch="whole", io="split")


def shifted(x):
    return mtf.shift(x, 1, "batch")


def maximum(x):
    return mtf.reduce_max(x, "io")


@pytest.mark.parametrize(
    ("function", "layout", "kind", "axes", "elements"),
    [
        # On rows:2;cols:4. Operand: the result of a sum over batch, [io] over cols.
        (sum_over_batch, "batch:rows;io:cols", "allreduce", ("rows",), 24 // 4),
        (maximum, "batch:rows;io:cols", "allreduce", ("cols",), 16 // 2),
        # Operand: the whole product of slices, before it is scattered.
        (reduce_scattered_product, "io:cols;scattered:cols;batch:rows", "reduce_scatter", ("cols",), 16 // 2 * 40),
        # Result: the gathered tensor.
        (gathered, "batch:rows;io:cols", "allgather", ("cols",), 16 // 2 * 24),
        # Operand: the slice that goes out in parts.
        (exchanged_layouts, "batch:cols;split:cols", "alltoall", ("cols",), 16 // 4 * 24),
        # Operand: one row of [batch/rows, io/cols].
        (shifted, "batch:rows;io:cols", "exchange", ("rows",), 1 * 24 // 4),
    ],
)
def test_every_kind_of_collective_is_counted_per_processor(function, layout, kind, axes, elements):
    arguments = [X, abstract(IO, HIDDEN)] if function is reduce_scattered_product else [X]
    ledger = ledger_of(function, "rows:2;cols:4", layout, *arguments)
    (collective,) = ledger.collectives
    assert kind in KINDS
    assert (collective.kind, collective.mesh_dimensions, collective.elements) == (kind, axes, elements)
    assert (collective.count, collective.bytes) == (1, 4 * elements)
    assert ledger.by_kind() == {kind: elements}
    assert ledger.elements_by_mesh_dimension() == {axes: elements}


def test_maximum_and_sum_are_told_apart():
    assert ledger_of(maximum, "all:8", "io:all", X).collectives[0].reduction == "max"
    assert ledger_of(sum_over_batch, "all:8", "batch:all", X).collectives[0].reduction == "sum"


def test_sum_over_two_mesh_dimensions_at_once_is_charged_to_the_pair():
    ledger = ledger_of(mtf.reduce_sum, "rows:2;cols:4", "batch:rows;io:cols", X)
    assert ledger.elements_by_mesh_dimension() == {("rows", "cols"): 1}
    assert ledger.bytes_by_mesh_dimension() == {("rows", "cols"): 4}


def test_mesh_dimensions_of_size_one_communicate_nothing():
    assert ledger_of(mtf.reduce_sum, "rows:1;cols:4", "batch:rows;io:cols", X).elements_by_mesh_dimension() == {
        ("cols",): 1
    }
    assert ledger_of(sum_over_batch, "rows:1;cols:4", "batch:rows", X).collectives == ()


def test_bytes_are_those_of_the_type_that_travels():
    ledger = ledger_of(sum_over_batch, "all:8", "batch:all", abstract(BATCH, IO, dtype=jnp.bfloat16))
    assert ledger.total_elements == 24
    assert ledger.total_bytes == 2 * 24


def test_scan_multiplies_its_body_by_its_length():
    def program(x, w):
        def body(total, _):
            y = mtf.einsum([x * mtf.reduce_mean(total), w], [BATCH, HIDDEN])
            return total * 0.5 + mtf.reduce_sum(y, "batch"), None

        return mtf.scan(body, mtf.zeros([HIDDEN]), None, STEPS)[0]

    ledger = ledger_of(program, "all:8", "batch:all", X, abstract(IO, HIDDEN))
    assert [(c.elements, c.count) for c in ledger.collectives] == [(40, 5)]
    assert ledger.flops == 5 * 2 * (16 // 8) * 24 * 40


def test_scan_of_no_steps_costs_nothing():
    def program(x):
        return lax.scan(lambda c, _: (c + sum_over_batch(x).array, None), jnp.zeros(24), None, length=0)[0]

    assert ledger_of(program, "all:8", "batch:all", X) == mtf.Ledger()


def test_while_loop_is_counted_once_and_marked():
    def program(x):
        def body(total):
            return total + mtf.reduce_sum(x * mtf.NamedTensor(total, [])).array

        return lax.while_loop(lambda total: total < 100, body, jnp.ones(()))

    ledger = ledger_of(program, "all:8", "batch:all", X)
    assert [(c.elements, c.count, c.at_least) for c in ledger.collectives] == [(1, 1, True)]
    assert ledger.at_least
    assert "1+" in ledger.table() and "at least" in ledger.table()


def test_loop_without_communication_or_products_is_not_marked():
    def program(x):
        return lax.while_loop(lambda c: c < 10, lambda c: c + 1, jnp.zeros(())), sum_over_batch(x)

    assert not ledger_of(program, "all:8", "batch:all", X).at_least


def test_of_branches_the_dearest_is_counted():
    def program(x, p):
        def one():
            return sum_over_batch(x).array

        def two():
            return (sum_over_batch(mtf.square(x)) + sum_over_batch(mtf.exp(x))).array

        return lax.switch(p, [one, two, one])

    ledger = ledger_of(program, "all:8", "batch:all", X, jax.ShapeDtypeStruct((), jnp.int32))
    assert ledger.elements_by_mesh_dimension() == {("all",): 2 * 24}


def test_what_no_result_needs_is_not_counted():
    def program(x, w):
        product(x, w)
        mtf.reduce_sum(x)
        return mtf.scan(lambda c, _: (c, mtf.reduce_sum(x, "batch")), mtf.zeros([]), None, STEPS)[0]

    assert ledger_of(program, "all:8", "batch:all", X, abstract(IO, HIDDEN)) == mtf.Ledger()


def test_recomputed_forward_pass_counts_its_products_again_but_not_the_collective_it_does_not_need():
    w, v = abstract(IO, HIDDEN), abstract(HIDDEN, IO)

    def block(x, w, v):
        return mtf.einsum([mtf.tanh(product(x, w)), v], [BATCH, IO])

    def step(f):
        def program(x, w, v):
            return jax.grad(lambda w, v: mtf.reduce_sum(mtf.square(f(x, w, v))).array, (0, 1))(w, v)

        return ledger_of(program, "all:8", "hidden:all", X, w, v)

    plain, recomputed = step(block), step(jax.checkpoint(block))
    one_product = 2 * 16 * 24 * 40 // 8
    assert plain.flops == 5 * one_product
    assert recomputed.flops == 6 * one_product  # h again; y is not needed for the gradients
    assert recomputed.elements() == plain.elements() == {("allreduce", ("all",)): 16 * 24}


def test_convolution_is_counted_as_the_product_that_it_is():
    def program(x):
        image, kernel = jnp.zeros((2, 6, 9, 9)), jnp.zeros((10, 3, 5, 5))  # two groups of channels
        y = lax.conv_general_dilated(image, kernel, (1, 1), "VALID", feature_group_count=2)
        return y, sum_over_batch(x)

    # Each of the 2 x 10 x 5 x 5 outputs sums over 3 channels and 5 x 5 places.
    assert ledger_of(program, "all:8", "batch:all", X).flops == 2 * (2 * 10 * 5 * 5) * (3 * 5 * 5)


def test_batched_product_is_counted_in_slices():
    heads, d_k = mtf.Dimension("heads", 8), mtf.Dimension("d_k", 6)

    def program(q, k):
        return mtf.einsum([q, k], [heads, BATCH, HIDDEN])

    ledger = ledger_of(
        program, "rows:2;cols:4", "batch:rows;heads:cols", abstract(heads, BATCH, d_k), abstract(heads, HIDDEN, d_k)
    )
    assert ledger.flops == 2 * (8 // 4) * (16 // 2) * 40 * 6
    assert ledger.collectives == ()


def test_scope_names_where_and_backward_tells_the_pass():
    def program(x, w):
        def loss(w):
            with jax.named_scope("feed_forward"):
                y = mtf.einsum([x, w], [BATCH, HIDDEN])
            return mtf.reduce_sum(mtf.square(y)).array

        return jax.value_and_grad(loss)(w)

    ledger = ledger_of(program, "rows:2;cols:4", "batch:rows;io:cols", X, abstract(IO, HIDDEN))
    (forward,) = [c for c in ledger.collectives if c.mesh_dimensions == ("cols",)]
    (backward,) = [c for c in ledger.collectives if c.elements == 24 // 4 * 40]
    assert "feed_forward" in forward.scope and not forward.backward
    assert "feed_forward" in backward.scope and backward.backward


def test_whole_training_step_with_its_optimizer_is_traced():
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(1e-3)
    mesh = mtf.abstract_mesh("all:8")

    def gradients(w, x):
        return jax.grad(lambda w: mtf.reduce_sum(mtf.square(product(x, w))).array)(w)

    @jax.jit
    def step(w, state, x):
        updates, state = optimizer.update(mtf.spmd(gradients, mesh, "batch:all")(w, x), state)
        return optax.apply_updates(w, updates), state

    w = abstract(IO, HIDDEN)
    ledger = mtf.trace_ledger(step, w, jax.eval_shape(optimizer.init, w), X)
    assert ledger.elements_by_mesh_dimension() == {("all",): 24 * 40}


def test_program_without_communication_says_so():
    ledger = ledger_of(product, "all:8", "batch:all", X, abstract(IO, HIDDEN))
    assert ledger.table().split("\n") == [
        "no communication",
        f"matrix products: {2 * 2 * 24 * 40:,} FLOPs per processor",
    ]


def test_table_has_a_line_for_each_collective_dearest_first_and_totals():
    def program(x):
        return mtf.reduce_sum(x, "batch"), mtf.reduce_sum(x), mtf.reduce_max(x, "batch")

    lines = ledger_of(program, "rows:2;cols:4", "batch:rows;io:cols", X).table().split("\n")
    cells = [line.split() for line in lines]
    assert cells[0] == ["collective", "mesh", "dimensions", "elements", "count", "bytes", "where"]
    assert ["allreduce", "rows", "6", "1", "24"] in cells
    assert ["allreduce", "(max)", "rows", "6", "1", "24"] in cells
    assert cells[3] == ["allreduce", "rows", "cols", "1", "1", "4"]
    assert cells[4:6] == [["total", "rows", "12", "48"], ["total", "rows", "cols", "1", "4"]]


def test_illegal_layout_is_refused_before_anything_is_counted():
    with pytest.raises(mtf.LayoutError, match="io"):
        ledger_of(sum_over_batch, "all:16", "io:all", X)
