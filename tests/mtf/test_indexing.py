import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from tests.mtf.helpers import check, close, collectives, dims, integers, run, tensor

MESH = "rows:2;cols:2"
TABLE, IDS = tensor("vocab:8 d:4"), integers("batch:4 length:6", 8)
LAYOUTS = ["batch:rows;vocab:cols", "vocab:rows;d:cols", "batch:cols;d:rows"]


def test_arange_counts_in_the_whole_dimension():
    for layout in ("", "d:rows", "d:cols"):
        y = run(lambda: mtf.arange(*dims("d:8")), MESH, layout) if layout else mtf.arange(*dims("d:8"))
        np.testing.assert_array_equal(y.array, np.arange(8))
        assert y.dtype == jnp.int32


def test_one_hot():
    vocab = mtf.Dimension("vocab", 8)
    check(
        lambda i: mtf.one_hot(i, vocab),
        lambda i: jax.nn.one_hot(i, 8),
        [IDS],
        [(MESH, layout) for layout in LAYOUTS[:1]],
    )
    outside = mtf.NamedTensor(jnp.asarray([-1, 8, 3]), dims("n:3"))
    assert mtf.one_hot(outside, vocab).array.sum(1).tolist() == [0, 0, 1]
    assert mtf.one_hot(mtf.NamedTensor(jnp.uint8(200), []), mtf.Dimension("v", 300), jnp.bfloat16).dtype == jnp.bfloat16


def test_an_embedding_lookup_and_its_gradient():
    check(
        lambda t, i: mtf.gather(t, i, "vocab"),
        lambda t, i: t[i],
        [TABLE, IDS],
        [(MESH, x) for x in LAYOUTS],
        outside=True,
    )


def test_a_lookup_per_row_of_dimensions_that_both_have():
    table, ids = tensor("d:4 batch:4 memory:6"), integers("length:3 batch:4", 6)
    check(
        lambda t, i: mtf.gather(t, i, "memory"),
        lambda t, i: jnp.stack([t[:, b][:, i[:, b]].T for b in range(4)], 1),
        [table, ids],
        [(MESH, "batch:rows;memory:cols"), (MESH, "batch:cols;d:rows")],
    )


def test_a_lookup_per_row_of_two_shared_dimensions():
    table, ids = tensor("beam:2 batch:4 memory:6"), integers("batch:4 length:3 beam:2", 6)
    check(
        lambda t, i: mtf.gather(t, i, "memory"),
        lambda t, i: t[jnp.arange(2)[None, None], jnp.arange(4)[:, None, None], i],
        [table, ids],
        [(MESH, "batch:rows;memory:cols"), (MESH, "beam:cols;batch:rows")],
    )


@pytest.mark.parametrize("layout", ["", *LAYOUTS])
def test_ids_outside_the_vocabulary_give_nan_and_never_another_row(layout):
    ids = mtf.NamedTensor(jnp.asarray([0, 8, -1, 7, 100, -8, 2**31 - 1, -(2**31)], jnp.int32), dims("batch:8"))
    good = [0, 3]

    def program(t, i):
        return mtf.gather(t, i, "vocab"), mtf.gather(mtf.cast(t * 10, jnp.int32) + 100, i, "vocab")

    rows, counts = run(program, MESH, layout, TABLE, ids) if layout else program(TABLE, ids)
    np.testing.assert_array_equal(rows.array[np.array(good)], TABLE.array[np.array([0, 7])])
    bad = [i for i in range(8) if i not in good]
    assert np.isnan(rows.array[np.array(bad)]).all()
    assert (counts.array[np.array(bad)] == 0).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32])
def test_ids_of_every_integer_type(dtype):
    table = tensor("vocab:1000 d:2")
    ids = mtf.NamedTensor(np.asarray([0, 200, 255, 7], dtype), dims("batch:4"))
    for y in (
        mtf.gather(table, ids, "vocab"),
        run(lambda t, i: mtf.gather(t, i, "vocab"), MESH, "vocab:rows", table, ids),
    ):
        np.testing.assert_array_equal(y.array, table.array[np.asarray([0, 200, 255, 7])])


