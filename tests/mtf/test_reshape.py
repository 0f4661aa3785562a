import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_experiments import mtf
from tests.mtf.helpers import check, collectives, dims, integers, run, tensor

MESH = "rows:2;cols:2"
X = tensor("batch:4 length:6 d:8")


def test_transpose():
    check(
        lambda x: mtf.transpose(x, ["d", "batch", "length"]),
        lambda x: x.transpose(2, 0, 1),
        [X],
        [(MESH, "batch:rows;d:cols")],
    )
    with pytest.raises(mtf.ShapeError, match="must name every dimension once"):
        mtf.transpose(X, ["d", "batch"])


@pytest.mark.parametrize(
    "layout, expected",
    [
        ("batch:rows;d:cols", {"allgather": 1}),
        ("batch:rows", {}),
        ("length:rows;position?:rows", {}),
        ("length:rows", {"allgather": 1}),
        ("position:rows", {}),
        ("length:rows;feature:rows", {"alltoall": 1}),
        ("length:rows;d:cols;feature:rows;position:cols", {"allgather": 2}),
        ("length:rows;feature:rows;position:cols", {"alltoall": 1}),
        ("length:cols;d:rows;batch:rows", None),
    ],
)
def test_rename_moves_what_the_layout_moves(layout, expected):
    def program(x):
        return mtf.rename(x, length="position", d="feature")

    if expected is None:
        with pytest.raises(mtf.LayoutError):
            collectives(program, MESH, layout, X)
        return
    assert collectives(program, MESH, layout, X) == expected
    check(program, lambda x: x, [X], [(MESH, layout)], outside=layout == "position:rows")


def test_a_mesh_dimension_moves_into_the_place_that_another_frees():
    x = tensor("a:4 b:4 c:4")

    def program(x):
        return mtf.rename(x, a="e", b="f", c="g")

    assert collectives(program, MESH, "a:rows;b:cols;f:rows;g:cols", x) == {"alltoall": 2}
    check(program, lambda x: x, [x], [(MESH, "a:rows;b:cols;f:rows;g:cols")])


def test_the_gradient_of_a_slice_is_an_allgather_not_an_allreduce():
    weight = tensor("batch:4 position:6 d:8", 1)

    def program(x, w):
        return jax.grad(lambda x: mtf.reduce_sum(mtf.rename(x, length="position") * w).array)(x)

    assert collectives(program, MESH, "position:rows", X, weight) == {"allreduce": 1, "allgather": 1}


def test_the_gradient_of_an_alltoall_is_an_alltoall_and_that_of_an_allgather_is_local():
    def found(layout):
        def program(x):
            y = mtf.rename(x, length="position", d="feature")
            return jax.grad(lambda x: mtf.reduce_sum(mtf.rename(x, length="position", d="feature") * y).array)(x)

        return collectives(program, MESH, layout, X)

    assert found("length:rows;feature:rows") == {"alltoall": 3, "allreduce": 1}
    assert found("length:rows") == {"allgather": 2}


@pytest.mark.parametrize("cast_first", [False, True])
def test_the_gradient_of_a_slice_of_what_was_cast_to_varying_before_is_not_counted_twice(cast_first):
    from mtf_experiments.mtf import collective

    w = tensor("out:4 d:8")
    y = tensor("split:4", 1)

    def program(w, y):
        def loss(w):
            if cast_first:
                w = mtf.NamedTensor(collective.vary(w.array, ("rows",)), w.shape)
            return mtf.reduce_sum(mtf.rename(w, out="split") * y, ["split", "d"]).array

        return jax.grad(loss)(w)

    np.testing.assert_allclose(
        run(program, "rows:2", "split:rows", w, y).array, np.tile(y.array[:, None], 8), rtol=1e-6
    )


@pytest.mark.parametrize(
    "target, layout, expected",
    [
        ("rest:4 all:48", "batch:rows;rest:rows", {}),
        ("rest:4 all:48", "batch:rows", {"allgather": 1}),
        ("both:24 d:8", "batch:rows;both:rows;d:cols", {}),
        ("both:24 d:8", "length:rows;both:rows", {"allgather": 1}),
        ("both:24 d:8", "batch:rows;both:cols", {"allgather": 1}),
        ("batch:4 length:6 heads:2 k:4", "d:rows;heads:rows", {}),
        ("batch:4 length:6 heads:2 k:4", "d:rows;k:rows", {"allgather": 1}),
        ("batch:4 length:6 heads:2 k:4", "heads:rows", {}),
        ("one:1 batch:4 length:6 d:8", "batch:rows", {}),
        ("uno:1 batch:4 un:1 both:48 ein:1", "batch:rows;length:cols;both:cols", {}),
        ("everything:192", "batch:rows;length:cols;everything:rows", {"allgather": 1}),
        ("b:4 length:6 c:8", "batch:rows;c:rows", {"alltoall": 1}),
    ],
)
def test_reshape_moves_only_what_is_regrouped(target, layout, expected):
    target = dims(target)
    sizes = [d.size for d in target]

    def program(x):
        return mtf.reshape(x, target)

    check(program, lambda x: x.reshape(sizes), [X], [(MESH, layout)])
    assert collectives(program, MESH, layout, X) == expected


