"""Evaluates checkpoints of a run: perplexity for any logit scales and, for a translation model, BLEU of whole splits."""

from __future__ import annotations

from mtf_experiments import cli


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.evaluate --model_dir=DIR [--checkpoint=latest|best|all|STEP,...] [--gin_param=...]`."""
    parser = cli.CommandParser("evaluate", __doc__ or "")
    parser.add_gin_flags(required=False)
    parser.add_model_dir()
    parser.add_devices()
    parser.add_argument("--checkpoint", metavar="WHICH", help="latest (default), best, all, or steps: 500,1000")
    parser.add_argument("--split", action="append", metavar="SPLIT", help="validation (default) or test; repeatable")
    parser.add_argument(
        "--average", type=cli.positive, metavar="N", help="the mean of N checkpoints, the chosen one the last"
    )
    parser.add_argument(
        "--follow", action="store_true", help="each checkpoint, also those to come, until the run's last"
    )
    parser.add_argument(
        "--patience",
        type=cli.positive,
        metavar="SECONDS",
        help="with --follow: stop after so long without a new one (default 3600)",
    )
    args = parser.parse(argv)
    if args.follow and (args.average or args.checkpoint):
        parser.error("--follow evaluates each checkpoint as it comes: it goes with neither --average nor --checkpoint")
    if args.patience and not args.follow:
        parser.error("--patience is how long --follow waits; give both")

    from mtf_experiments import config, experiment, mtf
    from mtf_experiments.errors import UserError
    from mtf_experiments.evaluation.evaluator import Evaluator
    from mtf_experiments.evaluation.perplexity import choose_scale
    from mtf_experiments.reporting.run_directory import RunDirectory
    from mtf_experiments.training.checkpoints import Checkpoints
    from mtf_experiments.training.loop import BEST_BY

    run = RunDirectory.open(args.model_dir)
    exp = experiment.load([str(run.config), *args.gin_file], args.gin_param)
    if differences := config.diff(run.config.read_text("utf-8"), config.resolved()):
        print(f"different from {run.config}:\n{differences}", flush=True)
    mesh = mtf.make_mesh(exp.mesh(cli.check_devices(args.devices)))
    if args.follow:
        run.checkpoints.mkdir(exist_ok=True)
    with Checkpoints(run.checkpoints, metric=BEST_BY, read_only=True) as checkpoints:
        steps = [] if args.follow else checkpoints.choose(args.checkpoint or "latest")
        exp.task.check()
        programs = exp.programs(mesh)
        task = exp.task.prepare()
        if task.tokenizer.model != run.tokenizer.read_bytes():
            raise UserError(
                f"the vocabulary of the data ({task.tokenizer.fingerprint[:12]}) is not that of the run, {run.tokenizer}; "
                "evaluate with the data and vocabulary settings that it was trained with"
            )
        evaluation = exp.evaluation
        evaluator = Evaluator(programs, task, exp.eval_batch_size, evaluation.logit_scales, exp.decoding)
        abstract = programs.abstract_state().params

        def measure(params: dict[str, mtf.NamedTensor], step: int | str, source: str) -> None:
            for split in args.split or ["validation"]:
                result = evaluator.evaluate(params, split, evaluation.label if split == "validation" else "")
                print("\n".join([f"checkpoint {source}", *result.lines()]), flush=True)
                if split == "validation" and len(result.perplexity.scales) > 1:
                    best = choose_scale(result.perplexity)
                    print(
                        f"  best logit scale on this set: {best.logit_scale:g}, ppl/word {best.development.ppl_word:.4f} "
                        f"(at 1: {best.development_at_one.ppl_word:.4f})"
                    )
                for path in result.record(run, task.task.name, step, source):
                    cli.wrote(path)

        if args.average:
            # Of several chosen ones the last; a single one stands for those up to it.
            pool = steps if len(steps) > 1 else [s for s in checkpoints.steps() if s <= steps[-1]]
            averaged = pool[-args.average :]
            if len(averaged) < args.average:
                raise UserError(f"--average={args.average}: up to step {steps[-1]} there are only {averaged}")
            name = f"{averaged[-1]}-average{len(averaged)}"
            sources = ", ".join(map(str, averaged))
            measure(
                checkpoints.restore_average(averaged, abstract), name, f"{run.checkpoints}, mean of steps {sources}"
            )
            return
        for step in checkpoints.follow(exp.train_steps, args.patience or 3600) if args.follow else steps:
            try:
                params = checkpoints.restore_params(step, abstract)
            except UserError as error:
                if not args.follow or checkpoints.path(step).exists():
                    raise
                print(f"checkpoint {step} was deleted before it was evaluated ({error})", flush=True)
                continue
            measure(params, step, str(checkpoints.path(step)))


if __name__ == "__main__":
    cli.run(main)
