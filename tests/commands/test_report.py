"""The report command on run directories made by hand."""

import json

import pytest

from mtf_experiments.reporting import tables
from tests.commands import runs
from tests.reporting import fake_runs


def report(folder, env, *arguments):
    return runs.run("report", *arguments, cwd=folder, env=env)


@pytest.fixture(scope="module")
def language(tmp_path_factory, env):
    folder = tmp_path_factory.mktemp("language")
    for heads, seed in ((1, 0), (1, 1), (2, 0), (4, 0), (4, 1)):
        end = 4.0 - 0.1 * heads + 0.02 * seed
        name, sizes = f"heads={heads},seed={seed}", {"heads": heads, "seed": seed, "parameters": 10**6 * heads}
        fake_runs.write(folder / "sweep", name, nll=(6.0, 5.0, end), **sizes)
    fake_runs.write(folder / "sweep", "stopped", heads=8, parameters=8 * 10**6, steps=80, reached=40)
    # A run of the paper's own size, to stand in the paper's row.
    fake_runs.write(
        folder / "sweep", "paper", heads=4, d_model=1024, d_ff=4096, parameters=142881792, nll=(4.0, 2.0, 1.78)
    )
    return report(folder, env, "sweep", "--output=out", "--title=Widths"), folder


def test_results_stand_beside_the_papers(language):
    result, folder = language
    assert result.code == 0, result
    page = (folder / "out" / "toy.md").read_text()
    assert page.startswith("# Widths\n") and "7 runs of the task toy, 6 of them finished" in page
    assert "40 of 80" in page and "not finished; so far" in page
    beside = [line for line in page.split("\n") if "not run" in line or "paper: " in line]
    for row, line in zip(tables.paper()["table2"]["rows"], beside, strict=True):
        assert f"{row['d_ff']:,}" in line and f"{row['lm1b']:g} {row['lm1b_mark']}" in line
    assert page.count("not run") == 6
    for mark, meaning in tables.paper()["marks"].items():
        assert f"{mark}: {meaning}" in page


def test_numbers_are_those_of_the_runs(language):
    _, folder = language
    found = json.loads((folder / "out" / "toy.json").read_text())
    one = next(r for r in found["runs"] if r["name"] == "heads=2,seed=0")
    assert (one["parameters"], one["tokens"], one["num_heads"]) == (2_000_000, 40_000, 2)
    assert one["diagnosis"]["last_nll"] == 3.8
    seeds = next(s for s in found["seeds"] if s["runs"] == ["heads=4,seed=0", "heads=4,seed=1"])
    values = [fake_runs.scale_of(1.0, nll)["ppl_word"] for nll in (3.6, 3.62)]
    assert seeds["mean"] == pytest.approx(sum(values) / 2)
    assert seeds["deviation"] == pytest.approx((values[1] - values[0]) / 2**0.5)
    page = (folder / "out" / "toy.md").read_text()
    tuned = fake_runs.scale_of(0.9, 3.8)["ppl_word"]
    assert f"{tuned:.4g} at x0.9" in page
    low, word, high = (fake_runs.scale_of(1.0, 3.8)[k] for k in ("ppl_word_low", "ppl_word", "ppl_word_high"))
    assert f"{word:.4g} ({low:.4g}-{high:.4g})" in page


def test_the_same_runs_give_the_same_bytes(language, env):
    _, folder = language
    again = report(folder, env, "sweep", "--output=again", "--title=Widths")
    assert again.code == 0
    first, second = ({p.name: p.read_bytes() for p in (folder / d).iterdir()} for d in ("out", "again"))
    assert first == second and {"toy.md", "toy.json", "toy-curves.png", "toy-width.png", "toy-scales.png"} <= set(first)
    assert str(folder).encode() not in first["toy.md"] + first["toy.json"]


def test_translation_models_are_compared_by_bleu(tmp_path, env):
    references = [f"the cat number {i} sat on the mat today" for i in range(40)]
    worse = [r if i % 3 else r.replace("mat", "dog house") for i, r in enumerate(references)]
    for heads, made, bleu in ((1, worse, 80.0), (2, references, 100.0)):
        fake_runs.write(
            tmp_path / "sweep",
            f"heads={heads}",
            heads=heads,
            parameters=10**6 * heads,
            bleu=bleu,
            translations=made,
            references=references,
        )
    result = report(tmp_path, env, "sweep", "--output=out")
    page = (tmp_path / "out" / "toy.md").read_text()
    assert result.code == 0 and "80.00 ± 1.25" in page and "more than chance" in page and "nrefs:1|toy" in page
    assert "41.8 S" in page and "27.5 S" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing", "--output=out"], "neither the directory of a run"),
        (["--output=out"], "required: RUN"),
        (["."], "--output"),
    ],
)
def test_mistakes_are_told(arguments, words, tmp_path, env):
    result = report(tmp_path, env, *arguments)
    assert result.code == 2 and words in result.err, result
