"""Estimates from the record are what a trace under the layout would say: products exactly, communication but for scalars."""

import functools
import random

import jax
import jax.numpy as jnp
import pytest

from mtf_experiments import mtf
from mtf_experiments.models.translation import TranslationModelConfig
from mtf_experiments.planning.estimate import Estimator
from mtf_experiments.planning.search import layouts
from tests.layouts import tiny

CONFIGS = {
    "language model": (tiny.model(), {}),
    "translation": (TranslationModelConfig(**tiny.MODEL), {"inputs_length": tiny.LENGTH, "label_smoothing": 0.1}),
    "microbatches": (tiny.model(), {"microbatches": 2, "rows": 16}),
}
MESHES = ["rows:2;cols:4", "rows:4;cols:2"]
PAPER = "batch:rows;vocab:cols;d_ff:cols;heads:cols"


def made(name, mesh="all:1", layout=""):
    config, changes = CONFIGS[name]
    return tiny.programs(mesh, layout, config=config, abstract=True, **changes)


@functools.cache
def estimator(name):
    programs = made(name)
    return Estimator(programs.record(), programs.SUMMED, programs.settings.microbatches)


def legal_layouts(name, count, seed=0):
    """Random legal layouts; `d_kv` is left out of those that split it four ways, since it has size 4."""
    chosen, rng = [], random.Random(seed)
    while len(chosen) < count:
        mesh = mtf.MeshShape(rng.choice(MESHES))
        names = rng.sample(sorted(estimator(name).dimensions), rng.randint(1, 4))
        layout = mtf.Layout({n: rng.choice(list(mesh)) for n in names})
        try:
            estimator(name).check(mesh, layout)
        except mtf.LayoutError:
            continue
        if (mesh, layout) not in chosen:
            chosen.append((mesh, layout))
    return chosen


@pytest.mark.parametrize("name", CONFIGS)
def test_estimates_are_what_traces_say(name):
    for mesh, layout in [(mtf.MeshShape(MESHES[0]), mtf.Layout(PAPER)), *legal_layouts(name, 12)]:
        programs = made(name, str(mesh), str(layout))
        traced = mtf.trace_ledger(programs.gradient_program, *programs.abstract_gradient_arguments())
        guessed = estimator(name).ledger(mesh, layout)
        assert guessed.flops == traced.flops, (mesh, layout)
        expected, found = traced.elements(), guessed.elements()
        # What is left out: numbers of tokens and losses, and reshapes of the norm scales when those are split.
        allowed = 4 + 8 * 2 * tiny.MODEL["d_model"] * 3
        for key in expected | found:
            difference = abs(expected.get(key, 0) - found.get(key, 0))
            exact = key[0] == "allreduce"
            assert difference <= (4 if exact else allowed), (mesh, layout, key, expected, found)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_legal_for_the_estimator_is_legal_for_the_language(name):
    for mesh, layout in legal_layouts(name, 6, seed=1):
        made(name, str(mesh), str(layout))


@pytest.mark.parametrize(
    ("layout", "words"),
    {"d_ff:cols;d_model:cols": "two dimensions", "layers:rows": "looped over", "heads:planes": "planes"}.items(),
)
def test_illegal_layouts_are_refused(layout, words):
    with pytest.raises(mtf.LayoutError, match=words):
        estimator("language model").check(mtf.MeshShape(MESHES[0]), mtf.Layout(layout))


def test_bytes_of_parameters_are_those_of_their_slices():
    mesh, layout = mtf.MeshShape(MESHES[0]), mtf.Layout(PAPER)
    params = made("language model").params
    whole = {n: 4 * p.shape.elements for n, p in params.items()}
    split = {"decoder/attention/qkvo", "decoder/feed_forward/wi_wo", "embedding/tokens", "softmax"}
    expected = sum(size // 4 if n in split else size for n, size in whole.items())
    assert estimator("language model").parameter_bytes(mesh, layout) == expected


def test_traffic_falls_with_the_slices():
    of = estimator("language model").traffic
    mesh = mtf.MeshShape("rows:8")
    assert of(mesh, mtf.Layout("batch:rows")) * 8 == pytest.approx(
        of(mesh, mtf.Layout("")), rel=1e-3
    )  # all but the loss


X, W = (mtf.Dimension("b", 8), mtf.Dimension("c", 16)), (mtf.Dimension("c", 16), mtf.Dimension("d", 32))
B, D = X[0], W[1]
PROGRAMS = {
    "sum": lambda y: y,
    "mean": lambda y: mtf.reduce_mean(y, "d"),
    "largest": lambda y: mtf.reduce_max(y, "d"),
    "logsumexp": lambda y: mtf.reduce_logsumexp(y, "d"),
    "softmax": lambda y: mtf.softmax(y, "d"),
    "log_softmax": lambda y: mtf.log_softmax(y, "d"),
    "cumsum": lambda y: mtf.cumsum(y, "d"),
    "shift": lambda y: mtf.shift(y, 1, "d"),
    "concat": lambda y: mtf.concat([y, y], "d"),
    "stack": lambda y: mtf.stack([y] * 8, "e"),
    "rename": lambda y: mtf.rename(y, d="e"),
    "reshape": lambda y: mtf.reshape(y, [B, mtf.Dimension("e", 8), mtf.Dimension("f", 4)]),
    "slice": lambda y: mtf.slice_dimension(y, "d", 8, 16),
    "transpose": lambda y: mtf.transpose(y, ["d", "b"]),
    "unstack": lambda y: mtf.unstack(y, "d")[3],
    "gather": lambda y: mtf.gather(y, mtf.NamedTensor(jnp.arange(5), [mtf.Dimension("e", 5)]), "d"),
}


def einsum(x, w, rename=None):
    return mtf.einsum([x, w], [B, D], rename=rename)


@pytest.mark.parametrize("name", [*PROGRAMS, "einsum that renames"])
def test_any_program_of_the_language_is_estimated(name):
    """Under all legal layouts of its dimensions over 2 x 4 processors: every collective but the sum of the loss itself."""

    def loss(w, x):
        y = einsum(x, w, {"d": "e"}) if name == "einsum that renames" else PROGRAMS[name](einsum(x, w))
        return mtf.reduce_sum(mtf.square(y))

    def gradients(w, x):
        return jax.grad(lambda w: loss(w, x).array)(w)

    w, x = (mtf.NamedTensor(jax.ShapeDtypeStruct(tuple(d.size for d in s), jnp.float32), s) for s in (W, X))
    record = mtf.record(loss, w, x)
    of, mesh = Estimator(record, parameters=record.arguments[:1]), mtf.MeshShape("r:2;s:4")
    tried = 0
    for layout in layouts(of, mesh):
        traced = mtf.ledger(gradients, mtf.abstract_mesh(mesh), layout, w, x)
        guessed = of.ledger(mesh, layout)
        found = {k: n for k, n in guessed.elements().items() if n > 1}
        expected = traced.elements()
        difference = {k: abs(found.get(k, 0) - expected.get(k, 0)) for k in found | expected}
        assert max(difference.values(), default=0) <= 1, (layout, found, expected)
        assert guessed.flops == traced.flops
        tried += 1
    assert tried >= 9