def test_reshape_of_scalars_and_empty_tensors():
    one = mtf.NamedTensor(jnp.asarray(3.0), [])
    assert mtf.reshape(one, dims("a:1 b:1")).array.shape == (1, 1)
    empty = mtf.NamedTensor(np.zeros((4, 0, 2), np.float32), dims("a:4 b:0 c:2"))
    for layout in ("a:rows", "a:rows;e:rows"):
        assert run(lambda x: mtf.reshape(x, dims("e:6 b:0")), "rows:2", layout, empty).array.shape == (6, 0)


def test_another_number_of_elements_is_refused():
    with pytest.raises(mtf.ShapeError, match=r"has 192 elements and \[a=5\] has 5"):
        mtf.reshape(X, dims("a:5"))


@given(st.data())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_reshape_equals_numpy_under_any_layout(data):
    sizes = data.draw(st.sampled_from([[4, 3, 2], [2, 12], [24], [1, 4, 6], [2, 2, 2, 3]]))
    other = data.draw(st.sampled_from([[6, 4], [2, 3, 4], [4, 1, 6], [8, 3], [24], [12, 2, 1]]))
    x = integers([mtf.Dimension(f"a{i}", s) for i, s in enumerate(sizes)], 1000)
    target = [mtf.Dimension(f"b{i}", s) for i, s in enumerate(other)]
    rules = []
    for group in (x.shape, target):
        even = [d.name for d in group if d.size % 2 == 0]
        rules += [
            f"{n}:{m}" for n, m in zip(data.draw(st.permutations(even)), data.draw(st.permutations("rc")), strict=False)
        ]
    result = run(lambda x: mtf.reshape(x, target), "r:2;c:2", ";".join(rules), x)
    np.testing.assert_array_equal(result.array, np.reshape(x.array, other))


@given(st.data())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_rename_is_the_identity_under_any_layout(data):
    names = ["a", "b", "c"]
    x = integers(dims("a:4 b:4 c:4"), 1000)
    new = data.draw(st.permutations(["e", "f", "g"]))
    rules = []
    for group in (names, new):
        rules += [
            f"{n}:{m}"
            for n, m in zip(data.draw(st.permutations(group)), data.draw(st.permutations("rc")), strict=False)
        ]
    result = run(lambda x: mtf.rename(x, dict(zip(names, new, strict=True))), "r:2;c:2", ";".join(rules), x)
    np.testing.assert_array_equal(result.array, x.array)
    assert result.shape.names == tuple(new)


def test_renaming_an_absent_dimension_or_to_one_that_is_there_is_refused():
    with pytest.raises(mtf.ShapeError, match="no dimension named heads"):
        mtf.rename(X, heads="k")
    with pytest.raises(mtf.ShapeError, match="two dimensions named d"):
        mtf.rename(X, length="d")


@pytest.mark.parametrize("layout", ["batch:rows;d:cols", "length:rows;batch:cols"])
def test_concat_stack_and_unstack(layout):
    y = tensor("length:2 d:8 batch:4", 1)

    def joined(x, y):
        return mtf.concat([x, y], "length")

    check(joined, lambda x, y: jnp.concatenate([x, y.transpose(2, 0, 1)], 1), [X, y], [(MESH, layout)])

    def stacked(x):
        return mtf.stack([x, mtf.transpose(x * 2, ["d", "length", "batch"])], "two", axis=1)

    check(stacked, lambda x: jnp.stack([x, 2 * x], 1), [X], [(MESH, layout)])

    def unstacked(x):
        parts = mtf.unstack(x, "length")
        assert len(parts) == 6
        return parts[1] * parts[4]

    check(unstacked, lambda x: x[:, 1] * x[:, 4], [X], [(MESH, layout)])


def test_a_stack_whose_new_dimension_is_split():
    check(
        lambda x: mtf.stack([x, 2 * x], "two", axis=1),
        lambda x: jnp.stack([x, 2 * x], 1),
        [X],
        [(MESH, "two:cols;d:rows")],
    )


def test_joining_tensors_of_other_shapes_is_refused():
    with pytest.raises(mtf.ShapeError, match="the other dimensions differ"):
        mtf.concat([X, tensor("batch:4 length:6 d:9")], "length")
    with pytest.raises(mtf.ShapeError, match="the dimensions differ"):
        mtf.stack([X, tensor("batch:4 length:6 d:9")], "two")
