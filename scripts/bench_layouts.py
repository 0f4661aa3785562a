"""Does the planner rank layouts as the machine does?  Predicted against measured step time on eight virtual CPU devices.

    python scripts/bench_layouts.py --output=results/planning/ranking

Every layout of `LAYOUTS` runs the training step of a small language model; the profile of the machine is measured first
(`planning.measure`). Prints both times, and Spearman's rank correlation. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from mtf_experiments import cli

DEVICES = 8
SIZES = [
    "d_model=128",
    "d_ff=1024",
    "num_heads=8",
    "d_kv=32",
    "num_layers=2",
    "vocab_size=2048",
    "Vocabulary.size=384",
    "batch_size=32",
    "row_length=128",
]
LAYOUTS = [
    ("rows:8;cols:1", "batch:rows"),
    ("rows:1;cols:8", "vocab:cols;d_ff:cols;heads:cols"),
    ("rows:4;cols:2", "batch:rows;vocab:cols;d_ff:cols;heads:cols"),
    ("rows:2;cols:4", "batch:rows;vocab:cols;d_ff:cols;heads:cols"),
    ("rows:1;cols:8", "d_ff:cols"),
    ("rows:1;cols:8", "heads:cols"),
    ("rows:1;cols:8", "vocab:cols"),
    ("rows:1;cols:8", "d_model:cols"),
    ("rows:1;cols:8", "length:cols"),
    ("rows:1;cols:8", ""),
    ("rows:4;cols:2", "batch:rows"),
    ("rows:4;cols:2", "batch:rows;d_ff:cols"),
    ("rows:4;cols:2", "batch:rows;d_model:cols"),
    ("rows:2;cols:4", "batch:rows;length:cols"),
    ("rows:2;cols:4", "d_ff:rows;heads:rows;vocab:rows;d_model:cols"),
    ("rows:2;cols:4", "batch:rows;vocab:cols"),
]


def _rows(arrays: dict[str, Any], wanted: Any) -> dict[str, Any]:
    return {name: array[wanted] for name, array in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for ranking.json and ranking.md")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    cli.set_device_environment(DEVICES)

    import numpy as np
    from scipy.stats import spearmanr

    from mtf_experiments import experiment, mtf
    from mtf_experiments.planning.measure import measured_cpu
    from mtf_experiments.planning.plan import timed
    from mtf_experiments.reporting.console import duration_of, table
    from mtf_experiments.training.feed import device_batch

    hardware = measured_cpu(DEVICES)
    exp = experiment.load(["lm_tiny.gin"], SIZES)
    rows, results = [("mesh", "layout", "predicted", "measured", "ratio")], []
    for mesh_shape, layout in LAYOUTS:
        here = dataclasses.replace(exp, mesh_shape=mesh_shape, layout=layout)
        mesh = mtf.MeshShape(mesh_shape)
        _, predicted = timed(here, mesh, hardware)
        programs = here.programs(mtf.make_mesh(mesh))
        update, state = programs.compiled_update(), programs.initialise()
        random = np.random.default_rng(0)
        sizes = {f: (here.batch_size, s.sizes[-1]) for f, s in programs.train_shapes.items()}
        made = {f: random.integers(1, 300, size).astype(np.int32) for f, size in sizes.items()}
        made["segments"][:] = 1
        made["positions"][:] = np.arange(made["positions"].shape[1])
        batch = device_batch(partial(_rows, made), programs.train_shapes, programs.sharding)
        seconds = []
        for _ in range(args.steps + 1):
            start = time.perf_counter()
            state, metrics = update(state, batch)
            metrics["loss"].block_until_ready()
            seconds.append(time.perf_counter() - start)
        measured = statistics.median(seconds[1:])
        results.append({"mesh": mesh_shape, "layout": layout, "predicted": predicted.seconds, "measured": measured})
        ratio = f"{measured / predicted.seconds:.2f}"
        rows.append((mesh_shape, layout or "(empty)", duration_of(predicted.seconds), duration_of(measured), ratio))
        print("  ".join(rows[-1]), flush=True)
    predicted, measured = ([r[k] for r in results] for k in ("predicted", "measured"))
    correlation = float(spearmanr(predicted, measured).statistic)
    args.output.mkdir(parents=True, exist_ok=True)
    profile = {k: getattr(hardware, k) for k in ("name", "float32_flops", "memory_bandwidth")}
    profile["levels"] = [vars(level) for level in hardware.levels]
    found = {"profile": profile, "sizes": SIZES, "spearman": correlation, "layouts": results}
    (args.output / "ranking.json").write_text(json.dumps(found, indent=1) + "\n")
    text = f"Predicted and measured step times of {len(results)} layouts on {DEVICES} virtual devices of one CPU.\n"
    text += f"Spearman's rank correlation: {correlation:.3f}\n\n```\n{table(rows, right=(2, 3, 4))}\n```\n"
    (args.output / "ranking.md").write_text(text)
    print(f"rank correlation {correlation:.3f}; wrote {args.output.resolve()}")


if __name__ == "__main__":
    main()
