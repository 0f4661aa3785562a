import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.mtf.collective import COMMUNICATED
from tests.mtf.helpers import check, close, collectives, dims, integers, run, tensor

LAYERS = mtf.Dimension("layers", 3)
X, W = tensor("batch:4 d:8", scale=0.5), tensor("d:8 layers:3 f:8", 1, scale=0.5)
HIDDEN, OUT = dims("batch:4 f:8"), dims("batch:4 d:8")
CASES = [("rows:2;cols:2", "batch:rows;f:cols"), ("rows:2;cols:2", "d:rows;batch:cols")]


def network(x, w, **options):
    def layer(x, w):
        assert w.shape.names == ("d", "f")  # the slice lacks the dimension looped over
        h = mtf.tanh(mtf.einsum([x, w], HIDDEN))
        return x + mtf.einsum([h, w], OUT), mtf.reduce_sum(h, "f")

    if options.pop("checkpoint", False):
        policy = jax.checkpoint_policies.save_only_these_names(COMMUNICATED)
        layer = jax.checkpoint(layer, policy=policy)
    return mtf.scan(layer, x, w, LAYERS, **options)


def reference(x, w):
    sums = []
    for i in range(3):
        h = jnp.tanh(x @ w[:, i])
        sums.append(h.sum(1))
        x = x + h @ w[:, i].T
    return x, jnp.stack(sums)


@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"unroll": True}])
def test_a_loop_over_layers_and_its_gradients(options):
    check(
        lambda x, w: network(x, w, **options)[0],
        lambda x, w: reference(x, w)[0],
        [X, W],
        CASES[:1],
        outside=not options,
    )


def test_results_are_stacked_along_the_dimension_looped_over():
    check(lambda x, w: network(x, w)[1], lambda x, w: reference(x, w)[1], [X, W], CASES)


def test_a_policy_that_saves_what_was_communicated_spares_the_backward_pass_its_repetition():
    def program(x, w, **options):
        return jax.grad(lambda w: mtf.reduce_sum(network(x, w, **options)[0]).array)(w)

    def found(**options):
        return collectives(lambda x, w: program(x, w, **options), "cols:2", "f:cols", X, W)["allreduce"]

    assert found(checkpoint=True) == found()


def test_carries_that_enter_as_zeros_and_leave_as_slices_of_split_tensors():
    def program(x):
        def step(carry, row):
            total, (count, most) = carry
            return (total + row, (count + 1, mtf.maximum(most, mtf.reduce_max(row)))), row * total

        start = (mtf.zeros(dims("d:8")), (jnp.int32(0), mtf.full([], -jnp.inf)))
        return mtf.scan(step, start, x, mtf.Dimension("batch", 4))

    for layout in ("d:rows", "d:cols"):
        (total, (count, most)), products = run(program, "rows:2;cols:2", layout, X)
        close(total, np.sum(X.array, 0))
        close(most, np.max(X.array))
        assert int(count) == 4
        exclusive = np.cumsum(np.asarray(X.array), 0) - X.array
        close(products, X.array * exclusive)


def test_a_loop_over_several_tensors_of_different_types():
    ids = integers("layers:3 batch:4", 8)

    def program(w, ids):
        def step(carry, x):
            w, i = x
            return carry + mtf.gather(w, i, "d"), {"i": i * 2}

        return mtf.scan(step, mtf.zeros(HIDDEN), (w, ids), LAYERS)

    total, ys = run(program, *CASES[0], W, ids)
    close(total, sum(np.asarray(W.array)[np.asarray(ids.array)[i], i] for i in range(3)))
    np.testing.assert_array_equal(ys["i"].array, ids.array * 2)
    assert ys["i"].shape == ids.shape


def test_a_dimension_that_is_looped_over_cannot_be_split():
    with pytest.raises(mtf.LayoutError, match="layers:rows: layers is looped over and cannot be split"):
        run(network, "rows:3", "layers:rows", X, W)


def test_zeros_and_full_hold_their_value_and_type():
    y = run(lambda: mtf.full(dims("a:4 b:2"), 2.5, jnp.bfloat16), "rows:2", "a:rows")
    assert y.dtype == jnp.bfloat16 and np.all(np.asarray(y.array, np.float32) == 2.5)
    assert mtf.zeros(dims("a:0")).array.shape == (0,)


def test_a_while_loop_stops_for_all_processors_at_once_and_is_the_same_under_every_layout():
    """Each row doubles until the largest element of all exceeds 100: row r starts at r + 1, so 4 * 2^5 does it."""
    x = mtf.NamedTensor(np.arange(1, 5, dtype=np.float32)[:, None] * np.ones((1, 8), np.float32), dims("batch:4 d:8"))

    def program(x):
        def body(carry):
            return {"x": carry["x"] * 2, "steps": carry["steps"] + 1}

        carry = {"x": x, "steps": mtf.zeros([], jnp.int32)}
        return mtf.while_loop(lambda c: mtf.less_equal(mtf.reduce_max(c["x"]), 100.0), body, carry)

    for layout in ("", "batch:rows", "d:cols", "batch:rows;d:cols"):
        found = run(program, "rows:2;cols:2", layout, x) if layout else program(x)
        assert int(found["steps"].array) == 5
        np.testing.assert_array_equal(found["x"].array, 32 * np.asarray(x.array))


def test_a_while_loop_whose_condition_fails_at_once_does_nothing():
    x = mtf.zeros(dims("d:4"))
    found = mtf.while_loop(lambda c: mtf.greater(mtf.reduce_sum(c), 0.0), lambda c: c + 1, x)
    np.testing.assert_array_equal(found.array, np.zeros(4))
