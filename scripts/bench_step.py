"""Speed of the training step, as ratios within one run.

    python scripts/bench_step.py [--rounds=40] [--d_model=256 ...] [--json=FILE]

1. Our one-device step against a plain JAX step of the same mathematics, written by hand below: median of the ratios of
   neighbouring measurements (machines are noisy; what both suffer cancels out).
2. The share of the machine's own matrix product rate that our step reaches in model FLOPs.
3. The same step on 8 virtual devices against 1, at equal total work (all share the same cores: the ratio is overhead).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "64")  # before jax: virtual devices deadlock in XLA's default CPU thread pool

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mtf_experiments import mtf
from mtf_experiments.models.language_model import LanguageModelConfig
from mtf_experiments.training.feed import device_batch
from mtf_experiments.training.optimizers import Adafactor
from mtf_experiments.training.schedules import Constant
from mtf_experiments.training.step import Programs, StepSettings

RATE = 1e-3
DROPOUT = 0.1


def rows(batch: int, length: int, vocab: int) -> dict[str, np.ndarray]:
    """Two packed segments a row, full of random ids."""
    generator = np.random.default_rng(0)
    targets = generator.integers(2, vocab, (batch, length)).astype(np.int32)
    half = length // 2
    segments = np.repeat([[1] * half + [2] * (length - half)], batch, 0).astype(np.int32)
    positions = np.repeat([[*range(half), *range(length - half)]], batch, 0).astype(np.int32)
    inputs = np.where(positions == 0, 0, np.roll(targets, 1, 1)).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "segments": segments, "positions": positions}


def ours(config: LanguageModelConfig, batch: int, mesh_shape: str, layout: str) -> Callable[[], Any]:
    """One call, one step of the product's own training program."""
    mesh = mtf.make_mesh(mesh_shape, jax.devices()[: mtf.MeshShape(mesh_shape).processors])
    settings = StepSettings(batch, {"length": config.row_length})
    programs = Programs(config, mesh, mtf.Layout(layout), Adafactor(), Constant(RATE), settings)
    data = rows(batch, config.row_length, config.vocab_size)
    placed = device_batch(lambda n: {k: v[n] for k, v in data.items()}, programs.train_shapes, programs.sharding)
    update = programs.compiled_update()
    state = programs.initialise()

    def step() -> Any:
        nonlocal state
        state, metrics = update(state, placed)
        return metrics["loss"]

    return step


def by_hand(config: LanguageModelConfig, batch: int) -> Callable[[], Any]:
    """The same step in plain JAX: einsums, a loop over layers, jax.random, optax."""
    mesh = mtf.make_mesh("all:1", jax.devices()[:1])
    settings = StepSettings(batch, {"length": config.row_length})
    named = Programs(config, mesh, mtf.Layout(""), Adafactor(), Constant(RATE), settings)
    state = named.initialise()
    params = {name: p.array for name, p in state.params.items()}
    optimizer, opt_state = named.transformation, state.opt_state
    data = {k: jnp.asarray(v) for k, v in rows(batch, config.row_length, config.vocab_size).items()}

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def drop(x: jax.Array, key: jax.Array) -> jax.Array:
        shape = (x.shape[0], *([1] if x.ndim == 3 else [x.shape[1], 1]), x.shape[-1])  # shared over length
        keep = jax.random.uniform(key, shape) < 1 - DROPOUT
        return x * jnp.where(keep, 1 / (1 - DROPOUT), 0.0)

    def loss(params: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        x = params["embedding/tokens"][data["inputs"]] + params["embedding/positions"][data["positions"]]
        x = drop(x, jax.random.fold_in(key, 1000))
        length = config.row_length
        mask = data["segments"][:, :, None] == data["segments"][:, None, :]
        bias = jnp.where(mask & jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)[:, None]
        scales = params["decoder/norm_scales"]
        for i in range(config.num_layers):
            wq, wk, wv, wo = params["decoder/attention/qkvo"][i]
            wi, wf = params["decoder/feed_forward/wi_wo"][i]
            keys = jax.random.split(jax.random.fold_in(key, i), 4)
            y = norm(x, scales[2 * i])
            q, k, v = (jnp.einsum("bld,hdk->blhk", y, w) for w in (wq, wk, wv))
            weights = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", q, k) + bias, -1)
            y = jnp.einsum("bhlm,bmhk->blhk", drop(weights, keys[0]), v)
            x = x + drop(jnp.einsum("blhk,hdk->bld", y, wo), keys[1])
            y = drop(jax.nn.relu(jnp.einsum("bld,df->blf", norm(x, scales[2 * i + 1]), wi)), keys[2])
            x = x + drop(jnp.einsum("blf,df->bld", y, wf), keys[3])
        x = drop(norm(x, scales[-1]), jax.random.fold_in(key, 1001))
        logits = jnp.einsum("bld,dv->blv", x, params["softmax"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, data["targets"])
        return jnp.sum(nll * (data["targets"] != 0)) / jnp.sum(data["targets"] != 0)

    def update(params: Any, opt_state: Any, step: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, jax.random.fold_in(jax.random.key(0), step))
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: RATE * u, updates))
        return params, opt_state, step + 1, value, optax.global_norm(gradients)

    compiled = jax.jit(update, donate_argnums=(0, 1, 2))
    carry = (params, opt_state, jnp.zeros((), jnp.int32))

    def step() -> Any:
        nonlocal carry
        *carry, value, _ = compiled(*carry)
        return value

    return step


