"""Small checkpoints for tests: parameters and optimizer states made without any update, on any mesh."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mtf_experiments.mtf import Dimension, NamedTensor, Shape
from mtf_experiments.training import optimizers
from mtf_experiments.training.checkpoints import flatten
from mtf_experiments.training.optimizers import Adafactor

ROOT = Path(__file__).parents[2]
SHAPES = {
    "decoder/qkv": Shape([Dimension("layers", 2), Dimension("heads", 8), Dimension("d_model", 16)]),
    "decoder": Shape([Dimension("d_model", 16)]),  # a name that is a folder of another one
    "softmax": Shape([Dimension("d_model", 16), Dimension("vocab", 24)]),
}
LAYOUT = {"heads": "cols", "vocab": "cols", "d_model": "rows"}
OPTIMIZER = Adafactor(min_dim_size_to_factor=4, beta1=0.9)


def place(rows, cols):
    devices = np.array(jax.devices()[: rows * cols]).reshape(rows, cols)
    mesh = jax.sharding.Mesh(devices, ("rows", "cols"))
    return lambda dims: NamedSharding(mesh, PartitionSpec(*(LAYOUT.get(d.name) for d in dims)))


def make_params(seed=0, sharding_of=None):
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in SHAPES.items():
        array = jnp.asarray(rng.standard_normal(shape.sizes), jnp.bfloat16 if name == "decoder" else jnp.float32)
        params[name] = NamedTensor(array if sharding_of is None else jax.device_put(array, sharding_of(shape)), shape)
    return params


def make_state(step, sharding_of=None):
    """Parameters and an optimizer state as after `step` updates, without doing them."""
    params = make_params(step, sharding_of)
    tx = OPTIMIZER.transformation(params)
    state = optimizers.init(
        tx, params, None if sharding_of is None else optimizers.state_shardings(tx, params, sharding_of)
    )
    return params, jax.tree.map(lambda x: jnp.int32(step) if x.dtype == jnp.int32 else x + step / 7, state)


def abstract(params, sharding_of):
    shaped = lambda p, s: jax.ShapeDtypeStruct(p.array.shape, p.array.dtype, sharding=s)  # noqa: E731
    tx = OPTIMIZER.transformation(params)
    shardings = optimizers.state_shardings(tx, params, sharding_of)
    arrays = {n: p.array for n, p in params.items()}
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(tx.init, arrays), shardings
    )
    return {n: NamedTensor(shaped(p, sharding_of(p.shape)), p.shape) for n, p in params.items()}, state


def plain_state(step, seed=None):
    """A small state without an optimizer's structure: quick to make and to save."""
    shape = Shape([Dimension("d", 4)])
    value = jnp.full(4, float(step if seed is None else seed))
    return {"w": NamedTensor(value, shape)}, {"count": jnp.int32(step), "v": value * 2}


def save(checkpoints, step, **kwargs):
    params, state = plain_state(step)
    checkpoints.save(step, params, state, {"step": step}, **kwargs)


def run_python(code, *args, wait=True, **env):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)} | env
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if not wait:
        return process
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def assert_same(one, two):
    one, two = flatten(one), flatten(two)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(two[name]), err_msg=name)
