"""A translation model trained, evaluated on whole sets, averaged, followed, and used on lines from files and pipes."""

import json
import re
import subprocess
import sys

import pytest

from mtf_experiments.data.text_io import read_lines
from tests.commands import runs

TRANSLATION = """# One small layer a side on a few pairs of the synchronous grammar.
include 'wmt_tiny.gin'
row_length = 16
batch_size = 8
train_steps = 6
d_model = 16
d_ff = 32
num_heads = 8
d_kv = 4
num_layers = 1
Experiment.schedule = @Constant()
Constant.learning_rate = 0.01
SyntheticPairSource.train_pairs = 300
SyntheticPairSource.validation_pairs = 13
SyntheticPairSource.test_pairs = 9
SyntheticPairSource.max_words = 99
TranslationTask.cache_dir = 'cache'
TranslationTask.unknown_limit = 1.0
Decoding.batch_size = 4
Training.log_every = 1
Training.eval_every = 3
Training.checkpoint_every = 2
Training.keep_checkpoints = 3
"""
ONE = ("--gin_file=translation.gin",)
LINES = [
    "be badi no su",
    "",
    "go base base base base base base base base base base base base base",
    "be umlaut-\u00e4\u00f6 \u2028 \x85 no",
    "su no be",
]


@pytest.fixture(scope="module")
def trained(here, env):
    (here / "translation.gin").write_text(TRANSLATION, encoding="utf-8")
    done = runs.run("train", *ONE, "--model_dir=run", cwd=here, env=env)
    assert done.code == 0, done
    (here / "lines").write_text("\n".join(LINES), encoding="utf-8")  # the last line has no line feed
    return here / "run", done


def scores(run, name):
    return json.loads((run / "eval" / f"tiny_translation-{name}.json").read_text(encoding="utf-8"))


def test_training_ends_with_bleu_of_the_whole_development_set(trained):
    run, done = trained
    result = scores(run, "validation-6")
    assert f"BLEU {result['bleu']['bleu']:.2f}" in done.out and "(ba-zu, 13 sentences)" in done.out
    assert result["bleu"]["sentences"] == 13 and "tok:13a" in result["bleu"]["signature"]
    assert len(list(read_lines(run / "decodes" / "tiny_translation-validation-6.txt"))) == 13
    assert "bleu" not in scores(run, "validation-3")  # on the way there is perplexity alone
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    assert [row["step"] for row in rows if row["key"] == "validation/bleu"] == [6]


def test_evaluation_of_all_checkpoints_translates_the_test_set_whole(trained, here, env):
    run, _ = trained
    done = runs.run("evaluate", "--model_dir=run", "--checkpoint=2,6", "--split=test", cwd=here, env=env)
    assert done.code == 0, done
    for step in (2, 6):
        result = scores(run, f"test-{step}")
        assert result["step"] == step and result["checkpoint"].endswith(f"checkpoints/{step}")
        text = list(read_lines(run / "decodes" / f"tiny_translation-test-{step}.txt"))
        details = [json.loads(line) for line in read_lines(run / "decodes" / f"tiny_translation-test-{step}.jsonl")]
        assert len(text) == len(details) == result["bleu"]["sentences"] == 9
        assert [d["text"] for d in details] == text and [d["line"] for d in details] == list(range(1, 10))
        assert result["bleu"]["empty_hypotheses"] == text.count("")
        assert result["bleu"]["unfinished"] == sum(not d["finished"] for d in details)
    written = re.findall(r"^wrote (.*)$", done.out, re.MULTILINE)
    assert len(written) == 6 and all(path.startswith(str(run)) for path in written)


def test_the_score_is_that_of_the_written_file_whatever_batch_and_devices(trained, here, env):
    run, _ = trained
    before = (run / "decodes" / "tiny_translation-validation-6.txt").read_bytes()
    result = scores(run, "validation-6")
    arguments = ("--gin_param=Decoding.batch_size=8", "--devices=4", "--gin_param=mesh_shape='rows:2;cols:2'")
    done = runs.run("evaluate", "--model_dir=run", *arguments, cwd=here, env=env)
    assert done.code == 0 and "different from" in done.out, done
    assert (run / "decodes" / "tiny_translation-validation-6.txt").read_bytes() == before
    assert scores(run, "validation-6")["bleu"] == result["bleu"]


