import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from tests.mtf.helpers import close, collectives, dims, mesh_of, run, tensor

X, W = tensor("batch:4 d:8"), tensor("d:8 f:4", 1)
OUT = dims("batch:4 f:4")


def test_an_array_of_other_sizes_is_refused():
    with pytest.raises(
        mtf.ShapeError, match=r"sizes \[4, 7\] is no tensor of shape \[batch=4, d=8\], which needs \[4, 8\]"
    ):
        mtf.NamedTensor(np.zeros((4, 7)), X.shape)

    def program(x):
        return mtf.NamedTensor(jnp.zeros((4, 8)), x.shape)

    with pytest.raises(mtf.ShapeError, match=r"needs \[2, 8\]"):
        run(program, "rows:2", "batch:rows", X)


def test_a_tensor_is_a_pytree_of_one_array_that_keeps_its_dimensions():
    leaves, structure = jax.tree.flatten(X)
    assert len(leaves) == 1 and jax.tree.unflatten(structure, leaves).shape == X.shape
    assert jax.tree.map(lambda a: a * 2, {"x": X})["x"].shape == X.shape
    assert jax.eval_shape(lambda x: x * 2, X).shape == X.shape


def test_a_whole_tensor_from_outside_is_not_taken_for_a_slice():
    """Each processor would sum the whole of it, and the sum over processors be too large."""
    with pytest.raises(mtf.ShapeError, match=r"made outside spmd and is used inside.*\[2, 8\]"):
        run(lambda y: mtf.reduce_sum(X) * y, "rows:2", "batch?:rows", mtf.NamedTensor(1.0, []))
    with pytest.raises(mtf.ShapeError, match="made outside spmd"):
        run(lambda y: mtf.einsum([X, y], OUT), "rows:2", "batch:rows", W)


def test_a_tensor_from_outside_that_nothing_splits_may_be_used_inside():
    for _ in range(2):  # the second program must not find what the first kept
        y = run(lambda x: mtf.einsum([x, W], OUT), "rows:2", "batch:rows", X)
        close(y, X.array @ W.array)
        slope = run(
            lambda x: jax.grad(lambda x: mtf.reduce_sum(mtf.einsum([x, W], OUT)).array)(x), "rows:2", "batch:rows", X
        )
        close(slope, np.tile(np.asarray(W.array).sum(1), (4, 1)))


@pytest.mark.parametrize("inner", ["checkpoint", "grad", "scan", "jit", "cond", "vmap"])
def test_casts_kept_on_a_closed_over_tensor_do_not_leak_out_of_an_inner_function(inner):
    """`w` is cast first inside the inner function, then outside, then inside another."""
    three = mtf.Dimension("three", 3)

    def loss(x, w):
        def product(x):
            return mtf.reduce_sum(mtf.square(mtf.einsum([x, w], OUT)))

        def inside(x):
            if inner == "checkpoint":
                return jax.checkpoint(product)(x)
            if inner == "grad":
                return mtf.reduce_sum(jax.grad(lambda x: product(x).array)(x))
            if inner == "scan":
                total, _ = mtf.scan(lambda c, i: (c + product(x), i), mtf.zeros([]), mtf.arange(three), three)
                return total
            if inner == "jit":
                return jax.jit(product)(x)
            if inner == "cond":
                return mtf.NamedTensor(jax.lax.cond(product(x).array > -1, lambda: product(x).array, lambda: 0.0), [])
            return mtf.NamedTensor(jax.vmap(lambda s: product(x).array * s)(jnp.arange(3.0)).sum(), [])

        return (inside(x) + product(x) + inside(x * 2)).array

    def program(x, w):
        return jax.value_and_grad(loss, argnums=(0, 1))(x, w), loss(x, w)

    alone = jax.jit(program)(X, W)
    split = run(program, "rows:2;cols:2", "batch:rows;f:cols", X, W)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), split, alone)


def test_casts_shared_by_consumers_of_different_needs():
    """x is needed varying over rows by one product and over rows and cols by another."""
    a, b = tensor("d:8 heads:4", 2), tensor("d:8 f:4 heads:4", 3)

    def program(x, a, b):
        def loss(x):
            one = mtf.einsum([x, a], dims("batch:4 heads:4"))
            two = mtf.einsum([x, b], dims("batch:4 f:4 heads:4"))
            return mtf.reduce_sum(mtf.square(two * one)).array

        return jax.grad(loss)(x)

    alone = program(X, a, b)
    close(run(program, "r:2;c:2", "heads:r;f:c", X, a, b), alone, 1e-4)
    assert collectives(program, "r:2;c:2", "heads:r", X, a, b) == {"allreduce": 2}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_])
def test_tensors_of_every_type_pass_through_a_program(dtype):
    x = mtf.NamedTensor((np.arange(32).reshape(4, 8) % 5).astype(dtype), X.shape)

    def program(x):
        moved = mtf.rename(mtf.transpose(x, ["d", "batch"]), d="e", batch="b")
        return mtf.reshape(moved, dims("e:8 b:2 c:2")), mtf.reduce_max(x, "d")

    moved, most = run(program, "r:2;c:2", "d:r;b:r;batch:c", x)
    assert moved.dtype == x.dtype
    np.testing.assert_array_equal(moved.array, np.asarray(x.array).T.reshape(8, 2, 2))
    np.testing.assert_array_equal(most.array, np.asarray(x.array).max(1))


def test_the_representation_names_dimensions_and_type():
    assert repr(X) == "NamedTensor([batch=4, d=8], float32)"
    mesh = mesh_of("rows:2")
    assert "batch=4" in repr(mtf.place(X, mesh, "batch:rows"))
