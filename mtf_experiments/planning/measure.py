"""A hardware profile of the machine at hand, measured: its CPU as so many virtual devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mtf_experiments import mtf
from mtf_experiments.errors import UserError
from mtf_experiments.planning.hardware import SWITCH, Hardware, Level

_RUNS = 7
MOST_DEVICES = 64


def measured_cpu(devices: int) -> Hardware:
    """Products, memory and allreduces of all `devices` at once, in about five seconds; `memory` is what is free now.

    Bandwidth and latency of the network are those of the ring formula that takes as long as the measured allreduces. Raises
    UserError for more devices than a CPU can stand in for.
    """
    if devices > MOST_DEVICES:
        raise UserError(
            f"--hardware=cpu measures at most {MOST_DEVICES} virtual devices, the mesh has {devices}; name another profile, or "
            "a smaller mesh (--gin_param=\"mesh_shape='rows:4;cols:2'\")"
        )
    mesh = mtf.make_mesh(f"all:{devices}", jax.devices()[:devices])
    split = PartitionSpec("all")

    def timed(function: Callable[..., Any], *shape: int, dtype: Any = jnp.float32) -> float:
        x = jax.device_put(jnp.ones((devices, *shape), dtype), jax.NamedSharding(mesh, split))
        program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split))
        return _median(program, x)

    def product(x: jax.Array) -> jax.Array:
        return jnp.einsum("aij,ajk->aik", x, x)

    n = 512
    flops = {t: 2 * n**3 / timed(product, n, n, dtype=t) for t in (jnp.float32, jnp.bfloat16)}
    elements = 2**22 // devices
    bandwidth = 2 * 4 * elements / timed(lambda x: x * 1.5 + 1, elements)
    levels = ()
    if devices > 1:
        allreduce = partial(_allreduce, devices=devices)
        small, large = timed(allreduce, 8), timed(allreduce, elements)
        rounds = 2 * (devices - 1)
        per_byte = max(large - small, 1e-9) / (4 * elements)
        levels = (Level("this machine's memory", SWITCH, devices, rounds / devices / per_byte, small / rounds),)
    return Hardware(
        name=f"this CPU as {devices} devices",
        float32_flops=flops[jnp.float32],
        bfloat16_flops=flops[jnp.bfloat16],
        memory=_free_memory() / devices,
        memory_bandwidth=bandwidth,
        levels=levels,
    )


def _allreduce(x: jax.Array, devices: int) -> jax.Array:
    return jax.lax.pcast(jax.lax.psum(x, "all"), "all", to="varying") / devices


def _median(program: Callable[..., Any], *arguments: Any) -> float:
    jax.block_until_ready(program(*arguments))
    seconds = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _free_memory() -> float:
    """Bytes that programs may still take, as the system says; where it does not, 8 GiB."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8 * 2.0**30
