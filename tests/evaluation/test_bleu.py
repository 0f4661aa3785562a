"""BLEU by one wrapper: published scores, refusals of what is not comparable, and what each count means."""

import csv
import os
import random
import subprocess
import sys

import pytest

from mtf_experiments.data.text_io import read_lines
from mtf_experiments.errors import UserError
from mtf_experiments.evaluation.bleu import compare, score, score_name
from tests.data_location import real_text

SENTENCES = [
    "The cat sat on the mat and looked at the moon.",
    "Nobody expected the train to arrive on time today.",
    "She wrote three letters before the rain stopped.",
]


def read(path):
    return list(read_lines(path))


# Published scores


def test_systems_of_wmt21_english_german_have_their_official_scores():
    """Five of 20 systems against reference A, one against C, D and all three too; the organisers' own numbers.

    (All 160 official numbers agree to the last digit; more here would only take time.)
    """
    folder = real_text("bleu-anchors") / "wmt21-ende"
    with (folder / "automatic-scores.tsv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["pair"] == "en-de"]
    official = {(row["system"], row["metric"]): float(row["score"]) for row in rows}
    references = {name: read(folder / f"newstest2021.en-de.ref.{name}.de") for name in "ACD"}
    systems = sorted(path.name.split(".")[3] for path in folder.glob("*.hyp.*.de"))
    assert len(systems) == 20
    compared = 0
    for system in {*systems[::4], "UEdin"}:
        hypotheses = read(folder / f"newstest2021.en-de.hyp.{system}.de")
        sets = {name: [lines] for name, lines in references.items()} | {"all": list(references.values())}
        for name, streams in sets.items():
            if (system, f"bleu-{name}") not in official or (name != "A" and system != "UEdin"):
                continue
            found = score(hypotheses, streams, bootstrap=0)
            assert found.name == "BLEU"
            assert found.bleu == pytest.approx(official[system, f"bleu-{name}"], abs=1e-8)
            assert found.chrf == pytest.approx(official[system, f"chrf-{name}"], abs=1e-8)
            compared += 1
    assert compared == len(systems[::4]) + 3  # UEdin is one of the five


@pytest.mark.parametrize(
    "system", ["baseline.opt0", "baseline.opt1", "baseline.opt2", "sys1.opt0", "sys1.opt1", "sys1.opt2"]
)
def test_tokenised_outputs_of_newstest2010_have_their_published_scores(system):
    folder = real_text("bleu-anchors") / "multeval-newstest2010"
    expected = {}
    for row in csv.DictReader((folder / "EXPECTED.tsv").open(encoding="utf-8"), delimiter="\t"):
        expected.setdefault(row["file"], []).append(float(row["bleu"]))
    name = f"hyps.lc.tok.en.{system}"
    found = score(read(folder / name), [read(folder / "refs.test2010.lc.tok.en.0")], tokenize="none", bootstrap=0)
    assert found.name == "BLEU-tok"
    for published in expected[name]:  # 18.54 as published by the tool's authors, and all digits
        assert found.bleu == pytest.approx(published, abs=0.005 if published == round(published, 2) else 1e-9)


def test_newstest2013_german_english_has_its_published_score():
    """22.5855084573 counts an empty hypothesis as one empty token; without those three tokens it is 22.5846775212."""
    folder = real_text("bleu-anchors") / "nmt-newstest2013-deen"
    hypotheses = [line.strip() for line in read(folder / "deen_output")]
    references = [line.strip().replace("@@ ", "") for line in read(folder / "deen_ref_bpe")]
    found = score(hypotheses, [references], tokenize="none", smooth="none", bootstrap=0)
    assert found.name == "BLEU-tok-unsmoothed" and found.empty_hypotheses == 3
    assert found.bleu == pytest.approx(22.5846775212, abs=1e-9)
    assert (found.hypothesis_length, found.reference_length) == (63211, 64807)


# What the number means


def test_perfect_is_100_shuffled_is_not_and_one_change_shows():
    assert score(SENTENCES, [SENTENCES]).bleu == pytest.approx(100)
    assert score([*SENTENCES[1:], SENTENCES[0]], [SENTENCES]).bleu < 10
    changed = [SENTENCES[0].replace("moon", "sun"), *SENTENCES[1:]]
    assert 50 < score(changed, [SENTENCES]).bleu < 100


def test_references_that_are_nested_wrongly_or_too_short_are_refused():
    with pytest.raises(UserError, match="3 hypotheses, but references 1 have 1 lines"):
        score(SENTENCES, [[s] for s in SENTENCES])
    with pytest.raises(UserError, match="3 hypotheses, but references 2 have 2 lines"):
        score(SENTENCES, [SENTENCES, SENTENCES[:2]])
    with pytest.raises(UserError, match="references 1 is one string"):
        score(SENTENCES, SENTENCES)
    with pytest.raises(UserError, match="hypotheses are one string"):
        score(SENTENCES[0], [list(SENTENCES[0])])
    with pytest.raises(UserError, match="no hypotheses"):
        score([], [[]])
    with pytest.raises(UserError, match="no references"):
        score(SENTENCES, [])


def test_several_references_are_streams_and_the_better_one_counts():
    other = ["Something else entirely stands here."] * 3
    assert score(SENTENCES, [other, SENTENCES]).bleu == pytest.approx(100)
    assert score(SENTENCES, [other, SENTENCES]).references == 2


def test_empty_lines_are_counted_and_score_nothing():
    found = score(["", "", ""], [SENTENCES])
    assert (found.bleu, found.empty_hypotheses, found.length_ratio) == (0.0, 3, 0.0)
    assert any("warning: 100.0% of the hypotheses are empty" in line for line in found.lines())
    found = score(SENTENCES, [["", *SENTENCES[1:]]])
    assert found.empty_references == 1 and 0 < found.bleu < 100
    assert score(SENTENCES, [["", "", ""]]).bleu == 0.0
    assert not any("warning" in line for line in score(SENTENCES, [SENTENCES]).lines())


def test_the_name_bleu_is_kept_for_the_standard():
    assert score_name("13a", "exp", False) == "BLEU"
    assert (
        score_name("intl", "exp", True) == "BLEU-intl-lc" and score_name("none", "none", False) == "BLEU-tok-unsmoothed"
    )
    found = score(SENTENCES, [SENTENCES], lowercase=True)
    assert found.metrics().keys() == {"bleu-lc", "chrf", "length_ratio"} and "case:lc" in found.signature
    assert "tok:13a|smooth:exp" in score(SENTENCES, [SENTENCES]).signature


def test_the_interval_is_seeded_and_shrinks_with_more_sentences():
    draw = random.Random(0)
    words = [[draw.choice("abcdefgh") * 3 for _ in range(12)] for _ in range(400)]
    references = [" ".join(w) + "." for w in words]
    hypotheses = [" ".join(draw.choice("abcdefgh") * 3 if draw.random() < 0.3 else x for x in w) + "." for w in words]
    small, large = score(hypotheses[:50], [references[:50]]), score(hypotheses, [references])
    assert small.interval and large.interval and small.interval > 1.5 * large.interval
    assert score(hypotheses, [references]).as_json() == large.as_json()
    assert large.bootstrap_mean is not None and abs(large.bootstrap_mean - large.bleu) < large.interval
    assert score(hypotheses[:3], [references[:3]]).interval is None  # of so few there is none
    for resamples in (0, 1):
        alone = score(hypotheses, [references], bootstrap=resamples)
        assert alone.interval is None and alone.bleu == large.bleu and "±" not in alone.lines()[0]


def test_a_difference_is_significant_or_not():
    draw = random.Random(1)
    references = [" ".join(draw.choice("abcdefgh") * 2 for _ in range(12)) + "." for _ in range(200)]

    def worse(share):
        return [" ".join("zz" if draw.random() < share else w for w in r.split()) for r in references]

    good, bad = worse(0.1), worse(0.3)
    assert compare(good, bad, [references]).p_value < 0.01
    again = compare(good, good[:-1] + [references[-1]], [references])
    assert again.p_value > 0.05 and again.second >= again.first
    assert compare(good, bad, [references]).second == pytest.approx(score(bad, [references]).bleu)
    assert compare(good, bad, [references]) == compare(good, bad, [references])  # the resamples are seeded


def test_equal_systems_do_not_differ():
    """sacreBLEU alone reports 1 / (resamples + 1): no resample differs by *more* than the systems do."""
    references = [f"Sentence number {i} stands here for {i % 7} people." for i in range(30)]
    for hypotheses in (references, [""] * 30):
        same = compare(hypotheses, hypotheses, [references], resamples=100)
        assert same.p_value == 1.0 and "not significant" in same.line()


# What must not be scored


def test_text_in_pieces_or_tokenised_is_refused_with_side_share_and_line():
    pieces = ["▁The ▁cat ▁sat", *SENTENCES[1:]]
    with pytest.raises(UserError, match="hypotheses: 33.3% of the lines hold subword marks .* line 1"):
        score(pieces, [SENTENCES])
    with pytest.raises(UserError, match="references 1: 100.0% of the lines hold subword marks"):
        score(SENTENCES, [["He@@ llo Wor@@ ld"] * 3], tokenize="none")
    tokenised = [s.replace(".", " .") for s in SENTENCES]
    with pytest.raises(UserError, match="hypotheses: 100.0% of the lines have a space before their last full stop"):
        score(tokenised, [SENTENCES])
    with pytest.raises(UserError, match="the second system's hypotheses: 100.0% of the lines have a space"):
        compare(SENTENCES, tokenised, [SENTENCES])
    assert score(tokenised, [tokenised], tokenize="none").bleu == pytest.approx(100)
    assert score(pieces, [SENTENCES], allow_pieces=True).bleu > 0
    assert score(["Write to me @@ noon."] * 3 + SENTENCES * 200, [["x"] * 3 + SENTENCES * 200]).bleu > 0


def test_line_breakers_inside_lines_do_not_shift_anything(tmp_path):
    text = [SENTENCES[0], "A \u2028 line \x85 with \x0b odd \x1c breaks.", SENTENCES[2]]
    for name in ("hypotheses", "references"):
        (tmp_path / name).write_bytes("".join(line + "\n" for line in text).encode())
    hypotheses, references = read(tmp_path / "hypotheses"), read(tmp_path / "references")
    assert len(hypotheses) == 3 and score(hypotheses, [references]).bleu == pytest.approx(100)


def test_it_is_what_the_command_of_sacrebleu_prints(tmp_path):
    hypotheses = [s.replace("the", "a") for s in SENTENCES]
    (tmp_path / "h").write_text("\n".join(hypotheses) + "\n")
    (tmp_path / "r").write_text("\n".join(SENTENCES) + "\n")
    command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "r"), "-i", str(tmp_path / "h"), "-b", "-w", "4"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
    assert score(hypotheses, [SENTENCES]).bleu == pytest.approx(float(printed), abs=1e-4)
