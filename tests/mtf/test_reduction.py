import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_experiments import mtf
from tests.mtf.helpers import check, close, collectives, dims, integers, run, tensor

B, L, D = dims("batch:4 length:3 d:8")
CASES = [("rows:2;cols:2", "batch:rows;d:cols")]
MORE = [*CASES, ("all:8", "d:all")]
X = tensor([B, L, D])
ROWS = mtf.NamedTensor(jnp.asarray([[-jnp.inf] * 8, [-jnp.inf] * 7 + [2.0], [1e4] * 8, [-1e4] * 4 + [3e4] * 4]), [B, D])


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "logsumexp"])
def test_reductions_equal_numpy_with_their_gradients(name):
    mine = getattr(mtf, f"reduce_{name}")
    theirs = jax.nn.logsumexp if name == "logsumexp" else getattr(jnp, name)

    def program(x):  # over one dimension, over two, and over all
        return mine(x, D) + mine(x, [B, D]) + mine(x)

    def reference(x):
        return theirs(x, axis=2) + theirs(x, axis=(0, 2))[None] + theirs(x)

    check(program, reference, [X], MORE if name in ("sum", "max") else CASES, outside=name == "max")


def test_any_and_all():
    x = mtf.NamedTensor(np.random.default_rng(0).random((4, 3, 8)) < 0.15, [B, L, D])

    def program(x):
        return mtf.stack([mtf.reduce_any(x, [B, D]), mtf.reduce_all(mtf.logical_not(x), [B, D])], "which")

    check(program, lambda x: jnp.stack([x.any((0, 2)), (~x).all((0, 2))]), [x], CASES)


def test_logic_inside_a_differentiated_function():
    def program(x):
        return mtf.where(mtf.reduce_any(x > 1.5, D), mtf.reduce_sum(x, D), 0.0)

    check(program, lambda x: jnp.where((x > 1.5).any(2), x.sum(2), 0), [X], CASES)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int8, np.float32])
def test_extremes_of_the_ends_of_a_type(dtype):
    """Not computed from the extreme of the negated numbers, which overflow."""
    low, high = (
        (np.finfo if dtype == np.float32 else np.iinfo)(dtype).min,
        (np.finfo if dtype == np.float32 else np.iinfo)(dtype).max,
    )
    x = mtf.NamedTensor(np.asarray([[low, high], [1, 2], [low, 3], [high, 4]], dtype), dims("batch:4 e:2"))
    for mesh, layout in (("rows:1", ""), ("rows:2", "e:rows")):
        least, most = run(lambda x: (mtf.reduce_min(x, "e"), mtf.reduce_max(x, "e")), mesh, layout, x)
        np.testing.assert_array_equal(least.array, [low, 1, low, 4])
        np.testing.assert_array_equal(most.array, [high, 2, 3, high])
        assert least.dtype == dtype


def test_ties_share_the_gradient_of_a_maximum_across_processors():
    x = mtf.NamedTensor(jnp.asarray([[3.0, 1, 3, 0, 3, 3, 2, 1], [0.0] * 8]), dims("batch:2 d:8"))
    check(lambda x: mtf.reduce_max(x, "d"), lambda x: jnp.max(x, 1), [x], [("rows:4", "d:rows")])
    check(lambda x: mtf.reduce_min(x, "d"), lambda x: jnp.min(x, 1), [x], [("rows:4", "d:rows")])


def test_a_nan_on_one_processor_is_the_maximum_on_all():
    x = mtf.NamedTensor(jnp.asarray([1.0, jnp.nan, 3, 4, 5, 6, 7, 8]), dims("d:8"))
    for mesh in ("rows:1", "rows:4"):
        most, least, total = run(
            lambda x: (mtf.reduce_max(x), mtf.reduce_min(x), mtf.reduce_logsumexp(x)), mesh, "d:rows", x
        )
        assert np.isnan(most.array) and np.isnan(least.array) and np.isnan(total.array), mesh


def test_sums_over_dimensions_of_size_zero():
    x = mtf.NamedTensor(np.zeros((4, 0), np.float32), dims("batch:4 none:0"))
    for mesh, layout in (("rows:1", ""), ("rows:2", "batch:rows"), ("rows:2", "none:rows")):
        total, mean = run(lambda x: (mtf.reduce_sum(x, "none"), mtf.reduce_mean(x, "none")), mesh, layout, x)
        np.testing.assert_array_equal(total.array, np.zeros(4))
        assert np.isnan(mean.array).all()


