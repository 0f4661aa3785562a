"""Makes tables and pictures out of run directories, beside the paper's numbers."""

from __future__ import annotations

import json
from pathlib import Path

from mtf_experiments import cli


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.report RUN... --output=results/table2_mini [--title=TEXT]`.

    RUN is the directory of a run, or a folder of such (of a sweep). Each task has its own page: TASK.md and TASK.json, and
    pictures TASK-*.png. The same runs give the same bytes.
    """
    parser = cli.CommandParser("report", __doc__ or "")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the directory of a run, or a folder of such")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder for tables and pictures")
    parser.add_argument("--title", metavar="TEXT", help="the heading of the page")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="add what each finished run makes of this text (Appendix C of the paper)"
    )
    args = parser.parse(argv)

    from mtf_experiments.files import write_text
    from mtf_experiments.reporting import plots, tables
    from mtf_experiments.reporting.comparisons import compared
    from mtf_experiments.reporting.runs import read_runs
    from mtf_experiments.reporting.samples import samples

    runs = read_runs(args.runs)
    args.output.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(r.task for r in runs):
        mine = [r for r in runs if r.task == task]
        name = task or "not_evaluated"
        pictures = plots.draw(mine, args.output, name)
        made = samples(mine, args.prompt) if args.prompt else {}
        title = args.title or f"Runs of {name}"
        page = tables.markdown(title, mine, [p.name for p in pictures], compared(mine), args.prompt or "", made)
        write_text(args.output / f"{name}.md", page)
        write_text(args.output / f"{name}.json", json.dumps(tables.as_json(mine), indent=1, ensure_ascii=False) + "\n")
        print(page)
        for path in (args.output / f"{name}.md", args.output / f"{name}.json", *pictures):
            cli.wrote(path)


if __name__ == "__main__":
    cli.run(main)
