import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_experiments import mtf
from mtf_experiments.mtf.random import _multiply_add
from tests.mtf.helpers import close, dims, mesh_of, run, tensor

KEY = jax.random.key(20)
LAYOUTS = [("rows:8", "a:rows"), ("rows:2;cols:4", "b:rows;a:cols"), ("rows:2;cols:2", "a:rows;b:cols")]


SHAPE, ODD = dims("a:16 b:8"), dims("odd:31 a:16 strange:1 c:5")


def drawn(key):
    """All kinds of numbers, over shapes with odd sizes and with split ones."""
    source = mtf.Random(key)
    return {
        "bits": source.bits(ODD),
        "uniform": source.uniform(ODD, -0.5, 3.0),
        "normal": source.normal(SHAPE),
        "scaled normal": source.normal(ODD, 0.02),
        "scalar": source.normal([]),
    }


@functools.cache
def drawn_by_jax():
    shape, odd = (16, 8), (31, 16, 1, 5)
    return {
        "bits": jax.random.bits(KEY, odd),
        "uniform": jax.random.uniform(KEY, odd, minval=-0.5, maxval=3.0),
        "normal": jax.random.normal(KEY, shape),
        "scaled normal": jax.lax.erf_inv(jax.random.uniform(KEY, odd, minval=np.nextafter(np.float32(-1), 0)))
        * np.float32(np.sqrt(2) * 0.02),
        "scalar": jax.random.normal(KEY, ()),
    }


@pytest.mark.parametrize("mesh, layout", LAYOUTS)
def test_every_layout_draws_what_jax_draws_for_the_whole_tensor_bit_for_bit(mesh, layout):
    result = run(drawn, mesh, layout, KEY)
    for name, value in drawn_by_jax().items():
        assert result[name].array.dtype == value.dtype
        np.testing.assert_array_equal(result[name].array, value, err_msg=name)
    np.testing.assert_allclose(result["scaled normal"].array, jax.random.normal(KEY, (31, 16, 1, 5)) * 0.02, rtol=3e-7)


def test_an_optimising_compiler_leaves_the_last_bit_the_same_under_every_layout():
    jax.config.update("jax_disable_most_optimizations", False)

    def program():
        return mtf.Random(KEY).uniform(ODD, -0.5, 3.0), mtf.Random(KEY).normal(ODD, 0.02)

    (x, y), (x_alone, y_alone) = run(program, "rows:2", "a:rows"), jax.jit(program)()
    np.testing.assert_array_equal(x.array, x_alone.array)
    np.testing.assert_array_equal(y.array, y_alone.array)


def test_the_positions_of_jax_are_row_major_over_the_whole_tensor():
    """What the comparison above rests on: without it, JAX's own numbers depend on the sharding."""
    assert jax.config.jax_threefry_partitionable
    flat = jax.random.bits(KEY, (496,))
    np.testing.assert_array_equal(jax.random.bits(KEY, (31, 16)), flat.reshape(31, 16))


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**16, 2**16 - 1, 2**31, 2**32 - 1]),
    st.integers(0, 2**32 - 1) | st.sampled_from([0, 2**32 - 1]),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_positions_beyond_32_bits_equal_python_integers(value, factor, term):
    high, low = _multiply_add(jnp.uint32(value >> 32), jnp.uint32(value & 0xFFFFFFFF), factor, jnp.uint32(term))
    assert (int(high) << 32) + int(low) == (value * factor + term) % 2**64


def test_a_window_far_into_a_tensor_of_more_than_2_to_the_32_elements():
    """Rows 2**22 + 1 and 2**22 + 2 of a [2**23, 2**12] tensor, against the generator at 64-bit positions."""
    source = mtf.Random(KEY).window("rows", 2**22 + 1, 2**23)
    wide = 2**12
    bits = run(lambda: source.bits(dims(f"rows:2 wide:{wide}")), "r:2;c:2", "rows:r;wide:c")
    positions = (2**22 + 1) * wide + np.arange(2 * wide, dtype=np.uint64)
    assert positions[-1] > 2**32
    words = jax.random.key_data(KEY)
    high, low = (positions >> np.uint64(32)).astype(np.uint32), (positions & np.uint64(2**32 - 1)).astype(np.uint32)
    a, b = jax.extend.random.threefry2x32_p.bind(words[0], words[1], jnp.asarray(high), jnp.asarray(low))
    np.testing.assert_array_equal(bits.array.reshape(-1), a ^ b)


