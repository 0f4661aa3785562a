"""Tells what a training step computes, communicates and holds on any machine, whether it fits, and which layout is better."""

from __future__ import annotations

import json

from mtf_experiments import cli


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.plan --gin_file=lm_4.9b.gin [--hardware=tpu_v5p] [--search] [--compile=cpu] [--json]`."""
    parser = cli.CommandParser("plan", __doc__ or "")
    parser.add_gin_flags()
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
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse(argv)
    cli.set_device_environment(1)  # a plan leaves accelerators alone

    from mtf_experiments import experiment, mtf
    from mtf_experiments.planning import best, compilers, measure, plan, text
    from mtf_experiments.planning.hardware import Hardware

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
