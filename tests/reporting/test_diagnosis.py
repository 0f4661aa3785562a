"""Verdicts on curves of known shape."""

import pytest

from mtf_experiments.reporting.diagnosis import diagnose
from mtf_experiments.reporting.runs import Run
from tests.reporting import fake_runs


@pytest.mark.parametrize(
    ("nll", "verdict", "best"),
    [
        ((6.0, 5.0, 4.5, 4.2, 4.0, 3.8), "still improving", 3.8),
        ((6.0, 4.5, 4.01, 4.0, 4.0, 3.995), "saturated", 3.995),
        ((6.0, 4.5, 4.0, 4.1, 4.3, 4.6), "overfitting", 4.0),
        ((6.0, 4.0), "too few evaluations to say", 4.0),
    ],
)
def test_verdicts(nll, verdict, best, tmp_path):
    found = diagnose(Run.read(fake_runs.write(tmp_path, "a", nll=nll, steps=60, train=3.5)))
    assert (found.verdict, found.best_nll, found.last_nll) == (verdict, best, nll[-1])
    assert found.gap == pytest.approx(nll[-1] - 3.5)


def test_best_step_is_that_of_the_lowest_value(tmp_path):
    assert diagnose(Run.read(fake_runs.write(tmp_path, "a", nll=(6.0, 4.0, 4.1, 4.2), steps=40))).best_step == 20


def test_a_run_without_evaluation_has_no_diagnosis(tmp_path):
    run = fake_runs.write(tmp_path, "a", nll=())
    assert diagnose(Run.read(run)) is None
