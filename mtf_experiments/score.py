"""Scores translations that exist already: BLEU and chrF of files of lines, by the code that evaluation uses."""

from __future__ import annotations

import json
from pathlib import Path

from mtf_experiments import cli


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.score --hypotheses=FILE --references=FILE [--references=...] [--compare=FILE]`."""
    parser = cli.CommandParser("score", __doc__ or "")
    parser.add_argument("--hypotheses", required=True, metavar="FILE", help="one detokenised translation a line")
    parser.add_argument(
        "--references", action="append", required=True, metavar="FILE", help="as many lines; repeatable for several"
    )
    parser.add_argument(
        "--compare", metavar="FILE", help="a second system's translations: is the difference significant?"
    )
    parser.add_argument("--tokenize", choices=["13a", "intl", "char", "none"], default="13a")
    parser.add_argument("--smooth", choices=["exp", "floor", "add-k", "none"], default="exp")
    parser.add_argument("--lowercase", action="store_true", help="score without regard to case")
    parser.add_argument("--allow_pieces", action="store_true", help="score text that looks tokenised all the same")
    parser.add_argument("--bootstrap", type=cli.positive, default=1000, metavar="N", help="resamples of the interval")
    parser.add_argument("--direction", default="", metavar="XX-YY", help="languages, for the record: en-de")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result as JSON")
    args = parser.parse(argv)

    from mtf_experiments.data.text_io import read_lines
    from mtf_experiments.errors import UserError
    from mtf_experiments.evaluation.bleu import compare, score
    from mtf_experiments.files import write_text

    def read(path: str) -> list[str]:
        return list(read_lines(path))

    hypotheses, references = read(args.hypotheses), [read(path) for path in args.references]
    other = read(args.compare) if args.compare else None
    for path, lines in [
        *zip(args.references, references, strict=True),
        *([] if other is None else [(args.compare, other)]),
    ]:
        if len(lines) != len(hypotheses):
            raise UserError(f"{args.hypotheses} has {len(hypotheses):,} lines, {path} has {len(lines):,}")
    settings = {
        "tokenize": args.tokenize,
        "smooth": args.smooth,
        "lowercase": args.lowercase,
        "allow_pieces": args.allow_pieces,
    }
    result = score(hypotheses, references, **settings, bootstrap=args.bootstrap, direction=args.direction)
    content = {"hypotheses": args.hypotheses, "references": args.references, **result.as_json()}
    print("\n".join([args.hypotheses, *result.lines()]), flush=True)
    if other is not None:
        comparison = compare(hypotheses, other, references, **settings, resamples=args.bootstrap)
        print("\n".join([f"compared with {args.compare}", comparison.line()]), flush=True)
        content["comparison"] = {"with": args.compare, "bleu": comparison.second, "p_value": comparison.p_value}
    if args.output:
        write_text(args.output, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        cli.wrote(args.output)


if __name__ == "__main__":
    cli.run(main)
