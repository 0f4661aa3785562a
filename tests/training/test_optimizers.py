import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mtf_experiments.errors import UserError
from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from mtf_experiments.training import optimizers
from mtf_experiments.training.optimizers import Adafactor, AdamW

# Small enough to be fast, and yet with variables that are factored, not factored, and stacked in two different depths.
MIN_FACTORED = 6
SHAPES = {
    "decoder/qkvo": "layers:3 four:4 heads:8 d_model:16 d_k:6",
    "encoder/feed_forward": "encoder_layers:2 d_model:16 d_ff:12",
    "decoder/scale": "layers:3 d_model:16",
    "positions": "length:5 d_model:16",
    "softmax": "d_model:16 vocab:24",
}
DECAYED = ("decoder/qkvo", "encoder/feed_forward", "softmax")
STEPS = 20


def shape(text):
    return Shape(Dimension(n, int(s)) for n, s in (d.split(":") for d in text.split()))


def named(arrays):
    return {name: NamedTensor(jnp.asarray(a), shape(SHAPES[name])) for name, a in arrays.items()}


def numbers(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {n: (scale * rng.standard_normal(shape(s).sizes)).astype(np.float32) for n, s in SHAPES.items()}


def initial():
    # Standard deviations that lie on both sides of the smallest parameter scale.
    values = numbers(0)
    return {name: v * np.float32(10.0 ** (-i)) for i, (name, v) in enumerate(values.items())}


def gradients(step):
    return numbers(100 + step, scale=0.1 * (1 + step % 3))


def learning_rate(step):
    return 0.1 / (1 + step % 4)


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def oracle_adafactor(config, steps=STEPS):
    """Adafactor in float64, one variable (or one layer of it) at a time."""
    result = {}
    for name, start in initial().items():
        variables = [start] if "layers" not in SHAPES[name] else list(start)
        for i, variable in enumerate(variables):
            p, row, column, v, m = variable.astype(np.float64), 0.0, 0.0, 0.0, 0.0
            order = np.argsort(p.shape)
            factor = config.factored and p.ndim > 1 and p.shape[order[-2]] >= config.min_dim_size_to_factor
            for t in range(steps):
                g = gradients(t)[name].astype(np.float64)
                g = g if len(variables) == 1 else g[i]
                b = 1 - (max(t - config.decay_offset, 0) + 1.0) ** -config.decay_exponent
                square = g**2 + config.epsilon
                if factor:
                    large, second = order[-1], order[-2]
                    row = b * row + (1 - b) * square.mean(axis=large, keepdims=True)
                    column = b * column + (1 - b) * square.mean(axis=second, keepdims=True)
                    u = g / np.sqrt(row * column / row.mean(axis=second, keepdims=True))
                else:
                    v = b * v + (1 - b) * square
                    u = g / np.sqrt(v)
                if config.clipping_threshold is not None:
                    u = u / max(1.0, rms(u) / config.clipping_threshold)
                if config.beta1:
                    m = config.beta1 * m + (1 - config.beta1) * u
                    u = m
                if config.multiply_by_parameter_scale:
                    u = u * max(rms(p), config.min_parameter_scale)
                if config.weight_decay and name in DECAYED:
                    u = u + config.weight_decay * p
                p = p - learning_rate(t) * u
            variables[i] = p
        result[name] = variables[0] if "layers" not in SHAPES[name] else np.stack(variables)
    return result


def oracle_adamw(config):
    p = {name: v.astype(np.float64) for name, v in initial().items()}
    m = {name: 0.0 for name in p}
    v = {name: 0.0 for name in p}
    for t in range(STEPS):
        g = {name: a.astype(np.float64) for name, a in gradients(t).items()}
        norm = np.sqrt(sum(np.sum(a**2) for a in g.values()))
        for name in p:
            clipped = g[name] * (min(1.0, config.clip_global_norm / norm) if config.clip_global_norm else 1.0)
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * clipped
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * clipped**2
            u = (m[name] / (1 - config.beta1 ** (t + 1))) / (
                np.sqrt(v[name] / (1 - config.beta2 ** (t + 1))) + config.epsilon
            )
            if name in DECAYED:
                u = u + config.weight_decay * p[name]
            p[name] = p[name] - learning_rate(t) * u
    return p


def stepper(tx):
    return jax.jit(lambda g, s, p, lr: optimizers.apply(tx, g, s, p, lr))


def run(config, steps=STEPS, place=lambda shape: None):
    params = named(initial())
    tx = config.transformation(params)
    state = optimizers.init(tx, params, optimizers.state_shardings(tx, params, place) if place(Shape()) else None)

    def put(tree):
        return {n: NamedTensor(jax.device_put(t.array, place(t.shape)), t.shape) for n, t in tree.items()}

    params = put(params)
    update = stepper(tx)
    for t in range(steps):
        params, state = update(put(named(gradients(t))), state, params, learning_rate(t))
    return params, state


def assert_equal(params, expected, rtol=2e-4):
    for name, tensor in params.items():
        assert tensor.shape == shape(SHAPES[name])
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(np.asarray(tensor.array), expected[name], rtol=rtol, atol=rtol * scale, err_msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"factored": False, "beta1": 0.9},
        {"min_dim_size_to_factor": 13, "clipping_threshold": None},
        {"clipping_threshold": 0.3, "multiply_by_parameter_scale": False},
        {"beta1": 0.9, "weight_decay": 0.1, "decay_offset": 3},
    ],
    ids=str,
)
def test_adafactor_equals_a_numpy_oracle_over_twenty_steps(settings):
    config = Adafactor(**{"min_dim_size_to_factor": MIN_FACTORED, **settings})
    params, state = run(config)
    assert_equal(params, oracle_adafactor(config))
    assert optimizers.updates_done(state) == STEPS


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"clip_global_norm": 0.5, "beta2": 0.999}], ids=str)
def test_adamw_equals_a_numpy_oracle_over_twenty_steps(settings):
    config = AdamW(**settings)
    params, state = run(config)
    assert_equal(params, oracle_adamw(config))
    assert optimizers.updates_done(state) == STEPS


