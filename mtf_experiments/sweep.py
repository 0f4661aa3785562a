"""Runs a sweep: many trainings that differ along named axes; the same command again goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

from mtf_experiments import cli


def main(argv: list[str]) -> int:
    """`python -m mtf_experiments.sweep --gin_file=sweeps/table2_mini.gin --output=DIR [--parallel=2] [--print | --list]`.

    `--gin_param` binds something in every member (such as data_dir), or in the sweep itself (`Sweep.devices=8`).
    """
    parser = cli.CommandParser("sweep", __doc__ or "")
    parser.add_gin_flags()
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder of the run directories")
    parser.add_argument(
        "--parallel", type=cli.positive, default=1, metavar="N", help="so many members at once (default: 1)"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the members' commands, one line each, and run nothing"
    )
    parser.add_argument("--list", action="store_true", help="print how far the members are, and run nothing")
    args = parser.parse(argv)
    if args.print and args.list:
        parser.error("--print and --list: give one of them")

    from mtf_experiments import experiment
    from mtf_experiments.reporting.sweep_runner import SweepRunner, live
    from mtf_experiments.reporting.sweeps import Sweep

    own = [p for p in args.gin_param if p.startswith("Sweep.")]
    more = [p for p in args.gin_param if p not in own]
    (sweep,) = experiment.load_all(args.gin_file, own, [Sweep])
    members = sweep.members()
    totals = {}
    for member in members:  # all are built before any runs: a typo in the last one costs nothing
        with cli.context(f"member {member.name} of {args.gin_file[-1]}"):
            exp = experiment.load(member.gin_files, member.gin_params(more))
            if not (args.print or args.list):
                exp.task.check()
            totals[member.name] = exp.train_steps
    output = args.output.absolute()
    runner = SweepRunner(members, totals, output, args.parallel, more)
    if args.print:
        print("\n".join(member.shell(output, more) for member in members))
        return 0
    if args.list:
        print(runner.overview())
        return 0
    done = live(runner)()
    print(runner.overview())
    for name, line in runner.failed.items():
        print(f"failed: {name}: {line}")
    cli.wrote(output)
    return 0 if done else 1


if __name__ == "__main__":
    cli.run(main)