@pytest.mark.parametrize("name", ["first", "middle"])
def test_a_window_draws_the_rows_of_the_whole(name):
    axis = ["first", "middle", "last"].index(name)
    sizes = [6, 8, 10]
    whole_dims = [mtf.Dimension(n, s) for n, s in zip(["first", "middle", "last"], sizes, strict=True)]
    whole = mtf.Random(KEY).normal(whole_dims)
    part_dims = [mtf.Dimension(d.name, 4 if i == axis else d.size) for i, d in enumerate(whole_dims)]

    def program(start):
        return mtf.Random(KEY).window(name, start, sizes[axis]).normal(part_dims)

    part = run(program, "rows:2", f"{name}:rows", jnp.int32(2))
    np.testing.assert_array_equal(part.array, np.take(np.asarray(whole.array), np.arange(2, 6), axis))


def test_names_and_numbers_fold_into_independent_sources():
    shape = dims("a:64")
    source = mtf.Random(KEY)
    draws = [source, source.fold("x"), source.fold("y"), source.fold(0), source.fold(1), source.fold("x").fold("y")]
    rows = {tuple(np.asarray(r.bits(shape).array).tolist()) for r in draws}
    assert len(rows) == len(draws)
    np.testing.assert_array_equal(source.fold("x").bits(shape).array, mtf.Random(KEY).fold("x").bits(shape).array)
    folded = jax.jit(lambda i: source.fold(i).bits(shape).array)(jnp.int32(3))
    np.testing.assert_array_equal(folded, source.fold(3).bits(shape).array)


def test_keys_of_another_generator_or_several_keys_are_refused():
    for key in (jax.random.key(0, impl="rbg"), jax.random.split(KEY)):
        with pytest.raises(ValueError, match="is not one threefry2x32 key"):
            mtf.Random(key).bits(dims("a:4"))


def test_normals_have_the_moments_of_the_normal_distribution():
    n = 1_000_000
    x = np.asarray(mtf.Random(KEY).normal([mtf.Dimension("n", n)], 0.5).array, np.float64) / 0.5
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.std() - 1) < 5 / (2 * n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert abs((np.abs(x) < 1).mean() - 0.682689) < 5 * (0.2166 / n) ** 0.5
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 5 / n**0.5


def test_uniforms_fill_their_range_evenly():
    x = np.asarray(mtf.Random(KEY).uniform([mtf.Dimension("n", 1_000_000)], -2.0, 6.0).array)
    assert x.min() >= -2 and x.max() < 6
    counts, _ = np.histogram(x, 16, (-2, 6))
    assert np.abs(counts - 62500).max() < 5 * 62500**0.5


def test_the_mask_of_dropout_is_one_mask_whatever_the_layout():
    """Different on the shards of the batch, the same on the replicas over the model dimension."""
    x = mtf.NamedTensor(jnp.ones((8, 64)), dims("batch:8 d:64"))

    def program(x):
        return mtf.dropout(x, 0.5, mtf.Random(KEY).fold("dropout"))

    alone = program(x).array
    for layout in ("batch:data", "batch:data;d:model", "d:data"):
        y = mtf.spmd(program, mesh_of("data:2;model:2"), layout)(x).array
        np.testing.assert_array_equal(y, alone)
        if layout == "batch:data":
            shards = [np.asarray(s.data) for s in sorted(y.addressable_shards, key=lambda s: s.device.id)]
            np.testing.assert_array_equal(shards[0], shards[1])  # replicas over model
            np.testing.assert_array_equal(shards[2], shards[3])
            assert (shards[0] != shards[2]).any()  # shards of the batch
    assert len({tuple(row) for row in np.asarray(alone).tolist()}) == 8


def test_dropout_keeps_the_mean_and_scales_what_it_keeps():
    x = mtf.NamedTensor(jnp.ones(100_000), dims("n:100000"))
    y = np.asarray(mtf.dropout(x, 0.1, mtf.Random(KEY)).array)
    assert set(np.unique(y)) == {0, np.float32(1 / 0.9)}
    assert abs((y == 0).mean() - 0.1) < 5 * (0.09 / 100_000) ** 0.5
    assert mtf.dropout(x, 0.0, mtf.Random(KEY)) is x
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match="legal are 0 <= rate < 1"):
            mtf.dropout(x, rate, mtf.Random(KEY))


def test_the_noise_of_dropout_may_be_shared_along_a_dimension_and_its_gradient_is_the_mask():
    x = tensor("batch:4 length:6 d:8")

    def program(x):
        def loss(x):
            return mtf.reduce_sum(mtf.dropout(x, 0.5, mtf.Random(KEY), shared=["length"])).array

        return jax.grad(loss)(x)

    mask = run(program, "rows:2;cols:2", "length:rows;batch:cols", x).array
    np.testing.assert_array_equal(mask, np.broadcast_to(mask[:, :1], mask.shape))
    assert set(np.unique(mask)) == {0, 2}
    close(mask, program(x))


def test_dropout_of_half_precision_stays_half():
    x = mtf.NamedTensor(jnp.ones(64, jnp.bfloat16), dims("d:64"))
    assert run(lambda x: mtf.dropout(x, 0.3, mtf.Random(KEY)), "rows:2", "d:rows", x).dtype == jnp.bfloat16
