"""Tells what a training step computes, communicates and holds on any machine, whether it fits, and which layout is better."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mtf_experiments import cli

_READ = {
    "gin_file": ("gin_param", "hardware", "devices", "search", "compile", "json"),
    "table1": ("gin_param", "output"),
    "study": ("gin_param", "output"),
}
"""The kinds of a plan, by the flag that asks for it, and the other flags that it reads."""


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.plan --gin_file=lm_4.9b.gin [--hardware=tpu_v5p] [--search | --compile=cpu] [--json]`.

    `--table1` is the paper's table instead, `--study=planning/layouts.gin --output=DIR` many plans in one picture.
    """
    parser = cli.CommandParser("plan", __doc__ or "")
    parser.add_gin_flags(required=False)
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="a profile of gin/hardware/, or a Gin file (default: tpu_v2, the paper's); cpu: this machine, measured",
    )
    parser.add_argument(
        "--devices", type=cli.positive, metavar="N", help="so many devices (default: the mesh as written)"
    )
    parser.add_argument("--search", action="store_true", help="find the best meshes and layouts for so many devices")
    parser.add_argument(
        "--compile",
        action="append",
        default=[],
        metavar="TARGET",
        help="ask a compiler as well: cpu, or e.g. tpu:v2:16x16; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--table1", action="store_true", help="the paper's Table 1 in symbols and numbers (--output: a plot)"
    )
    parser.add_argument(
        "--study", metavar="FILE", help="many plans, e.g. planning/layouts.gin: table and plot into --output"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where a study or plot goes")
    args = parser.parse(argv)
    kind = next((kind for kind in ("study", "table1", "gin_file") if getattr(args, kind)), None)
    if kind is None:
        parser.error("one of the following arguments is required: --gin_file, --table1, --study")
    every = {*_READ, *(flag for flags in _READ.values() for flag in flags)}
    for flag in sorted(every - {kind, *_READ[kind]}):
        if getattr(args, flag):
            parser.error(f"--{kind} does not read --{flag}")
    if args.search and args.compile:
        parser.error("--search does not read --compile")
    if args.study and not args.output:
        parser.error("--study needs --output, the folder for its table and plot")
    cli.set_device_environment(1)  # a plan leaves accelerators alone
    {"gin_file": _plan, "table1": _table1, "study": _study}[kind](args)


def _plan(args: argparse.Namespace) -> None:
    from mtf_experiments import experiment, mtf
    from mtf_experiments.planning import best, compilers, measure, plan, text
    from mtf_experiments.planning.hardware import Hardware

    for target in args.compile:
        compilers.check_target(target)
    name, measured = args.hardware or "tpu_v2", args.hardware == "cpu"
    if measured:
        exp = experiment.load(args.gin_file, args.gin_param)
    else:
        profile = name if name.endswith(".gin") else f"hardware/{name}.gin"
        roots = [experiment.Experiment, Hardware]
        exp, hardware = experiment.load_all([profile, *args.gin_file], args.gin_param, roots)
    mesh = exp.dry_mesh(args.devices)
    if measured or "cpu" in args.compile:
        cli.set_device_environment(mesh.processors)
    if measured:
        hardware = measure.measured_cpu(mesh.processors)

    if args.search:
        searched = best.search_for(exp, mesh, hardware)
        print(json.dumps(searched.as_json(), indent=1) if args.json else text.render_search(searched, mesh))
        return
    made = plan.make_plan(exp, mesh, hardware, microbatches=(4,))
    programs = plan.on_accelerators(exp).programs
    compiled = [compilers.compile_step(programs, target, mesh) for target in args.compile]
    if args.json:
        print(json.dumps(made.as_json() | {"compiled": [compilers.as_json(c) for c in compiled]}, indent=1))
    else:
        print(text.render(made, exp.rows(mtf.abstract_mesh(mesh)), exp.train_steps, compiled))


def _table1(args: argparse.Namespace) -> None:
    from mtf_experiments import experiment
    from mtf_experiments.files import write_text
    from mtf_experiments.planning.table1 import Table1, draw

    (table,) = experiment.load_all(args.gin_file, args.gin_param, [Table1])
    print(table.render())
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        write_text(args.output / "table1.txt", table.render() + "\n")
        draw(args.output / "table1.png")
        cli.wrote(args.output / "table1.txt")
        cli.wrote(args.output / "table1.png")


def _study(args: argparse.Namespace) -> None:
    from mtf_experiments import experiment
    from mtf_experiments.planning import studies

    (study,) = experiment.load_all([args.study], args.gin_param, [studies.Study])
    points = studies.run(study, experiment.load_all, experiment.Experiment)
    for path in studies.write(study, Path(args.study).stem, points, args.output):
        cli.wrote(path)


if __name__ == "__main__":
    cli.run(main)
