"""Evaluates checkpoints of a run: perplexity per word, per token and in bits per character, for any logit scales."""

from __future__ import annotations

from mtf_experiments import cli


def main(argv: list[str]) -> None:
    """`python -m mtf_experiments.evaluate --model_dir=DIR [--checkpoint=latest|best|all|STEP] [--gin_param=...]`."""
    parser = cli.CommandParser("evaluate", __doc__ or "")
    parser.add_gin_flags(required=False)
    parser.add_model_dir()
    parser.add_devices()
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help="latest, best, all, or a step")
    parser.add_argument("--split", action="append", metavar="SPLIT", help="validation (default) or test; repeatable")
    args = parser.parse(argv)

    from mtf_experiments import config, experiment, mtf
    from mtf_experiments.errors import UserError
    from mtf_experiments.evaluation.evaluator import PerplexityEvaluator, record
    from mtf_experiments.evaluation.perplexity import choose_scale
    from mtf_experiments.reporting.run_directory import RunDirectory
    from mtf_experiments.training.checkpoints import Checkpoints
    from mtf_experiments.training.loop import BEST_BY

    run = RunDirectory.open(args.model_dir)
    exp = experiment.load([str(run.config), *args.gin_file], args.gin_param)
    saved, now = run.config.read_text("utf-8"), config.resolved()
    if differences := config.diff(saved, now):
        print(f"different from {run.config}:\n{differences}", flush=True)
    devices = cli.check_devices(args.devices)
    mesh = mtf.make_mesh(exp.mesh(devices))
    with Checkpoints(run.checkpoints, metric=BEST_BY, read_only=True) as checkpoints:
        steps = checkpoints.choose(args.checkpoint)
        exp.task.check()
        programs = exp.programs(mesh)
        task = exp.task.prepare()
        if task.tokenizer.model != run.tokenizer.read_bytes():
            raise UserError(
                f"the vocabulary of the data ({task.tokenizer.fingerprint[:12]}) is not that of the run, {run.tokenizer}; "
                "evaluate with the data and vocabulary settings that it was trained with"
            )
        evaluation = exp.evaluation
        evaluator = PerplexityEvaluator(programs, task, exp.eval_batch_size, evaluation.logit_scales)
        splits = args.split or ["validation"]
        for step in steps:
            params = checkpoints.restore_params(step, programs.abstract_state().params)
            for split in splits:
                result = evaluator.evaluate(params, split, evaluation.label if split == "validation" else "")
                print("\n".join([f"checkpoint {checkpoints.path(step)}", *result.lines()]), flush=True)
                if split == "validation" and len(result.scales) > 1:
                    best = choose_scale(result)
                    print(
                        f"  best logit scale on this set: {best.logit_scale:g}, ppl/word {best.development.ppl_word:.4f} "
                        f"(at 1: {best.development_at_one.ppl_word:.4f})"
                    )
                cli.wrote(record(result, run, task.task.name, step, str(checkpoints.path(step))))


if __name__ == "__main__":
    cli.run(main)
