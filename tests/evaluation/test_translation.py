"""What an evaluation says beside its numbers when they should not be trusted."""

from types import SimpleNamespace

import pytest

from mtf_experiments.evaluation.bleu import score
from mtf_experiments.evaluation.evaluator import Measured
from mtf_experiments.evaluation.translation import TranslationResult

REFERENCES = ["The cat sat on the mat today.", "A dog ran over the green hill."] * 10
GARBAGE = ["zzz yyy xxx."] * 20


def measured(per_token, hypotheses, warning=""):
    bleu = score(hypotheses, [REFERENCES])
    perplexity = SimpleNamespace(scales=[SimpleNamespace(ppl_token=per_token)], lines=lambda: ["a", "b", "c"])
    return Measured(perplexity, TranslationResult("validation", (), bleu, 0.0, warning))


@pytest.mark.parametrize(
    ("per_token", "hypotheses", "warned"),
    [(1.5, GARBAGE, True), (1.5, REFERENCES, False), (40.0, GARBAGE, False), (40.0, REFERENCES, False)],
)
def test_good_predictions_with_bad_translations_are_suspicious(per_token, hypotheses, warned):
    """A decoder that sees the token it has to predict looks perfect until it has to write by itself."""
    lines = measured(per_token, hypotheses).lines()
    assert any("does the model see what it has to predict" in line for line in lines) == warned


def test_what_makes_references_incomparable_is_told_with_the_score():
    lines = measured(40.0, REFERENCES, "the references: tokenised").lines()
    assert lines[-1] == "  warning: the references: tokenised" and any("BLEU 100.00" in line for line in lines)