@pytest.mark.parametrize("offset", [0, 1, 1000])
def test_decay_offset_does_not_turn_a_fresh_state_into_nan(offset):
    params, _ = run(Adafactor(min_dim_size_to_factor=MIN_FACTORED, decay_offset=offset), steps=10)
    assert all(np.isfinite(p.array).all() for p in params.values())


def test_decay_offset_restarts_the_decay_at_a_restored_step():
    few = ("softmax", "decoder/scale")
    params = {n: p for n, p in named(initial()).items() if n in few}
    fresh, tuned = (Adafactor(decay_offset=o).transformation(params) for o in (0, 1000))
    first = optimizers.init(fresh, params)
    later = jax.tree.map_with_path(
        lambda path, x: jnp.int32(1000) if optimizers._key(path[-1]) == "count" else x, first
    )
    fresh_step, tuned_step = stepper(fresh), stepper(tuned)
    for t in range(3):
        one, first = fresh_step({n: g for n, g in named(gradients(t)).items() if n in few}, first, params, 0.1)
        two, later = tuned_step({n: g for n, g in named(gradients(t)).items() if n in few}, later, params, 0.1)
        for name in one:
            np.testing.assert_array_equal(one[name].array, two[name].array)


def test_momentum_follows_a_changed_learning_rate_at_once():
    params = named(initial())
    tx = Adafactor(beta1=0.9).transformation(params)
    state = optimizers.init(tx, params)
    step = stepper(tx)
    moved, state = step(named(gradients(0)), state, params, 1.0)
    still, _ = step(named(gradients(1)), state, moved, 0.0)
    for name in params:
        np.testing.assert_array_equal(still[name].array, moved[name].array)


@pytest.mark.parametrize(
    ("optimizer", "expected_norm"), [(Adafactor(weight_decay=0.1), 0.99), (AdamW(weight_decay=0.1), 0.99)]
)
def test_zero_gradients_with_decay_shrink_exactly_the_documented_parameters(optimizer, expected_norm):
    params = named(initial())
    tx = optimizer.transformation(params)
    zeros = named({n: np.zeros_like(a) for n, a in initial().items()})
    new, _ = stepper(tx)(zeros, optimizers.init(tx, params), params, 0.1)
    for name, p in params.items():
        exempt = name not in DECAYED
        expected = np.asarray(p.array) * (1.0 if exempt else expected_norm)
        np.testing.assert_allclose(np.asarray(new[name].array), expected, rtol=1e-6)
        line = next(x for x in optimizers.describe(optimizer, params).split("\n") if f" {name} [" in x)
        assert line.startswith("no decay" if exempt else "decays")


def test_decay_mask_matches_whole_words_not_substrings():
    matrix, vector = Shape([Dimension("a", 4), Dimension("b", 4)]), Shape([Dimension("layers", 2), Dimension("b", 4)])
    names = {
        "rescale/kernel": matrix,
        "unscaled": matrix,
        "norm_scale": matrix,
        "biased": matrix,
        "bias": vector,
        "gain": vector,
    }
    params = {n: NamedTensor(jnp.ones(s.sizes), s) for n, s in names.items()}
    decayed = AdamW(weight_decay=0.1).decayed(params)
    assert {n for n, d in decayed.items() if d} == {"rescale/kernel", "unscaled", "biased"}


