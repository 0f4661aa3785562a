"""The command that scores files: what it prints and writes, and what it refuses."""

import json
import subprocess
import sys

import pytest

from tests.commands import runs

GOOD = [
    "Die Katze saß auf der Matte und sah den Mond.",
    "Niemand erwartete den Zug heute pünktlich.",
    "Sie schrieb drei Briefe.",
]


@pytest.fixture
def folder(tmp_path):
    for name, lines in (("ref", GOOD), ("hyp", [GOOD[0].replace("Mond", "Hund"), *GOOD[1:]])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return tmp_path


def score(folder, *arguments):
    return runs.run("score", *arguments, cwd=folder, env=runs.environment(), limit=60)


def test_scores_are_printed_with_signature_and_written_when_asked(folder):
    done = score(folder, "--hypotheses=hyp", "--references=ref", "--direction=en-de", "--output=out/score.json")
    assert done.code == 0, done
    result = json.loads((folder / "out" / "score.json").read_text(encoding="utf-8"))
    assert f"BLEU {result['bleu']:.2f}" in done.out and "tok:13a|smooth:exp|version:" in done.out
    assert done.out.rstrip().endswith(f"wrote {folder / 'out' / 'score.json'}") and result["direction"] == "en-de"
    assert 50 < result["bleu"] < 100 and result["sentences"] == 3
    (folder / "again").mkdir()
    silent = score(folder, "--hypotheses=ref", "--references=ref", "--compare=hyp", "--bootstrap=100")
    assert "BLEU 100.00" in silent.out and "difference -" in silent.out and "wrote" not in silent.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hypotheses=short", "--references=ref"), "short has 2 lines, ref has 3"),
        (("--hypotheses=hyp", "--references=ref", "--compare=short"), "hyp has 3 lines, short has 2"),
        (("--hypotheses=hyp", "--references=ref", "--compare=empty"), "hyp has 3 lines, empty has 0"),
        (("--hypotheses=hyp", "--references=ref", "--compare=spaced"), "the second system's hypotheses: 100.0% of the"),
        (("--hypotheses=gone", "--references=ref"), "cannot read gone: No such file or directory"),
        (("--hypotheses=empty", "--references=empty"), "there are no hypotheses to score"),
        (("--hypotheses=latin", "--references=ref"), "latin, line 2: not UTF-8 (byte 0xfc"),
        (("--hypotheses=pieces", "--references=ref"), "hypotheses: 100.0% of the lines hold subword marks"),
        (("--hypotheses=hyp",), "the following arguments are required: --references"),
        (("--hypotheses=hyp", "--references=ref", "--tokenise=13a"), "did you mean --tokenize?"),
    ],
)
def test_mistakes_end_with_code_2_and_say_what(folder, arguments, message):
    (folder / "short").write_text("a\nb\n")
    (folder / "empty").write_bytes(b"")
    (folder / "latin").write_bytes(b"gut\n\xfcber\nund\n")
    (folder / "pieces").write_text("\u2581Die \u2581Katze\n" * 3, encoding="utf-8")
    (folder / "spaced").write_text("Die Katze .\n" * 3)
    done = score(folder, *arguments)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err, done
    assert done.seconds < 30


def test_scoring_does_not_start_jax(folder):
    """Importing it takes seconds and, on a shared machine, may take the accelerator."""
    program = (
        "import sys; from mtf_experiments import score; "
        "score.main(['--hypotheses=hyp', '--references=ref', '--compare=ref', '--bootstrap=10']); "
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program], cwd=folder, env=runs.environment(), check=False
    )
    assert done.returncode == 0
