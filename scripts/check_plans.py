"""Is what the planner predicts what a compiler does?  Every shipped run file, compiled for virtual CPU devices.

    python scripts/check_plans.py --output=results/planning [FILE.gin ...]

Compares, for each file: collectives of the gradient program (elements by kind and mesh dimensions, exactly), bytes of the
arguments of the whole update (exactly), and its temporaries (predicted activations and gradients).  Ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mtf_experiments import cli

DEVICES, SMALL = 512, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for compilers.json and compilers.md")
    parser.add_argument("files", nargs="*", help="run files (default: all that are shipped)")
    args = parser.parse_args()
    cli.set_device_environment(DEVICES)

    import jax

    from mtf_experiments import config, experiment, mtf
    from mtf_experiments.planning import compilers
    from mtf_experiments.planning.forecast import forecast
    from mtf_experiments.planning.hlo import hlo_ledger
    from mtf_experiments.planning.plan import on_accelerators
    from mtf_experiments.reporting.console import table

    folder = config.gin_folders()[0]
    rows, results = [("file", "mesh", "collectives", "arguments", "predicted", "compiled", "ratio")], []
    for name in args.files or sorted(path.name for path in folder.glob("*.gin")):
        exp = on_accelerators(experiment.load([name], []))
        shape = exp.dry_mesh(SMALL if -1 in mtf.MeshShape(exp.mesh_shape).values() else None)
        devices = jax.devices()[: shape.processors]
        made = exp.programs(mtf.make_mesh(shape, devices))
        predicted = forecast(made)
        text = made.gradient_program.lower(*made.abstract_gradient_arguments()).compile().as_text()
        same = hlo_ledger(text, shape).elements() == predicted.ledger.elements()
        compiled = compilers.compile_step(exp.programs, "cpu", shape, devices)
        exact = compiled.argument_bytes == predicted.argument_bytes
        temporaries = predicted.temporary_bytes("cpu")
        ratio = temporaries / (compiled.temporary_bytes or 1)
        results.append(
            {
                "file": name,
                "mesh": str(shape),
                "collectives_equal": same,
                "argument_bytes": [predicted.argument_bytes, compiled.argument_bytes],
                "temporary_bytes": [temporaries, compiled.temporary_bytes],
            }
        )
        equal = ("equal" if same else "DIFFERENT", "equal" if exact else "DIFFERENT")
        rows.append((name, str(shape), *equal, f"{temporaries:,}", f"{compiled.temporary_bytes:,}", f"{ratio:.2f}"))
        print("  ".join(rows[-1]), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "compilers.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.output / "compilers.md").write_text(NOTES.format(table=table(rows, right=(4, 5, 6))))
    print(f"wrote {args.output.resolve()}/compilers.md")
    if any(not r["collectives_equal"] or len(set(r["argument_bytes"])) > 1 for r in results):
        sys.exit("a prediction that should be exact is not")


NOTES = """# What the planner predicts and what the CPU compiler does, for every shipped run file

Collectives: elements of the gradient program by kind and mesh dimensions, read off the compiled HLO. Arguments: bytes of
parameters, optimizer state, step number and batch on one device. Temporaries (predicted, compiled): gradients, activations,
and the copy of donated stacks of parameters that this compiler makes.

Where the ratio is below 0.85 the mesh has one column or the model is small: there the compiler's own choices outweigh
activations. It materialises zeros and broadcasts as large as the parameters for Adafactor's update before the gradients are
ready, and copies operands of products into transposed form; neither is known to the trace. The TPU compiler's verdicts are
in `memory_lm.md` and `memory_mt.md`.

```
{table}
```

`python scripts/check_plans.py --output=results/planning`
"""


if __name__ == "__main__":
    main()