def test_the_mean_of_the_last_checkpoints_is_evaluated_under_a_name_of_its_own(trained, here, env):
    run, _ = trained
    done = runs.run("evaluate", "--model_dir=run", "--average=2", cwd=here, env=env)
    assert done.code == 0 and "mean of steps 4, 6" in done.out, done
    assert scores(run, "validation-6-average2")["step"] == "6-average2"
    chosen = runs.run("evaluate", "--model_dir=run", "--average=2", "--checkpoint=2,6", cwd=here, env=env)
    assert chosen.code == 0 and "mean of steps 2, 6" in chosen.out, chosen
    few = runs.run("evaluate", "--model_dir=run", "--average=7", cwd=here, env=env)
    assert few.code == 2 and "--average=7: up to step 6 there are only [2, 4, 6]" in few.err


@pytest.mark.parametrize(
    "flags", [("--follow", "--average=2"), ("--follow", "--checkpoint=best"), ("--patience=5",)], ids=" ".join
)
def test_flags_of_evaluation_that_would_do_nothing_are_refused(flags, trained, here, env):
    done = runs.run("evaluate", "--model_dir=run", *flags, cwd=here, env=env)
    assert done.code == 2 and "--follow" in done.err and "Traceback" not in done.err, done


def test_following_a_run_evaluates_each_checkpoint_once_until_the_last(trained, here, env):
    """The checkpoints 2 and 4 are there before; the run goes on to 8 while the follower waits."""
    go_on = ("--gin_param=train_steps=8", "--gin_param=Training.eval_every=0")
    run = here / "followed"
    started = runs.run("train", *ONE, "--model_dir=followed", "--gin_param=train_steps=4", cwd=here, env=env)
    assert started.code == 0, started
    arguments = ["--model_dir=followed", "--follow", "--patience=120", "--gin_param=train_steps=8"]
    with runs.start("evaluate", *arguments, cwd=here, env=env) as follower:
        trained_on = runs.run("train", *ONE, *go_on, "--model_dir=followed", cwd=here, env=env)
        assert trained_on.code == 0, trained_on
        out, err = follower.communicate(timeout=150)
    assert follower.returncode == 0, err
    seen = [int(step) for step in re.findall(r"^checkpoint .*/checkpoints/(\d+)$", out, re.MULTILINE)]
    assert seen == sorted(set(seen)) and seen[-1] == 8 and {2, 4} <= set(seen)
    assert all((run / "eval" / f"tiny_translation-validation-{step}.json").is_file() for step in seen)


def test_lines_in_are_lines_out_in_their_order(trained, here, env):
    done = runs.run("decode", "--model_dir=run", "--input=lines", "--output=out/translated", cwd=here, env=env)
    assert done.code == 0, done
    raw = (here / "out" / "translated").read_bytes()
    assert raw.count(b"\n") == len(LINES) and raw.endswith(b"\n")
    details = [json.loads(line) for line in read_lines(here / "out" / "translated.jsonl")]
    assert [d["source"] for d in details] == LINES
    assert [d["text"] for d in details] == list(read_lines(here / "out" / "translated"))
    assert [d["truncated"] for d in details] == [False] * 5
    assert "5 lines" in done.err and f"wrote {here / 'out' / 'translated'}\n" in done.out
    again = ("--gin_param=Decoding.batch_size=1", "--output=out/again")
    assert runs.run("decode", "--model_dir=run", "--input=lines", *again, cwd=here, env=env).code == 0
    assert (here / "out" / "again").read_bytes() == raw


def test_standard_input_is_translated_and_nothing_else_is_printed(trained, here, env):
    argv = [sys.executable, "-m", "mtf_experiments.decode", "--model_dir=run", "-"]
    text = "\n".join(LINES).encode()
    done = subprocess.run(argv, input=text, capture_output=True, cwd=here, env=env, timeout=120, check=True)
    assert done.stdout.count(b"\n") == len(LINES)
    prompts = [f"--prompt={line}" for line in LINES[:1] + LINES[4:]]
    asked = runs.run("decode", "--model_dir=run", *prompts, cwd=here, env=env)
    printed = done.stdout.decode().split("\n")
    assert asked.code == 0 and asked.out.split("\n")[:2] == [printed[0], printed[4]]