def mesh_2x4():
    return jax.make_mesh((2, 4), ("rows", "cols"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def sharding_of(layout):
    mesh = mesh_2x4()
    return lambda dims: NamedSharding(mesh, PartitionSpec(*(layout.get(d.name) for d in dims)))


@pytest.mark.parametrize(
    "config", [Adafactor(min_dim_size_to_factor=MIN_FACTORED, beta1=0.9), AdamW(clip_global_norm=0.5)]
)
def test_sharded_updates_equal_unsharded_ones(config):
    plain, plain_state = run(config, steps=5)
    split, split_state = run(
        config, steps=5, place=sharding_of({"d_model": "rows", "d_ff": "cols", "vocab": "cols", "heads": "cols"})
    )
    assert_equal(split, {n: np.asarray(p.array) for n, p in plain.items()}, rtol=1e-5)
    for one, two in zip(jax.tree.leaves(plain_state), jax.tree.leaves(split_state), strict=True):
        np.testing.assert_allclose(np.asarray(two), np.asarray(one), rtol=1e-4, atol=1e-6 * np.abs(one).max())


def test_every_state_leaf_is_placed_like_its_parameter():
    params = named(initial())
    tx = Adafactor(min_dim_size_to_factor=MIN_FACTORED, beta1=0.9).transformation(params)
    layout = {"heads": "cols", "d_ff": "cols", "vocab": "cols", "d_model": "rows"}
    state = optimizers.init(tx, params, optimizers.state_shardings(tx, params, sharding_of(layout)))
    dimensions = optimizers.state_dimensions(tx, params)
    leaves = jax.tree.leaves_with_path(state)
    shapes = jax.tree.leaves(dimensions, is_leaf=lambda x: isinstance(x, Shape))
    assert len(leaves) == len(shapes) > 15
    for (path, leaf), dims in zip(leaves, shapes, strict=True):
        assert leaf.shape == dims.sizes
        split = 1
        for d in dims:
            split *= {"cols": 4, "rows": 2}.get(layout.get(d.name), 1)
        assert leaf.addressable_shards[0].data.size * split == leaf.size, jax.tree_util.keystr(path)


@pytest.mark.parametrize("sizes", [(4, 8, 16, 8), (8, 8), (3, 4, 16, 16, 16), (9, 7, 8)])
@pytest.mark.parametrize("stacked", [False, True])
def test_factored_moments_keep_the_dimensions_that_optax_keeps_even_for_equal_sizes(sizes, stacked):
    dims = Shape([Dimension("layers", 2)] * stacked + [Dimension(f"d{i}", s) for i, s in enumerate(sizes)])
    params = {"w": NamedTensor(jnp.ones(dims.sizes), dims)}
    tx = Adafactor(min_dim_size_to_factor=2).transformation(params)
    g = np.random.default_rng(0).standard_normal(dims.sizes).astype(np.float32)
    _, state = stepper(tx)({"w": NamedTensor(jnp.asarray(g), dims)}, optimizers.init(tx, params), params, 0.1)
    shapes = jax.tree.leaves(optimizers.state_dimensions(tx, params), is_leaf=lambda x: isinstance(x, Shape))
    checked = 0
    for (path, leaf), kept in zip(jax.tree.leaves_with_path(state), shapes, strict=True):
        if optimizers._key(path[-2]) in ("v_row", "v_col"):
            averaged = tuple(i for i, d in enumerate(dims) if d not in kept)
            np.testing.assert_allclose(np.asarray(leaf), np.mean(g**2, axis=averaged), rtol=1e-5)
            checked += 1
    assert checked == 2


def test_paper_sized_state_needs_no_arrays_and_is_a_small_part_of_the_parameters():
    dims = shape("layers:6 four:4 heads:256 d_model:1024 d_k:256")
    params = {"qkvo": NamedTensor(jax.ShapeDtypeStruct(dims.sizes, jnp.float32), dims)}
    leaves = jax.tree.leaves(
        optimizers.state_dimensions(Adafactor().transformation(params), params), is_leaf=lambda x: isinstance(x, Shape)
    )
    largest = max(leaves, key=lambda s: s.elements)
    assert largest.elements * 256 == dims.elements
    assert sum(s.elements for s in leaves) < dims.elements / 100


def test_moments_do_not_share_a_buffer_and_shared_buffers_are_found():
    params = named(initial())
    for config in (AdamW(), Adafactor(beta1=0.9, factored=False)):
        assert optimizers.aliased(optimizers.init(config.transformation(params), params)) == []
    zeros = jnp.zeros(4)
    assert optimizers.aliased({"mu": zeros, "nu": zeros}) == [("mu", "nu")]


def test_two_donated_steps_equal_two_undonated_ones():
    params = named(initial())
    config = AdamW()
    tx = config.transformation(params)
    expected, _ = run(config, steps=2)
    step = jax.jit(lambda g, s, p, lr: optimizers.apply(tx, g, s, p, lr), donate_argnums=(1, 2))
    state = optimizers.init(tx, params)
    for t in range(2):
        params, state = step(named(gradients(t)), state, params, learning_rate(t))
    assert_equal(params, {n: np.asarray(p.array) for n, p in expected.items()}, rtol=1e-6)


def test_state_with_disagreeing_counters_is_refused():
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        optimizers.updates_done((optax.EmaState(jnp.int32(1), {}), optax.EmaState(jnp.int32(2), {})))


def test_illegal_settings_are_refused_by_name():
    with pytest.raises(UserError, match="beta1 is 1.5"):
        Adafactor(beta1=1.5)
    with pytest.raises(UserError, match="decay_offset is -1"):
        Adafactor(decay_offset=-1)
    with pytest.raises(UserError, match="AdamW.beta2"):
        AdamW(beta2=1.0)
