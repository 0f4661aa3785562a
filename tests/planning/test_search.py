"""The search finds what trying everything finds: layouts, meshes, and the fastest of them, on compiled programs."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from mtf_experiments import experiment, mtf
from mtf_experiments.models import two_layer
from mtf_experiments.planning import best
from mtf_experiments.planning.cost import step_time
from mtf_experiments.planning.estimate import Estimator
from mtf_experiments.planning.hardware import RING, SWITCH, Hardware, Level
from mtf_experiments.planning.hlo import hlo_ledger
from mtf_experiments.planning.search import factorizations, is_legal, layouts, search
from tests.layouts import tiny

NAMES = ("rows", "cols")


def machine(flops=1e6, bandwidth=1e5, outer=1e3):
    return Hardware(
        name="toy",
        float32_flops=flops,
        bfloat16_flops=flops,
        memory=1e12,
        memory_bandwidth=bandwidth,
        levels=(Level("outer", RING, 4, outer, 0.0), Level("inner", SWITCH, 2, 4 * outer, 0.0)),
    )


def test_factorizations_are_all_and_ordered():
    assert factorizations(8, 2) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert len(factorizations(512, 3)) == 55 and all(a * b * c == 512 for a, b, c in factorizations(512, 3))


def test_legal_layouts_are_those_that_pass_the_check_of_all_there_are():
    made = tiny.programs("all:1", "", abstract=True)
    estimator, mesh = Estimator(made.record(), made.SUMMED), mtf.MeshShape("rows:2;cols:4")
    dimensions = [n for n in estimator.dimensions if n not in ("norms", "sublayers", "in_out", "positions")]
    every = (
        mtf.Layout({n: a for n, a in zip(dimensions, axes, strict=True) if a})
        for axes in itertools.product((None, "rows", "cols"), repeat=len(dimensions))
    )
    legal = {frozenset(layout.items()) for layout in every if is_legal(estimator, mesh, layout)}
    found = {frozenset(layout.items()) for layout in layouts(estimator, mesh)}
    assert {rules for rules in found if {n for n, _ in rules} <= set(dimensions)} == legal
    assert len(legal) > 100


def arguments():
    shapes = two_layer.shapes(16, 8, 64)
    tensors = {n: mtf.NamedTensor(jax.ShapeDtypeStruct(s.sizes, jnp.float32), s) for n, s in shapes.items()}
    return {n: tensors[n] for n in ("w", "bias", "v")}, tensors["x"], tensors["targets"]


@pytest.mark.parametrize(
    "hardware", [machine(), machine(outer=1e5), machine(flops=1e4)], ids=["slow net", "fast net", "slow"]
)
def test_the_best_is_that_of_all_compiled_candidates(hardware):
    def loss(params, x, targets):
        return mtf.reduce_sum(mtf.square(two_layer.two_layers(params, x) - targets))

    def gradients(params, x, targets):
        return jax.grad(lambda p: loss(p, x, targets).array)(params)

    params, x, targets = arguments()
    record = mtf.record(loss, params, x, targets)
    estimator = Estimator(record, parameters=record.arguments[: len(params)])
    found = search(estimator, hardware, 8, NAMES, traffic_scale=0.0)
    assert found.exact

    def compiled_seconds(mesh_shape, layout):
        mesh = mtf.make_mesh(mesh_shape)
        text = mtf.spmd(gradients, mesh, layout).lower(params, x, targets).compile().as_text()
        made = hlo_ledger(text, mesh_shape)
        traced = mtf.ledger(gradients, mesh, layout, params, x, targets)
        # The CPU compiler hands products to libraries, so that theirs are the trace's; collectives are its own.
        return step_time(mtf.Ledger(made.collectives, traced.products), 0.0, hardware, mesh_shape).seconds

    every = []
    for sizes in factorizations(8, 2):
        mesh = mtf.MeshShape(dict(zip(NAMES, sizes, strict=True)))
        every += [(compiled_seconds(mesh, layout), mesh, layout) for layout in layouts(estimator, mesh)]
    fastest = min(seconds for seconds, _, _ in every)
    winner = found.candidates[0]
    assert winner.seconds == pytest.approx(fastest, rel=0.02)
    chosen = next(s for s, mesh, layout in every if (mesh, layout) == (winner.mesh, winner.layout))
    assert chosen == pytest.approx(fastest, rel=0.02)


def test_too_many_candidates_are_searched_in_part_and_it_says_so():
    made = tiny.programs("all:1", "", abstract=True)
    estimator = Estimator(made.record(), made.SUMMED)
    everything = search(estimator, machine(), 8, NAMES)
    part = search(estimator, machine(), 8, NAMES, most=500)
    assert everything.exact and not part.exact and part.timed < everything.timed
    assert part.candidates[0].seconds <= 2 * everything.candidates[0].seconds


@pytest.fixture(scope="module")
def paper():
    """The search for the paper's largest language model on its machine."""
    from mtf_experiments import config

    exp, hardware = experiment.load_all(["hardware/tpu_v2.gin", "lm_4.9b.gin"], [], [experiment.Experiment, Hardware])
    yield best.search_for(exp, exp.dry_mesh(None), hardware, wanted=3)
    config.clear()


def test_the_papers_layout_is_found_for_its_largest_language_model(paper):
    winner = paper.fitting[0]
    assert paper.found.exact and paper.found.timed > 10_000
    assert winner.mesh == {"rows": 16, "cols": 32} and winner.fits and not winner.squeezed
    assert dict(winner.layout) == {"batch": "rows", "vocab": "cols", "d_ff": "cols", "heads": "cols"}
    assert paper.own is not None and paper.own.seconds == winner.seconds


def test_every_other_loses_for_a_reason(paper):
    reasons = [best.reason(r, paper.fitting[0], paper.estimator, paper.hardware) for r in paper.fitting]
    assert reasons[0] == "the best" and all("+" in text for text in reasons[1:])


def test_what_does_not_fit_is_made_to():
    exp, hardware = experiment.load_all(
        ["hardware/tpu_v2.gin", "lm_4.9b.gin"], ["Hardware.memory=2.5e9"], [experiment.Experiment, Hardware]
    )
    made = best.made_to_fit(exp, hardware, exp.dry_mesh(None), mtf.Layout(exp.layout))
    assert made is not None and made.fits and made.squeezed and made.forecast.total_bytes <= 2.5e9