def test_softmax_and_log_softmax():
    check(lambda x: mtf.softmax(x, D), lambda x: jax.nn.softmax(x, -1), [X], CASES)
    check(lambda x: mtf.log_softmax(x, L), lambda x: jax.nn.log_softmax(x, 1), [X], [])
    check(lambda x: mtf.log_softmax(x, "d"), lambda x: jax.nn.log_softmax(x, -1), [X], CASES)


@pytest.mark.parametrize("mesh, layout", [("rows:1", ""), ("rows:2;cols:4", "batch:rows;d:cols")])
def test_large_logits_neither_overflow_nor_underflow_and_masked_rows_stay_minus_infinite(mesh, layout):
    total, share, logarithm = run(
        lambda x: (mtf.reduce_logsumexp(x, D), mtf.softmax(x, D), mtf.log_softmax(x, D)), mesh, layout, ROWS
    )
    np.testing.assert_allclose(total.array, [-np.inf, 2.0, 1e4 + np.log(8), 3e4 + np.log(4)], rtol=1e-6)
    np.testing.assert_allclose(share.array[1], [0] * 7 + [1])
    np.testing.assert_allclose(share.array[2], [1 / 8] * 8)
    np.testing.assert_allclose(share.array[3], [0] * 4 + [1 / 4] * 4)
    np.testing.assert_allclose(logarithm.array[2], [-np.log(8)] * 8, atol=2e-3)


def test_the_gradient_of_logsumexp_of_masked_logits_is_finite():
    def program(x):
        return jax.grad(lambda x: mtf.reduce_sum(mtf.reduce_logsumexp(x, "d")).array)(x)

    x = mtf.NamedTensor(ROWS.array[1:], dims("batch:3 d:8"))
    for mesh in ("cols:1", "cols:4"):
        close(run(program, mesh, "d:cols", x), jax.nn.softmax(x.array, -1))


def test_integers_are_summed_as_integers_and_their_mean_is_not():
    x = integers([B, D], 100)
    total, mean = run(lambda x: (mtf.reduce_sum(x), mtf.reduce_mean(x, D)), "rows:2;cols:2", "batch:rows;d:cols", x)
    assert total.dtype == jnp.int32 and int(total.array) == int(x.array.sum())
    close(mean, x.array.mean(1))


@pytest.mark.parametrize(
    "reduce, expected",
    [
        (lambda x: mtf.reduce_sum(x, "d"), {"allreduce": 1}),
        (lambda x: mtf.reduce_sum(x, "batch"), {}),
        (lambda x: mtf.reduce_sum(x, ["batch", "d", "length"]), {"allreduce": 1}),
        (lambda x: mtf.reduce_max(x, "d"), {"allreduce max": 1}),
        (lambda x: mtf.reduce_min(x, "d"), {"allreduce max": 1}),
        (lambda x: mtf.reduce_mean(x, "d"), {"allreduce": 1}),
        (lambda x: mtf.reduce_logsumexp(x, "d"), {"allreduce": 1, "allreduce max": 1}),
        (lambda x: mtf.softmax(x, "d"), {"allreduce": 1, "allreduce max": 1}),
        (lambda x: mtf.reduce_sum(x, "d", rename={"length4": "split"}), {"reduce-scatter": 1}),
    ],
)
def test_what_reductions_communicate(reduce, expected):
    x = tensor("batch:4 length:3 d:8 length4:4")
    assert collectives(reduce, "rows:2", "d:rows;split?:rows", x) == expected


def test_a_sum_scattered_over_the_mesh_dimension_it_was_summed_over():
    x = tensor("batch:4 e:4 d:8")

    def program(x):
        return mtf.reduce_sum(x, "d", rename={"e": "f"})

    cases = [("rows:2;cols:2", "d:rows;f:rows"), ("rows:2;cols:2", "d:rows;f:rows;batch:cols")]
    check(program, lambda x: x.sum(2), [x], cases)


@given(st.data())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_reduction_equals_numpy_under_any_layout(data):
    names = data.draw(st.permutations(["a", "b", "c"]))
    gone = data.draw(st.lists(st.sampled_from(names), unique=True))
    layout = data.draw(st.sampled_from(["a:r;b:c", "b:r;c:c", "c:c", "b:r;a:c", "a:r;b:c;none?:c"]))
    x = tensor([mtf.Dimension(n, {"a": 2, "b": 4, "c": 6}[n]) for n in names], 3)
    axes = tuple(names.index(n) for n in gone)
    total, most = run(lambda x: (mtf.reduce_sum(x, gone), mtf.reduce_max(x, gone)), "r:2;c:2", layout, x)
    close(total, np.sum(x.array, axes))
    close(most, np.max(x.array, axes))
    assert total.shape == x.shape.without(*gone)
