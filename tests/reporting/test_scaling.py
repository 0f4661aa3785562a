"""Fits find the laws that made the numbers."""

import itertools

import pytest

from mtf_experiments.reporting.scaling import fit

SIZES = [1e6, 2e6, 4e6, 8e6, 16e6]
TOKENS = [1e5, 2e5, 4e5, 8e5]


def law(n, d):
    return 1.7 + 400 / n**0.34 + 410 / d**0.4


def test_both_terms_are_found():
    points = list(itertools.product(SIZES, TOKENS))
    found = fit([n for n, _ in points], [d for _, d in points], [law(n, d) for n, d in points])
    assert found.residual < 1e-3 and found.points == 20
    assert found.predict(6e6, 3e5) == pytest.approx(law(6e6, 3e5), rel=1e-3)
    assert found.by_parameters[1] == pytest.approx(0.34, abs=0.03) and found.by_tokens[1] == pytest.approx(
        0.4, abs=0.03
    )
    assert "N^0.3" in found.formula() and "D^0.4" in found.formula()


def test_what_does_not_vary_has_no_term():
    found = fit(SIZES, [1e5] * 5, [law(n, 1e5) for n in SIZES])
    assert found.by_tokens is None and found.predict(3e6, 1.0) == pytest.approx(law(3e6, 1e5), rel=1e-3)
    assert found.by_parameters[1] == pytest.approx(0.34, abs=0.03)


def test_too_few_runs_have_no_law():
    assert fit(SIZES[:3], [1e5] * 3, [3.0, 2.9, 2.8]) is None
    assert fit([1e6] * 6, [1e5] * 6, [3.0] * 6) is None
