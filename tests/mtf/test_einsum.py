import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_experiments import mtf
from mtf_experiments.mtf import collective
from tests.mtf.helpers import check, close, collectives, count, dims, integers, mesh_of, run, tensor

B, L, D, F = dims("batch:4 length:2 d:8 f:8")
H, K = dims("heads:4 k:2")
CASES = [("rows:2;cols:2", "batch:rows;f:cols"), ("rows:2;cols:2", "d:rows;batch:cols")]


def test_products_and_their_gradients():
    x, w = tensor([B, L, D]), tensor([D, F], 1)
    check(
        lambda x, w: mtf.einsum([x, w], [L, B, F]),
        lambda x, w: jnp.einsum("bld,df->lbf", x, w),
        [x, w],
        [*CASES, ("a:2;b:2;c:2", "batch:a;f:b;d:c")],
        outside=True,
    )


def test_several_dimensions_contracted_over_several_mesh_dimensions():
    x, w = tensor([B, H, K]), tensor([D, K, H], 1)
    check(
        lambda x, w: mtf.einsum([x, w], [B, D]),
        lambda x, w: jnp.einsum("bhk,dkh->bd", x, w),
        [x, w],
        [("a:2;b:2", "heads:a;k:b")],
    )


def test_three_operands_and_one():
    x, y, w = tensor([B, D]), tensor([B], 1), tensor([D, F], 2)
    check(
        lambda x, y, w: mtf.einsum([x, y, w], [F]) + mtf.einsum([w], [F]),
        lambda x, y, w: jnp.einsum("bd,b,df->f", x, y, w) + w.sum(0),
        [x, y, w],
        CASES,
    )


def test_an_operand_that_is_the_same_on_all_processors_is_summed_once():
    """The contracted dimension is split, yet what is summed over it came out of a broadcast."""
    w = tensor([F])
    check(
        lambda w: mtf.einsum([mtf.broadcast(w, [D, F]), mtf.full([D], 2.0)], [F]),
        lambda w: w * 16,
        [w],
        [("rows:2;cols:2", "d:rows;f:cols")],
    )


@pytest.mark.parametrize("layout", ["hidden:rows", "hidden_out:rows", "batch:rows;hidden:cols", "batch:cols"])
def test_a_dense_layer_with_one_name_for_input_and_output_equals_numpy(layout):
    x, w = tensor("batch:4 hidden:8"), tensor("hidden:8 hidden_out:8", 1)
    output = dims("batch:4 hidden_out:8")
    layout += "" if "hidden_out" in layout else ";hidden_out?:rows" if "hidden" not in layout else ""

    def with_rename(x, w):
        return mtf.einsum([x, w], output, rename={"hidden_out": "hidden"})

    def rename_after(x, w):
        return mtf.rename(mtf.einsum([x, w], output), hidden_out="hidden")

    for program in (with_rename, rename_after):
        y = run(program, "rows:2;cols:2", layout, x, w)
        assert y.shape == x.shape
        close(y, np.asarray(x.array) @ np.asarray(w.array))


def test_a_partial_sum_wanted_split_over_one_mesh_dimension_and_whole_over_another():
    x, w = tensor("batch:4 hidden:8"), tensor("hidden:8 out:8", 1)
    check(
        lambda x, w: mtf.einsum([x, w], dims("batch:4 out:8"), rename={"out": "hidden"}),
        lambda x, w: x @ w,
        [x, w],
        [("rows:2;cols:2", "hidden:rows;batch:cols"), ("rows:2;cols:2", "hidden:cols")],
        outside=True,
    )


def test_what_products_communicate():
    x, w, out = tensor([B, D]), tensor([D, F]), [B, F]

    def product(x, w):
        return mtf.einsum([x, w], out)

    def found(layout, program=product):
        return collectives(program, "rows:2;cols:2", layout, x, w)

    assert not found("batch:rows;f:cols")
    assert found("d:rows") == {"allreduce": 1}
    assert found("d:rows;batch:cols") == {"allreduce": 1}
    scattered = lambda x, w: mtf.einsum([x, w], out, rename={"f": "g"})  # noqa: E731
    assert found("d:rows;g:rows", scattered) == {"reduce-scatter": 1}
    assert found("d:rows;g:cols", scattered) == {"allreduce": 1}


