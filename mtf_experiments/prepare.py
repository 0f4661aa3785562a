"""Makes vocabulary and tokenised text of a Gin file beforehand, checks them and reports what they hold."""

from __future__ import annotations

from pathlib import Path

from mtf_experiments import cli

_ROUND_TRIP_LINES = 100_000


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.prepare --gin_file=lm_tiny.gin [--convert_tfds_to=DIR]`."""
    parser = cli.CommandParser("prepare", __doc__ or "")
    parser.add_gin_flags()
    parser.add_argument(
        "--convert_tfds_to",
        type=Path,
        metavar="DIR",
        help="only convert the TFDS data set from tfrecord to array_record form, into DIR",
    )
    args = parser.parse(argv)

    from mtf_experiments import experiment
    from mtf_experiments.data.pair_sources import PairSource, TfdsPairSource
    from mtf_experiments.data.sources import first_lines
    from mtf_experiments.data.tfds_convert import convert
    from mtf_experiments.data.tfds_source import TfdsSource
    from mtf_experiments.data.tokenizer import round_trip
    from mtf_experiments.errors import UserError
    from mtf_experiments.reporting import console

    exp = experiment.load(args.gin_file, args.gin_param)
    source = exp.task.source
    if args.convert_tfds_to:
        if not isinstance(source, TfdsSource | TfdsPairSource):
            raise UserError(f"--convert_tfds_to is for TFDS data; this task reads a {type(source).__name__}")
        cli.wrote(convert(source.name, source.data_dir, args.convert_tfds_to))
        return

    task = exp.task.prepare()
    rows = task.train_rows(exp.batch_size, exp.seed, exp.model.padded_vocab_size)
    sides = [source.inputs, source.targets] if isinstance(source, PairSource) else [source]
    sample = [line for side in sides for line in first_lines(side, "validation", _ROUND_TRIP_LINES)]
    reversible = round_trip(task.tokenizer, sample)
    lengths = " + ".join(map(str, rows.lengths.values()))
    full = " and ".join(f"{share:.1%}" for share in rows.fill.values())
    block = {
        "data": "\n".join(task.summary()),
        "training rows": f"{rows.rows_in_epoch(0):,} of {lengths} tokens, {full} full; "
        f"an epoch takes {rows.steps_per_epoch:,.1f} steps of {rows.batch_size} rows",
        "reversible": f"{reversible.summary()} (validation)",
    }
    for split in exp.task.source.splits[1:]:
        if (perplexity := task.source_perplexity(split)) is not None:
            block[f"source, {split}"] = f"ppl/word {perplexity:.4f} by the true distribution: nothing can be better"
    print(console.block(exp.task.name, block))
    for before, after in reversible.examples:
        print(f"  changed: {before!r} -> {after!r}")
    cli.wrote(exp.task.cache)


if __name__ == "__main__":
    cli.run(main)
