import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from tests.mtf.helpers import close, collectives, dims, mesh_of, run, tensor

BATCH, IO, HIDDEN = dims("batch:8 io:4 hidden:8")
X, WI, WO = tensor([BATCH, IO]), tensor([IO, HIDDEN], 1), tensor([HIDDEN, IO], 2)


def two_layers(x, wi, wo):
    h = mtf.relu(mtf.einsum([x, wi], [BATCH, HIDDEN]))
    return mtf.einsum([h, wo], [BATCH, IO])


@pytest.mark.parametrize(
    "mesh, layout",
    [
        ("all:1", "batch:all"),
        ("all:8", "batch:all"),
        ("all:8", "hidden:all"),
        ("rows:2;cols:4", "batch:rows;hidden:cols"),
        ("rows:2;cols:2;planes:2", "batch:rows;hidden:cols;io:planes"),
    ],
)
def test_the_layout_decides_nothing_but_placement(mesh, layout):
    y = run(two_layers, mesh, layout, X, WI, WO)
    close(y, np.maximum(np.asarray(X.array) @ WI.array, 0) @ WO.array)
    expected = mtf.sharding(y.shape, layout, mesh_of(mesh))
    assert y.array.sharding.is_equivalent_to(expected, 2)


@pytest.mark.parametrize(
    "layout, forward",
    [
        ("", {}),
        ("batch:rows", {}),
        ("hidden:rows", {"allreduce": 1}),
        ("batch:rows;hidden:cols", {"allreduce": 1}),
        ("batch:rows;hidden:cols;io:planes", {"allreduce": 2}),
    ],
)
def test_what_the_two_layers_communicate(layout, forward):
    mesh = "rows:2;cols:2;planes:2"
    assert collectives(two_layers, mesh, layout, X, WI, WO) == forward


def test_pytrees_plain_arrays_scalars_and_none_pass_through():
    def program(params, x, plain, number, key, nothing):
        y = mtf.einsum([x, params["layers"][0]["w"]], [BATCH, HIDDEN]) * number
        noise = mtf.Random(key).uniform(x.shape)
        return {"y": [y, (noise, plain * 2)], "none": nothing, "sum": mtf.reduce_sum(y).array}

    params = {"layers": [{"w": WI}], "empty": {}}
    arguments = (params, X, np.arange(3), 2.0, jax.random.key(0), None)
    alone, split = program(*arguments), run(program, "rows:2;cols:2", "batch:rows;hidden:cols", *arguments)
    assert jax.tree.structure(alone) == jax.tree.structure(split)
    jax.tree.map(close, split, alone)


def test_one_program_serves_different_shapes_and_types_in_turn():
    program = mtf.spmd(lambda x: mtf.reduce_sum(x, "d") * 2, mesh_of("rows:2"), "d:rows")
    for text in ("d:4 batch:2", "d:8 other:3", "d:4 batch:2"):
        x = tensor(text)
        y = program(x)
        close(y, np.sum(x.array, 0) * 2)
        assert y.shape == x.shape.without("d")
    assert program(mtf.cast(tensor("d:4"), jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(mtf.LayoutError, match="size 5"):
        program(tensor("d:5"))


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit])
def test_what_was_traced_under_one_layout_is_not_used_under_another(wrap):
    """The inner function's arguments look alike under both layouts; what it must do with them does not."""
    inner = wrap(lambda x: mtf.reduce_sum(mtf.rename(x, io="part") * 2, "part"))

    def program(x):
        return inner(x)

    mesh = mesh_of("rows:2;cols:2")
    close(program(X), X.array.sum(1) * 2)
    for layout in ("part:rows", "part:cols;batch?:rows", "part:rows"):
        close(mtf.spmd(program, mesh, layout)(X), X.array.sum(1) * 2)
    with pytest.raises(mtf.LayoutError, match="matches no dimension"):
        mtf.spmd(program, mesh, "pert:rows")(X)


def test_donated_arguments_are_used_up_and_the_result_is_right():
    mesh = mesh_of("rows:2")
    x = mtf.place(tensor([BATCH, IO]), mesh, "batch:rows")
    before = np.asarray(x.array)
    y = mtf.spmd(lambda x, y: x + y, mesh, "batch:rows", donate=(0,))(x, X)
    close(y, before + X.array)
    assert x.array.is_deleted() and not X.array.is_deleted()


def test_placing_splits_named_tensors_and_repeats_plain_arrays():
    mesh = mesh_of("rows:2;cols:2")
    placed = mtf.place({"x": X, "step": np.int32(3)}, mesh, "batch:rows")
    assert {s.data.shape for s in placed["x"].array.addressable_shards} == {(4, 4)}
    assert len(placed["step"].sharding.device_set) == 4 and int(placed["step"]) == 3
    with pytest.raises(mtf.LayoutError, match="size 4"):
        mtf.place(X, mesh_of("rows:8"), "io:rows")


def test_replicas_hold_the_same_numbers():
    def program(x, wi, wo):
        loss = lambda wi: mtf.reduce_sum(mtf.square(two_layers(x, wi, wo))).array  # noqa: E731
        return jax.grad(loss)(wi)

    slope = run(program, "rows:2;cols:2", "batch:rows;hidden:cols", X, WI, WO).array
    by_index = {}
    for shard in slope.addressable_shards:
        by_index.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    assert len(by_index) == 2
    for first, second in by_index.values():
        np.testing.assert_array_equal(first, second)


def test_programs_do_not_nest():
    inner = mtf.spmd(two_layers, mesh_of("rows:2"), "batch:rows")
    with pytest.raises(RuntimeError, match="do not nest"):
        run(lambda *a: inner(*a), "rows:2", "batch:rows", X, WI, WO)


def test_an_error_inside_a_program_leaves_no_layout_in_force():
    def broken(x):
        raise KeyError("broken")

    with pytest.raises(KeyError):
        run(broken, "rows:2", "batch:rows", X)
    assert not mtf.placement().applied and mtf.placement().layout == mtf.Layout("")
    close(mtf.reduce_sum(X), X.array.sum())


def test_tracing_a_large_program_needs_no_devices():
    big = [mtf.Dimension(n, s) for n, s in (("batch", 4096), ("io", 2**14), ("hidden", 2**17))]
    batch, io, hidden = big
    shapes = [jax.ShapeDtypeStruct(tuple(d.size for d in s), jnp.float32) for s in ([batch, io], [io, hidden])]
    x, w = (mtf.NamedTensor(a, s) for a, s in zip(shapes, ([batch, io], [io, hidden]), strict=True))
    mesh = mtf.abstract_mesh("rows:16;cols:32")
    program = mtf.spmd(lambda x, w: mtf.einsum([x, w], [batch, hidden]), mesh, "batch:rows;hidden:cols")
    assert jax.eval_shape(program, x, w).shape == (batch, hidden)
    output = mtf.check_program(
        lambda x, w: mtf.einsum([x, w], [batch, hidden]), mtf.mesh_shape_of(mesh), mtf.Layout("batch:rows"), x, w
    )
    assert output.array.shape == (4096, 2**17)
