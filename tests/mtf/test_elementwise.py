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

X, Y, SCALE = tensor([B, L, D]), tensor([B, L, D], 1), tensor([D], 2)
POSITIVE = mtf.NamedTensor(jnp.abs(X.array) + 0.5, X.shape)


def in_one(functions, *tensors):
    """One tensor that holds the results of all `functions`: one compilation for all of them."""
    return mtf.stack([f(*tensors) for f in functions], "which")


def test_functions_of_one_tensor():
    mine = [mtf.exp, mtf.square, mtf.absolute, mtf.sin, mtf.cos, mtf.tanh, mtf.sigmoid, mtf.relu, mtf.gelu, mtf.silu]
    theirs = [
        jnp.exp,
        jnp.square,
        jnp.abs,
        jnp.sin,
        jnp.cos,
        jnp.tanh,
        jax.nn.sigmoid,
        jax.nn.relu,
        jax.nn.gelu,
        jax.nn.silu,
    ]
    check(lambda x: in_one(mine, x), lambda x: jnp.stack([f(x) for f in theirs]), [X], CASES, outside=True)


def test_functions_of_one_positive_tensor():
    mine = [mtf.log, mtf.sqrt, mtf.rsqrt, mtf.sign, lambda x: x**1.5, lambda x: 2**x, lambda x: 1 / x, lambda x: 1 - x]
    theirs = [jnp.log, jnp.sqrt, lambda x: x**-0.5, jnp.sign, lambda x: x**1.5, lambda x: 2.0**x, lambda x: 1 / x]
    theirs.append(lambda x: 1 - x)
    check(lambda x: in_one(mine, x), lambda x: jnp.stack([f(x) for f in theirs]), [POSITIVE], CASES)


def test_functions_of_two_tensors_of_one_shape_or_one_with_fewer_dimensions():
    mine = [mtf.add, mtf.subtract, mtf.multiply, mtf.divide, mtf.maximum, mtf.minimum]
    theirs = [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum]
    check(lambda x, y: in_one(mine, x, y), lambda x, y: jnp.stack([f(x, y) for f in theirs]), [X, POSITIVE], [])
    check(lambda x, y: in_one(mine, x, y + 9), lambda x, y: jnp.stack([f(x, y + 9) for f in theirs]), [X, SCALE], CASES)


def test_the_smaller_operand_may_come_first_and_in_another_order():
    small = tensor([D, B], 3)
    check(lambda s, x: s * x, lambda s, x: s.T[:, None] * x, [small, X], CASES)
    check(lambda s, x: mtf.where(s > 0, x, 0.0), lambda s, x: jnp.where(s.T[:, None] > 0, x, 0), [small, X], CASES)


def test_comparisons_and_logic():
    whole = integers([B, D], 3)
    other = integers([D], 3, 1)
    mine = [mtf.equal, mtf.not_equal, mtf.less, mtf.less_equal, mtf.greater, mtf.greater_equal]
    mine += [lambda a, b: mtf.logical_and(a > 0, b > 0), lambda a, b: (a > 0) | (b > 0), lambda a, b: (a > 1) & (b < 2)]
    mine += [lambda a, b: mtf.logical_not(a > b)]
    theirs = [jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal]
    theirs += [lambda a, b: (a > 0) & (b > 0), lambda a, b: (a > 0) | (b > 0), lambda a, b: (a > 1) & (b < 2)]
    theirs += [lambda a, b: ~(a > b)]
    check(lambda a, b: in_one(mine, a, b), lambda a, b: jnp.stack([f(a, b) for f in theirs]), [whole, other], CASES)


def test_shapes_neither_of_which_holds_the_other_need_an_output_shape():
    a, b = tensor([B]), tensor([D], 1)
    with pytest.raises(
        mtf.ShapeError, match=r"\[batch=4\] and \[d=8\] do not broadcast.*output_shape=\[batch=4, d=8\]"
    ):
        _ = a + b
    with pytest.raises(mtf.ShapeError, match=r"no dimension named d in \[batch=4\]"):
        mtf.add(a, b, output_shape=[B])
    check(lambda a, b: mtf.add(a, b, output_shape=[D, B]), lambda a, b: a + b[:, None], [a, b], CASES)


def test_dimensions_that_no_operand_has_are_repeated():
    check(
        lambda a: mtf.broadcast(a, [D, B, L]), lambda a: jnp.broadcast_to(a[:, None], (8, 4, 3)), [tensor([B])], CASES
    )


def test_one_name_with_two_sizes_is_refused():
    with pytest.raises(mtf.ShapeError, match="dimension batch has size 4 in one tensor and 5 in another"):
        _ = tensor([B]) + tensor("batch:5")


def test_an_array_without_names_is_refused_rather_than_broadcast_by_position():
    for array in (np.ones(4, np.float32), jnp.ones(4)):
        with pytest.raises(mtf.ShapeError, match="has no dimension names"):
            _ = array * tensor([B])
        with pytest.raises(mtf.ShapeError, match="has no dimension names"):
            _ = tensor([B]) + array


@pytest.mark.parametrize("scalar", [2, 2.0, np.float32(2), np.int32(2), jnp.float32(2)])
def test_scalars_of_every_kind_work_on_both_sides(scalar):
    x = tensor([B])
    for y in (x * scalar, scalar * x, x / (1 / scalar), scalar + x * 2 - scalar):
        assert isinstance(y, mtf.NamedTensor) and y.dtype == jnp.float32
        close(y, x.array * 2)


def test_python_scalars_do_not_widen_bf16():
    x = tensor([B]).astype(jnp.bfloat16)
    assert (x * 2.5 + 1).dtype == jnp.bfloat16
    assert mtf.cast(x, jnp.float32).dtype == jnp.float32


def test_the_gradient_stops_where_told():
    check(
        lambda x: mtf.stop_gradient(x) * x,
        lambda x: jax.lax.stop_gradient(x) * x,
        [X],
        CASES,
    )
    assert not bool(mtf.is_finite(X / 0.0).array.any())


def test_component_wise_operations_communicate_nothing():
    def program(x, y, s):
        return mtf.gelu(x * y + s) - mtf.where(x > s, x, y)

    assert not collectives(program, "rows:2;cols:2", "batch:rows;d:cols", X, Y, SCALE)


def test_the_gradient_of_what_is_broadcast_over_a_split_dimension_is_one_allreduce():
    def program(x, s):
        return jax.grad(lambda s: mtf.reduce_sum(x * s + s).array)(s)

    found = collectives(program, "rows:2;cols:2", "batch:rows", X, SCALE)
    assert found == {"allreduce": 2}  # the sum itself, and the gradient of the cast that both uses share


@given(st.data())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_broadcast_equals_numpy_under_any_layout(data):
    sizes = {"a": 2, "b": 4, "c": 3, "e": 2}
    full = data.draw(st.permutations(list(sizes)))
    part = data.draw(st.lists(st.sampled_from(full), unique=True))
    layout = data.draw(st.sampled_from(["a:r;b:c", "b:r;e:c", "a:c", "b:r;a:c", "e?:r;b:c"]))
    x, y = (tensor([mtf.Dimension(n, sizes[n]) for n in names], i) for i, names in enumerate([full, part]))
    wanted = np.einsum(x.array, [full.index(n) for n in full], y.array, [full.index(n) for n in part], range(4))
    result = run(lambda x, y: y * x, "r:2;c:2", layout, x, y)
    assert set(result.shape) == set(x.shape)
    close(mtf.transpose(result, x.shape), wanted)