def test_ids_that_are_not_integers_are_refused():
    for ids in (tensor("batch:4"), mtf.NamedTensor(np.ones(4, bool), dims("batch:4"))):
        with pytest.raises(mtf.ShapeError, match="gather along vocab needs integer ids, got (float32|bool)"):
            mtf.gather(TABLE, ids, "vocab")


def test_a_lookup_by_ids_that_have_the_looked_up_dimension_is_refused():
    with pytest.raises(mtf.ShapeError, match="two dimensions named vocab"):
        mtf.gather(TABLE, integers("vocab:8", 8), "vocab")
    with pytest.raises(mtf.ShapeError, match="dimension d has size 4"):
        mtf.gather(TABLE, integers("d:5", 8), "vocab")


def test_what_lookups_communicate():
    def lookup(t, i):
        return mtf.gather(t, i, "vocab")

    def slope(t, i):
        return jax.grad(lambda t: mtf.reduce_sum(mtf.gather(t, i, "vocab")).array)(t)

    assert collectives(lookup, MESH, "vocab:rows;batch:cols", TABLE, IDS) == {"allreduce": 1}
    assert not collectives(lookup, MESH, "d:rows;batch:cols", TABLE, IDS)
    # The lookup, the sum, and the table's gradient over the batch; the looked-up rows' gradient is local.
    assert collectives(slope, MESH, "vocab:rows;batch:cols", TABLE, IDS) == {"allreduce": 3}
    assert collectives(slope, MESH, "vocab:rows", TABLE, IDS) == {"allreduce": 1}


@pytest.mark.parametrize("layout", ["batch:rows;d:cols", "d:rows;batch:cols"])
def test_slices(layout):
    x = tensor("batch:4 length:6 d:8")
    check(
        lambda x: mtf.slice_dimension(mtf.slice_dimension(x, "length", 1, 3), "d", 2, 4),
        lambda x: x[:, 1:4, 2:6],
        [x],
        [(MESH, layout)],
        outside=True,
    )
    moving = run(lambda x, s: mtf.slice_dimension(x, "d", s, 4), MESH, layout, x, jnp.int32(3))
    close(moving, x.array[..., 3:7])


@pytest.mark.parametrize("start, size", [(-1, 2), (5, 2), (0, 7), (2, -1), (np.int32(5), 2)])
def test_a_slice_outside_its_dimension_is_refused(start, size):
    with pytest.raises(mtf.ShapeError, match="of dimension length, which has size 6"):
        mtf.slice_dimension(IDS, "length", start, size)


@pytest.mark.parametrize("layout", ["batch:rows;d:cols", "d:rows;batch:cols"])
def test_one_position(layout):
    x = tensor("batch:4 length:6 d:8")
    check(
        lambda x: mtf.index(x, "d", 5) + mtf.index(mtf.index(x, "length", 2), "d", 0),
        lambda x: x[:, :, 5] + x[:, 2, 0][:, None],
        [x],
        [(MESH, layout)],
    )
    assert collectives(lambda x: mtf.index(x, "d", 5), MESH, layout, x) == {"allreduce": 1}
    assert not collectives(lambda x: mtf.index(x, "length", 5), MESH, layout, x)
    close(run(lambda x, i: mtf.index(x, "d", i), MESH, layout, x, jnp.int32(6)), x.array[..., 6])
    close(run(lambda i: mtf.index(i, "length", 1), MESH, "length:rows", IDS), IDS.array[:, 1])


def test_a_position_outside_is_refused_or_gives_nan():
    for position in (-1, 8, np.int64(8)):
        with pytest.raises(mtf.ShapeError, match=r"legal are 0\.\.7"):
            mtf.index(TABLE, "vocab", position)
    for layout in ("d:rows", "vocab:rows"):
        y = run(lambda t, i: mtf.index(t, "vocab", i), MESH, layout, TABLE, jnp.int32(8))
        assert np.isnan(y.array).all()


