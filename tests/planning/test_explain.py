"""Explanations name what is unused and what would help."""

import pytest

from mtf_experiments import experiment, mtf
from mtf_experiments.planning.explain import changes, einsums
from mtf_experiments.planning.hardware import Hardware
from mtf_experiments.planning.plan import estimator_of, make_plan


@pytest.fixture(scope="module")
def loaded():
    files = ["hardware/tpu_v2.gin", "lm_4.9b.gin"]
    exp, hardware = experiment.load_all(files, [], [experiment.Experiment, Hardware])
    mesh = exp.dry_mesh(None)
    return exp, hardware, mesh, estimator_of(exp, mesh)


def test_the_papers_layout_uses_all_of_the_mesh_for_every_einsum(loaded):
    exp, hardware, mesh, estimator = loaded
    found = einsums(estimator, hardware, mesh, mtf.Layout(exp.layout))
    assert found and all(e.unused == () and e.wasted == 0 for e in found)
    assert [e.seconds for e in found] == sorted((e.seconds for e in found), reverse=True)


def test_an_unsplit_vocabulary_leaves_cols_unused_in_the_logits_and_nowhere_else(loaded):
    _, hardware, mesh, estimator = loaded
    layout = mtf.Layout("batch:rows;d_ff:cols;heads:cols")
    idle = [e for e in einsums(estimator, hardware, mesh, layout) if e.unused]
    assert [e.name.split(" ")[0] for e in idle] == ["logits"] and idle[0].unused == ("cols",)
    assert idle[0].wasted == pytest.approx(idle[0].seconds * 31 / 32)
    first, *_ = changes(estimator, hardware, mesh, layout, 0.3)
    assert first.what == "add vocab:cols" and first.saved == pytest.approx(idle[0].wasted, rel=0.5)


def test_changes_are_legal_and_sorted(loaded):
    _, hardware, mesh, estimator = loaded
    found = changes(estimator, hardware, mesh, mtf.Layout("batch:rows"), 0.3)
    for change in found:
        estimator.check(mesh, change.layout)
    assert [c.saved for c in found] == sorted((c.saved for c in found), reverse=True)


def test_plan_of_the_largest_language_model(loaded):
    exp, hardware, mesh, _ = loaded
    plan = make_plan(exp, mesh, hardware)
    # Paper, section 9.1: 6 of 11.5 PFLOP/s, 0.34 s a step (13 hours for 136,000).  Nothing but the model's costs is in ours.
    assert 6 / 11.5 < plan.efficiency < 0.85 and 0.2 < plan.time.seconds < 0.344
    assert plan.fits and sum(plan.shares.values()) == pytest.approx(plan.time.seconds)
    assert plan.forecast.ledger.flops * 512 == pytest.approx(plan.model_flops)
    assert [c.remat for c in plan.choices] == ["none", "communication", "full"]
    held = [c.total_bytes for c in plan.choices]
    assert held == sorted(held, reverse=True)
    names = {p.name: p for p in plan.placed}
    assert names["decoder/attention/qkvo"].rules == ("heads:cols",)
    assert names["decoder/attention/qkvo"].slices == (6, 4, 8, 1024, 256)
    assert names["decoder/attention/qkvo"].bytes == 4 * 6 * 4 * 8 * 1024 * 256
