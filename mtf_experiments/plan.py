"""Tells what a training step computes, communicates and holds on any machine, whether it fits, and which layout is better."""

from __future__ import annotations

import json
from pathlib import Path

from mtf_experiments import cli


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.plan --gin_file=lm_4.9b.gin [--hardware=tpu_v5p] [--search] [--compile=cpu] [--json]`."""
    parser = cli.CommandParser("plan", __doc__ or "")
    parser.add_gin_flags(required=False)
    parser.add_argument(
        "--hardware",
        default="tpu_v2",
        metavar="NAME",
        help="a profile of gin/hardware/, or a Gin file (default: tpu_v2); cpu: this machine, measured",
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
    parser.add_argument(
        "--table1", action="store_true", help="the paper's Table 1, in symbols and numbers (Gin: Table1)"
    )
    parser.add_argument(
        "--study", metavar="FILE", help="many plans, one table and plot: a Gin file such as planning/layouts.gin"
    )
    parser.add_argument("--output", metavar="DIR", help="where a study goes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse(argv)
    asked = [flag for flag in ("gin_file", "table1", "study") if getattr(args, flag)]
    if not asked:
        parser.error("one of the following arguments is required: --gin_file, --table1, --study")
    if bool(args.study) != bool(args.output):
        parser.error("--study and --output go together")
    alone = "study" if args.study else "table1" if args.table1 else ""
    unread = {
        "study": ("gin_file", "search", "compile", "json", "devices"),
        "table1": ("search", "compile", "json", "devices"),
    }
    for flag in unread.get(alone, ()):
        if getattr(args, flag):
            parser.error(f"--{alone} does not read --{flag}")
    if args.search and args.compile:
        parser.error("--search does not read --compile")
    cli.set_device_environment(1)  # a plan leaves accelerators alone

    from mtf_experiments import experiment, mtf
    from mtf_experiments.planning import best, compilers, measure, plan, studies, text
    from mtf_experiments.planning.hardware import Hardware
    from mtf_experiments.planning.table1 import Table1

    if args.table1:
        print(experiment.load_all(args.gin_file, args.gin_param, [Table1])[0].render())
        return
    if args.study:
        (study,) = experiment.load_all([args.study], args.gin_param, [studies.Study])
        points = studies.run(study, experiment.load_all, experiment.Experiment)
        for path in studies.write(study, Path(args.study).stem, points, Path(args.output)):
            cli.wrote(path)
        return
    for target in args.compile:
        compilers.check_target(target)
    measured = args.hardware == "cpu"
    if measured:
        exp = experiment.load(args.gin_file, args.gin_param)
    else:
        profile = args.hardware if args.hardware.endswith(".gin") else f"hardware/{args.hardware}.gin"
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
    made = plan.make_plan(exp, mesh, hardware)
    programs = plan.on_accelerators(exp).programs
    compiled = [compilers.compile_step(programs, target, mesh) for target in args.compile]
    if args.json:
        print(json.dumps(made.as_json() | {"compiled": [compilers.as_json(c) for c in compiled]}, indent=1))
    else:
        print(text.render(made, exp.rows(mtf.abstract_mesh(mesh)), exp.train_steps, compiled))


if __name__ == "__main__":
    cli.run(main)
