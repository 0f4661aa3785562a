import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from tests.mtf.helpers import close, collectives, dims, integers, run, tensor

MESH = "rows:4;cols:2"
LAYOUTS = ["vocab:rows", "vocab:cols", "batch:rows;vocab:cols", "batch:cols;vocab:rows", "k:cols;vocab:rows", "k:cols"]
TIED = integers("batch:4 vocab:16", 4)  # sixteen values of four kinds: most are equal to another
(K,) = dims("k:6")


def expected(x, k):
    """The first of equals first: a stable sort of the negated values."""
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, order, -1), order


@pytest.mark.parametrize("layout", ["", *LAYOUTS])
def test_top_k_of_ties_and_of_reals(layout):
    for x in (TIED, tensor("batch:4 vocab:16"), tensor("batch:4 vocab:16").astype(jnp.bfloat16)):
        call = lambda x: mtf.top_k(x, "vocab", K)  # noqa: E731
        values, places = run(call, MESH, layout, x) if layout else call(x)
        wanted, order = expected(np.asarray(x.array), 6)
        np.testing.assert_array_equal(values.array, wanted)
        np.testing.assert_array_equal(places.array, order)
        assert places.dtype == jnp.int32 and values.dtype == x.dtype


def test_more_than_a_processors_slice_can_be_asked_for():
    values, places = run(lambda x: mtf.top_k(x, "vocab", *dims("k:16")), MESH, "vocab:rows", TIED)
    wanted, order = expected(np.asarray(TIED.array), 16)
    np.testing.assert_array_equal(values.array, wanted)
    np.testing.assert_array_equal(places.array, order)


def test_any_dimension_may_be_the_one_and_the_others_keep_their_order():
    x = tensor("a:3 vocab:8 b:5")
    values, places = run(lambda x: mtf.top_k(x, "vocab", *dims("k:2")), MESH, "vocab:rows", x)
    assert values.shape.names == places.shape.names == ("a", "b", "k")
    wanted, order = expected(np.moveaxis(np.asarray(x.array), 1, 2), 2)
    np.testing.assert_array_equal(values.array, wanted)
    np.testing.assert_array_equal(places.array, order)


def test_only_the_best_of_each_processor_travel():
    def program(x):
        return mtf.top_k(x, "vocab", K)

    assert collectives(program, MESH, "vocab:rows", TIED)["allgather"] == 2
    ledger = mtf.ledger(program, mtf.abstract_mesh(MESH), "batch:cols;vocab:rows", tensor("batch:4 vocab:400"))
    # Of 2 rows and 100 elements each processor sends 6 values and 6 positions a row.
    assert ledger.elements_by_mesh_dimension() == {("rows",): 2 * (2 * 6 * 4)}


def test_the_gradient_goes_to_the_elements_that_were_chosen():
    x, weights = tensor("batch:4 vocab:16"), tensor("k:6", seed=1)

    def gradient(x):
        def total(a):
            values, _ = mtf.top_k(mtf.NamedTensor(a, x.shape), "vocab", K)
            return mtf.reduce_sum(values * weights_inside()).array

        def weights_inside():
            return mtf.NamedTensor(jnp.asarray(weights.array), weights.shape)

        return mtf.NamedTensor(jax.grad(total)(x.array), x.shape)

    wanted = np.zeros((4, 16), np.float32)
    np.put_along_axis(wanted, expected(np.asarray(x.array), 6)[1], np.asarray(weights.array)[None], 1)
    for layout in ("batch:rows", "vocab:rows", "batch:cols;vocab:rows"):
        close(run(gradient, MESH, layout, x).array, wanted)


@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_argmax_is_the_first_of_the_largest(layout):
    for x in (TIED, tensor("batch:4 vocab:16", seed=3)):
        y = run(lambda x: mtf.argmax(x, "vocab"), MESH, layout, x)
        np.testing.assert_array_equal(y.array, np.argmax(np.asarray(x.array), -1))


def test_how_many_there_are_is_the_limit():
    for size in (0, 17):
        with pytest.raises(mtf.ShapeError, match=f"the {size} largest along vocab .* legal are 1..16"):
            mtf.top_k(TIED, "vocab", mtf.Dimension("k", size))
