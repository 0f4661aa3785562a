"""Translates lines, or continues prompts, with the checkpoint of a run: one line of output for each line of input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mtf_experiments import cli


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.decode --model_dir=DIR (--prompt=TEXT | --input=FILE | -) [--output=FILE]`."""
    parser = cli.CommandParser("decode", __doc__ or "")
    parser.add_gin_flags(required=False)
    parser.add_model_dir()
    parser.add_devices()
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help="latest, best, or a step")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a line to translate or continue; repeatable")
    parser.add_argument("--input", metavar="FILE", help="lines of text, plain or .gz; - is the standard input")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write lines here, their details to FILE.jsonl")
    parser.add_argument("stdin", nargs="?", choices=["-"], metavar="-", help="read lines from the standard input")
    args = parser.parse(argv)
    given = [name for name in ("prompt", "input", "stdin") if getattr(args, name)]
    if len(given) != 1:
        parser.error("want one of --prompt=TEXT, --input=FILE and - (the standard input)")

    from mtf_experiments import config, experiment, mtf
    from mtf_experiments.data.text_io import is_blank, one_line, read_lines
    from mtf_experiments.data.tokenizer import Tokenizer, require_known
    from mtf_experiments.errors import UserError
    from mtf_experiments.files import write_text
    from mtf_experiments.reporting.run_directory import RunDirectory
    from mtf_experiments.training.checkpoints import Checkpoints
    from mtf_experiments.training.loop import BEST_BY

    run = RunDirectory.open(args.model_dir)
    exp = experiment.load([str(run.config), *args.gin_file], args.gin_param)
    if differences := config.diff(run.config.read_text("utf-8"), config.resolved()):
        print(f"different from {run.config}:\n{differences}", file=sys.stderr, flush=True)
    from_stdin = args.stdin or args.input == "-"
    lines = [one_line(p) for p in args.prompt or []] or list(read_lines("/dev/stdin" if from_stdin else args.input))
    mesh = mtf.make_mesh(exp.mesh(cli.check_devices(args.devices)))

    from mtf_experiments.evaluation.text_decoder import TextDecoder

    with Checkpoints(run.checkpoints, metric=BEST_BY, read_only=True) as checkpoints:
        steps = checkpoints.choose(args.checkpoint)
        if len(steps) > 1:
            raise UserError(f"decode takes one checkpoint; {args.checkpoint!r} names {len(steps)}")
        programs = exp.programs(mesh)
        tokenizer = Tokenizer(run.tokenizer.read_bytes(), str(run.tokenizer))
        unknown = require_known(tokenizer, [line for line in lines if not is_blank(line)], 1.0, "the input")
        decoder = TextDecoder(programs, tokenizer, exp.decoding)
        params = checkpoints.restore_params(steps[0], programs.abstract_state().params)
    decoded = decoder.decode(params, lines)
    notes = [f"checkpoint {checkpoints.path(steps[0])}", f"{len(lines):,} lines", f"{unknown:.2%} unknown tokens"]
    notes += [f"{count:,} {what}" for what, count in _counts(decoded).items() if count]
    print("; ".join(notes), file=sys.stderr, flush=True)
    if args.output is None:
        for d in decoded:
            print(d.text)
        return
    write_text(args.output, "".join(f"{d.text}\n" for d in decoded))
    details = args.output.with_name(args.output.name + ".jsonl")
    rows = (json.dumps(d.as_json(number), ensure_ascii=False) for number, d in enumerate(decoded, 1))
    write_text(details, "".join(f"{row}\n" for row in rows))
    cli.wrote(args.output)
    cli.wrote(details)


def _counts(decoded: list) -> dict[str, int]:
    return {
        "inputs truncated": sum(d.truncated for d in decoded),
        "outputs unfinished": sum(not d.hypotheses[0].finished for d in decoded),
        "outputs empty": sum(not d.text for d in decoded),
    }


if __name__ == "__main__":
    cli.run(main)