def test_the_gradients_of_a_reduce_scatter_are_an_allgather():
    x, w = tensor([B, D]), tensor([D, F])

    def program(x, w):
        return jax.grad(lambda x: mtf.reduce_sum(mtf.einsum([x, w], [B, F], rename={"f": "g"})).array)(x)

    assert collectives(program, "rows:2", "d:rows;g:rows", x, w) == {
        "reduce-scatter": 1,
        "allreduce": 1,
        "allgather": 1,
    }


def test_a_tensor_that_three_products_consume_has_one_backward_allreduce():
    x = tensor([B, D])
    w = {n: tensor([D, F], i) for i, n in enumerate("qkv")}

    def program(x, w):
        def loss(x):
            q, k, v = (mtf.einsum([x, w[n]], [B, F]) for n in "qkv")
            return mtf.reduce_sum(q * k + v).array

        return jax.grad(loss)(x)

    assert collectives(program, "rows:2;cols:2", "f:cols", x, w) == {"allreduce": 2}  # the loss, and x's gradient


def test_weights_cast_to_varying_before_the_microbatches_have_one_gradient_allreduce():
    x = tensor("micro:3 batch:4 d:8")
    w = tensor([D, F], 1)
    layout = "batch:rows;f:cols"

    def program(x, w):
        def cast(w):
            return mtf.NamedTensor(collective.vary(w.array, ("rows",)), w.shape)

        varied, transpose = jax.vjp(cast, w)

        def step(total, x):
            def local(w):  # over this processor's rows, not yet summed over the others'
                return jnp.sum(mtf.reduce_sum(mtf.square(mtf.einsum([x, w], [B, F])), F).array)

            return total + jax.grad(local)(varied), mtf.zeros([])

        start = mtf.NamedTensor(collective.vary(jnp.zeros_like(varied.array), ("rows",)), w.shape)
        total, _ = mtf.scan(step, start, x, mtf.Dimension("micro", 3))
        return transpose(total)[0]

    expected = jax.grad(lambda w: jnp.sum((x.array @ w) ** 2))(w.array)
    close(run(program, "rows:2;cols:2", layout, x, w), expected)
    traced = jax.make_jaxpr(mtf.spmd(program, mtf.abstract_mesh("rows:2;cols:2"), layout))(x, w)
    loops = [e.params["jaxpr"].jaxpr for e in _equations(traced.jaxpr) if e.primitive.name == "scan"]
    reduced_in_loop = {a for e in _equations(loops[0]) if "psum" in e.primitive.name for a in e.params["axes"]}
    assert reduced_in_loop == {"cols"}
    assert count(traced.jaxpr)["allreduce"] == count(loops[0])["allreduce"] + 1


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_the_gradient_of_a_product_through_an_allreduce_is_not_scaled_by_the_processors():
    """d/dw sum(w * x) over eight processors' slices of 0..7 is 28 on each of them."""
    x, w = mtf.NamedTensor(jnp.arange(8.0), dims("b:8")), mtf.NamedTensor(jnp.asarray(2.0), [])

    def program(x, w):
        return jax.grad(lambda w: mtf.reduce_sum(w * x).array)(w)

    assert float(run(program, "rows:8", "b:rows", x, w).array) == 28.0
    assert float(run(program, "rows:2;cols:4", "b:cols", x, w).array) == 28.0


