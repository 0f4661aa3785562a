"""Trains the model of a Gin file into a run directory; the same command again goes on where it stopped."""

from __future__ import annotations

import json

from mtf_experiments import cli


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.train --gin_file=lm_tiny.gin --model_dir=DIR [--devices=8] [--dry_run]`."""
    parser = cli.CommandParser("train", __doc__ or "")
    parser.add_gin_flags()
    parser.add_model_dir(required=False)
    parser.add_devices()
    parser.add_argument("--dry_run", action="store_true", help="tell sizes and communication; needs no devices or data")
    args = parser.parse(argv)
    if not args.dry_run and args.model_dir is None:
        parser.error("the following arguments are required: --model_dir (or --dry_run)")

    import jax

    from mtf_experiments import config, experiment, mtf
    from mtf_experiments.files import write_text
    from mtf_experiments.planning.forecast import forecast
    from mtf_experiments.reporting import console
    from mtf_experiments.reporting.run_directory import RunDirectory, describe_environment

    exp = experiment.load(args.gin_file, args.gin_param)
    if args.dry_run:
        mesh = mtf.abstract_mesh(exp.dry_mesh(args.devices))
        print(console.block("dry run", exp.rows(mesh) | forecast(exp.programs(mesh)).rows()))
        return

    devices = cli.check_devices(args.devices)
    mesh = mtf.make_mesh(exp.mesh(devices))
    run = RunDirectory.create(args.model_dir, writer=jax.process_index() == 0)
    run.check(config.resolved())
    exp.task.check()
    programs = exp.programs(mesh)
    sizes = forecast(programs)
    print(console.block("run", exp.rows(mesh) | sizes.rows()), flush=True)

    # Imported when all that can be refused quickly has been: it brings Orbax and TensorBoard along.
    from mtf_experiments.training.loop import Trainer

    task = exp.task.prepare()
    print(console.block("data", {exp.task.name: "\n".join(task.summary())}), flush=True)
    environment = describe_environment(
        exp.seed, exp.mesh_shape, exp.layout, task.fingerprints(), counts=task.all_counts()
    )
    trainer = Trainer(
        programs,
        task,
        run,
        exp.train_steps,
        exp.training,
        exp.evaluation,
        exp.decoding,
        exp.flops_per_step,
        {**config.macros(), "seed": exp.seed, "parameters": sizes.parameter_count},
    )
    run.record(config.resolved(), environment)
    if run.writer:
        run.tokenizer.write_bytes(task.tokenizer.model)
        write_text(run.plan, json.dumps(sizes.as_json(), indent=1) + "\n")
    result = trainer.train()
    if (source := task.source_perplexity("validation")) is not None:
        reached = result.perplexity.at(1.0).ppl_word
        print(f"the source itself: ppl/word {source:.4f}; the model is {reached / source - 1:.1%} above it")
    cli.wrote(run.path)


if __name__ == "__main__":
    cli.run(main)