@pytest.mark.parametrize("offset", [1, -1, 2, -3, 0])
def test_shifts(offset):
    x = tensor("batch:4 length:12")

    def reference(x):
        moved = jnp.roll(x, offset, 1)
        position = jnp.arange(12) - offset
        return jnp.where((position >= 0) & (position < 12), moved, 0)

    layout = "length:cols;batch:rows"
    check(lambda x: mtf.shift(x, offset, "length"), reference, [x], [("rows:2;cols:4", layout)] if offset else [])
    found = collectives(lambda x: mtf.shift(x, offset, "length"), "rows:2;cols:4", layout, x)
    assert found == ({"exchange": 1} if offset else {})
    assert not collectives(lambda x: mtf.shift(x, offset, "length"), "rows:2", "batch:rows", x)


def test_a_shift_further_than_the_neighbour_is_refused_naming_the_slice():
    x = tensor("batch:4 length:12")
    with pytest.raises(mtf.ShapeError, match="shift by 4 along length=12, whose slice has 3 elements"):
        run(lambda x: mtf.shift(x, 4, "length"), "rows:4", "length:rows", x)


@pytest.mark.parametrize("exclusive", [False, True])
def test_running_sums(exclusive):
    x = tensor("batch:4 length:8")

    def reference(x):
        return jnp.cumsum(x, 1) - (x if exclusive else 0)

    check(
        lambda x: mtf.cumsum(x, "length", exclusive),
        reference,
        [x],
        [("rows:4;cols:2", "length:rows;batch:cols"), ("rows:2", "batch:rows")],
    )
    assert collectives(lambda x: mtf.cumsum(x, "length", exclusive), "rows:4", "length:rows", x) == {"allgather": 1}


def test_an_exclusive_sum_is_not_lost_beside_a_large_element():
    x = mtf.NamedTensor(jnp.asarray([1.0, 1e9, 1, 1]), dims("length:4"))
    for y in (mtf.cumsum(x, "length", True), run(lambda x: mtf.cumsum(x, "length", True), "rows:2", "length:rows", x)):
        np.testing.assert_array_equal(y.array[:2], [0, 1])


def test_running_sums_of_integers_and_of_nothing():
    y = run(lambda i: mtf.cumsum(i, "length"), MESH, "length:rows", IDS)
    np.testing.assert_array_equal(y.array, np.cumsum(IDS.array, 1))
    assert y.dtype == jnp.int32
    assert mtf.cumsum(mtf.zeros(dims("none:0 a:2")), "none", True).array.shape == (0, 2)


def test_a_slice_is_written_at_a_position_known_only_when_it_runs():
    x, update = tensor("batch:4 cache:12 d:4"), tensor("d:4 batch:4 cache:3", seed=1)
    wanted = np.asarray(x.array).copy()
    wanted[:, 5:8] = np.asarray(update.array).transpose(1, 2, 0)
    start = mtf.NamedTensor(jnp.int32(5), [])
    call = lambda x, u, s: mtf.update_slice(x, u, "cache", s.array)  # noqa: E731
    for layout in ("", "batch:rows", "d:cols", "batch:rows;d:cols"):
        y = run(call, MESH, layout, x, update, start) if layout else call(x, update, start)
        np.testing.assert_array_equal(y.array, wanted)
    assert not collectives(call, MESH, "batch:rows;d:cols", x, update, start)
    half = mtf.update_slice(x.astype(jnp.bfloat16), update, "cache", 0)
    assert half.dtype == jnp.bfloat16


def test_what_is_written_has_to_fit_and_its_dimension_must_not_be_split():
    x, update = tensor("batch:4 cache:12"), tensor("batch:4 cache:3", seed=1)
    with pytest.raises(mtf.ShapeError, match="3 elements from 10 on along cache"):
        mtf.update_slice(x, update, "cache", 10)
    with pytest.raises(mtf.LayoutError, match="layout rule cache:rows.*do not split it"):
        run(
            lambda x, u: mtf.update_slice(x, u, "cache", 0),
            MESH,
            "cache?:rows",
            tensor("batch:4 cache:12"),
            tensor("batch:4 cache:4"),
        )