def test_gradients_equal_finite_differences_under_a_layout():
    x, w = tensor([B, D]), tensor([D, F], 1)
    direction = tensor([D, F], 2)
    program = mtf.spmd(
        lambda x, w: mtf.reduce_sum(mtf.tanh(mtf.einsum([x, w], [B, F]) * 0.3)), mesh_of(CASES[1][0]), CASES[1][1]
    )
    slope = jax.jit(jax.grad(lambda w: program(x, w).array))(w)
    step = 1e-2
    difference = (program(x, w + direction * step).array - program(x, w - direction * step).array) / (2 * step)
    np.testing.assert_allclose(np.sum(slope.array * direction.array), difference, rtol=2e-3)


def test_half_precision_products_accumulate_in_single_precision_and_stay_half():
    x = mtf.NamedTensor(jnp.ones((4, 4096), jnp.bfloat16), dims("batch:4 d:4096"))
    y = run(lambda x: mtf.einsum([x, x], dims("batch:4")), "rows:2", "d:rows", x)
    assert y.dtype == jnp.bfloat16 and np.all(np.asarray(y.array, np.float32) == 4096)
    z = run(lambda x: mtf.einsum([x, x], dims("batch:4"), dtype=jnp.float32), "rows:2", "d:rows", x)
    assert z.dtype == jnp.float32 and np.all(np.asarray(z.array) == 4096)


def test_half_precision_products_stay_half_in_the_backward_pass():
    x, w = (t.astype(jnp.bfloat16) for t in (tensor([B, D]), tensor([D, F], 1)))

    def program(x, w):
        return jax.grad(lambda w: mtf.reduce_sum(mtf.einsum([x, w], [B, F]).astype(jnp.float32)).array)(w)

    traced = jax.make_jaxpr(mtf.spmd(program, mtf.abstract_mesh("rows:2"), "batch:rows"))(x, w)
    types = {v.aval.dtype for e in _equations(traced.jaxpr) if e.primitive.name == "dot_general" for v in e.invars}
    assert types == {jnp.dtype(jnp.bfloat16)}


def test_integer_products():
    x, w = integers([B, D], 50), integers([D, F], 50, 1)
    y = run(lambda x, w: mtf.einsum([x, w], [B, F]), *CASES[1], x, w)
    assert y.dtype == jnp.int32
    np.testing.assert_array_equal(y.array, np.asarray(x.array) @ np.asarray(w.array))


def test_contracting_a_dimension_of_size_zero_gives_zeros():
    def program(x):
        return mtf.einsum([x, mtf.zeros(dims("batch:4 none:0")), mtf.zeros(dims("none:0 f:8"))], dims("batch:4 f:8"))

    y = run(program, "rows:2", "batch:rows", mtf.zeros(dims("batch:4")))
    np.testing.assert_array_equal(y.array, np.zeros((4, 8)))


def test_an_output_dimension_that_no_input_has_is_refused():
    with pytest.raises(mtf.ShapeError, match=r"no dimension named f in \[batch=4, d=8\]"):
        mtf.einsum([tensor([B, D])], [B, F])
    with pytest.raises(mtf.ShapeError, match="dimension d has size 8 in one tensor and 9 in another"):
        mtf.einsum([tensor([B, D]), tensor("d:9")], [B])


@given(st.data())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_product_equals_numpy_under_any_layout(data):
    sizes = {"a": 2, "b": 4, "c": 6, "e": 8}
    names = [data.draw(st.lists(st.sampled_from("abce"), unique=True, max_size=3)) for _ in range(2)]
    everything = [n for n in sizes if n in names[0] + names[1]]
    out = data.draw(st.lists(st.sampled_from(everything), unique=True)) if everything else []
    split = data.draw(st.permutations(everything))[:2]
    layout = ";".join(f"{n}:{m}" for n, m in zip(split, "rc", strict=False))
    x, y = (tensor([mtf.Dimension(n, sizes[n]) for n in part], i) for i, part in enumerate(names))
    letters = ",".join("".join(part) for part in names) + "->" + "".join(out)
    result = run(lambda x, y: mtf.einsum([x, y], [mtf.Dimension(n, sizes[n]) for n in out]), "r:2;c:2", layout, x, y)
    close(result, np.einsum(letters, x.array, y.array))