def seconds(step: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds per step, over a few steps run one after another."""
    start = time.perf_counter()
    for _ in range(repeats):
        value = step()
    jax.block_until_ready(value)
    return (time.perf_counter() - start) / repeats


def ratio(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Median of first/second over `rounds` neighbouring pairs (order alternating), and both medians in seconds."""
    for step in (first, second):
        seconds(step, 2)  # compile and warm up
    pairs = []
    for number in range(rounds):
        if number % 2:
            b, a = seconds(second), seconds(first)
        else:
            a, b = seconds(first), seconds(second)
        pairs.append((a, b))
    return (
        statistics.median(a / b for a, b in pairs),
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
    )


def matmul_rate(size: int = 2048) -> float:
    """FLOP/s of the machine's best f32 matrix product."""
    a = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.dot)
    product(a, a).block_until_ready()
    return 2 * size**3 / min(seconds(lambda: product(a, a), 2) for _ in range(8))


def main() -> None:
    """Prints the three ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", default="")
    parser.add_argument("--virtual", action="store_true", help=argparse.SUPPRESS)
    sizes = dict(vocab_size=8000, d_model=256, d_ff=1024, num_heads=4, d_kv=64, num_layers=4, row_length=128)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    config = LanguageModelConfig(**{name: getattr(args, name) for name in sizes})
    if args.virtual:  # the part that needs 8 virtual devices, in a process of its own
        layout = "batch:rows;vocab:cols;d_ff:cols;heads:cols"
        eight = ours(config, args.batch, "rows:4;cols:2", layout)
        print(json.dumps(ratio(eight, ours(config, args.batch, "all:1", ""), max(3, args.rounds // 3))))
        return
    against, mine, plain = ratio(ours(config, args.batch, "all:1", ""), by_hand(config, args.batch), args.rounds)
    rate, flops = matmul_rate(), config.flops_per_row({"length": config.row_length}) * args.batch
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    child = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--virtual"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    virtual, eight, one = json.loads(child.stdout.strip().rsplit("\n", 1)[-1])
    result = {
        "config": vars(config),
        "batch": args.batch,
        "rounds": args.rounds,
        "ours_over_by_hand": against,
        "ours_seconds": mine,
        "by_hand_seconds": plain,
        "matmul_gflops": rate / 1e9,
        "share_of_matmul_rate": flops / mine / rate,
        "eight_devices_over_one": virtual,
        "eight_devices_seconds": eight,
        "one_device_seconds": one,
    }
    print(f"ours / by hand            {against:.3f}   ({mine * 1e3:.1f} ms / {plain * 1e3:.1f} ms a step)")
    print(f"share of matmul rate      {flops / mine / rate:.1%}   (of {rate / 1e9:.0f} GFLOP/s)")
    print(f"8 virtual devices / 1     {virtual:.3f}   ({eight * 1e3:.1f} ms / {one * 1e3:.1f} ms a step)")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
        print(f"wrote {os.path.abspath(args.json)}")


if __name__ == "__main__":
    main()