def test_several_hypotheses_are_kept_beside_the_best(trained, here, env):
    arguments = ("--gin_param=Decoding.n_best=3", "--output=out/several")
    done = runs.run("decode", "--model_dir=run", "--input=lines", *arguments, cwd=here, env=env)
    assert done.code == 0, done
    for row in map(json.loads, read_lines(here / "out" / "several.jsonl")):
        found = [row, *row["others"]]
        assert 1 < len(found) <= 3 and len({tuple(h["tokens"]) for h in found}) == len(found)
        assert all(1 not in h["tokens"][:-1] and 0 not in h["tokens"] for h in found)


def test_a_language_model_continues_prompts(here, env):
    begun = runs.run("train", "--gin_file=tiny.gin", "--model_dir=lm", "--gin_param=train_steps=2", cwd=here, env=env)
    assert begun.code == 0, begun
    (prompt, *_) = _first_sentence(here)
    arguments = [
        "--model_dir=lm",
        f"--prompt={prompt}",
        "--gin_param=Decoding.method='sample'",
        "--gin_param=Decoding.max_length=4",
    ]
    one, two = (runs.run("decode", *arguments, cwd=here, env=env) for _ in range(2))
    assert one.code == 0 and one.out == two.out and one.out.startswith(prompt), one
    assert len(one.out.split()) <= len(prompt.split()) + 4
    other = runs.run("decode", *arguments, "--gin_param=Decoding.seed=1", cwd=here, env=env)
    assert other.code == 0 and other.out.startswith(prompt) and other.out != one.out


def _first_sentence(here):
    from mtf_experiments.data.synthetic import SyntheticSource

    yield next(iter(SyntheticSource(train_lines=300).parts("train")))[1].__next__()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model_dir=nowhere", "--prompt=a"), "nowhere does not exist"),
        (("--model_dir=run",), "want one of --prompt=TEXT, --input=FILE and -"),
        (("--model_dir=run", "--prompt=a", "--input=lines"), "want one of --prompt=TEXT, --input=FILE and -"),
        (("--model_dir=run", "--input=gone"), "cannot read gone: No such file or directory"),
        (("--model_dir=run", "--input=latin"), "latin, line 2: not UTF-8 (byte 0xfc"),
        (("--model_dir=run", "--prompt=a", "--checkpoint=5"), "there are 2, 4, 6"),
        (("--model_dir=run", "--prompt=a", "--checkpoint=all"), "decode takes one checkpoint"),
        (("--model_dir=run", "--prompt=a", "--gin_param=Decoding.beem=2"), "beem"),
        (("--model_dir=run", "--prompt=a", "--gin_param=Decoding.n_best=9"), "more than the beam of 4"),
        (
            ("--model_dir=run", "--prompt=a", "--gin_param=Decoding.alpha=-1.0"),
            "Decoding.alpha is -1.0; want at least 0",
        ),
        (("--model_dir=run", "--prompt=a", "--gin_param=Decoding.top_p=0.0"), "Decoding.top_p is 0.0"),
        (("--model_dir=run", "--prompt=a", "--gin_param=d_model=32"), "d_model"),
        (("--model_dir=run", "--prompt=a", "--beam=2"), "unknown flag --beam"),
    ],
)
def test_mistakes_in_decoding_end_with_code_2(arguments, message, trained, here, env):
    (here / "latin").write_bytes(b"gut\n\xfcber\n")
    done = runs.run("decode", *arguments, cwd=here, env=env)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err, done
    assert done.out == "" or "different from" not in done.out


def test_a_model_and_a_task_of_two_kinds_are_refused(here, env):
    sizes = "".join(f"TranslationModelConfig.{name} = 16\n" for name in ("d_model", "d_ff", "d_kv"))
    more = "TranslationModelConfig.vocab_size = 384\n" + sizes
    mixed = "include 'tiny.gin'\nExperiment.model = @TranslationModelConfig()\n" + more
    counts = ("--gin_param=TranslationModelConfig.num_heads=1", "--gin_param=TranslationModelConfig.num_layers=1")
    (here / "mixed.gin").write_text(mixed)
    done = runs.run("train", "--gin_file=mixed.gin", "--dry_run", cwd=here, env=env)
    assert done.code == 2 and "required and not set: TranslationModelConfig.num_heads" in done.err, done
    done = runs.run("train", "--gin_file=mixed.gin", "--dry_run", *counts, cwd=here, env=env)
    assert done.code == 2 and "makes rows of length, a TranslationModelConfig is not for them" in done.err, done
    assert "mixed.gin:2" in done.err and "Traceback" not in done.err
