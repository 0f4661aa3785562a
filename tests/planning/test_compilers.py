"""Verdicts of compilers: the CPU's here; the TPU's where libtpu is installed (it is optional)."""

import dataclasses
import importlib.util

import pytest

from mtf_experiments import experiment, mtf
from mtf_experiments.errors import UserError
from mtf_experiments.planning import compilers
from mtf_experiments.planning.forecast import forecast
from mtf_experiments.planning.plan import on_accelerators

TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)


def loaded(*bindings):
    return on_accelerators(experiment.load(["lm_tiny.gin"], list(bindings)))


@pytest.fixture(scope="module")
def on_cpu():
    exp = loaded("mesh_shape='rows:4;cols:2'")
    mesh = exp.dry_mesh(None)
    return compilers.compile_step(exp.programs, "cpu", mesh), forecast(exp.programs(mtf.abstract_mesh(mesh)))


def test_arguments_are_predicted_exactly(on_cpu):
    compiled, predicted = on_cpu
    assert compiled.fits and compiled.argument_bytes == predicted.argument_bytes


def test_collectives_are_predicted_but_for_the_optimizers(on_cpu):
    compiled, predicted = on_cpu
    found, expected = compiled.ledger.elements_by_mesh_dimension(), predicted.ledger.elements_by_mesh_dimension()
    assert found[("rows",)] == expected[("rows",)]
    # The norm of the gradients and Adafactor's means over split dimensions, placed by XLA.
    assert 0 <= found[("cols",)] - expected[("cols",)] < 0.01 * expected[("cols",)]


@pytest.mark.parametrize("target", ["gpu", "tpu", "tpu:v2", "tpu:16x16", "cpu:8", ""])
def test_targets_that_do_not_exist_are_refused(target):
    with pytest.raises(UserError, match="want cpu, or tpu:NAME"):
        compilers.check_target(target)


def test_without_the_tpu_compiler_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'mtf-experiments\[tpu-aot\]'"):
        compilers.check_target("tpu:v2:16x16")


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(UserError, match="8 devices, the mesh rows:2;cols:2 4"):
        compilers.target_mesh("cpu", mtf.MeshShape("rows:2;cols:2"))


@pytest.mark.parametrize(
    ("message", "needed", "limit"),
    [
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 49.92G of 7.48G hbm. Exceeded", 49.92, 7.48),
        (
            "RESOURCE_EXHAUSTED: the total memory required for temporaries (56.62G) exceeds available HBM (7.48G).",
            56.62,
            7.48,
        ),
    ],
)
def test_shortages_are_understood(message, needed, limit):
    reason, found, there = compilers._shortage(message)
    assert reason == f"needs {needed} GiB of {limit} GiB"
    assert (found, there) == (int(needed * 2**30), int(limit * 2**30))


@TPU
def test_the_tpu_compiler_agrees_on_collectives_and_arguments():
    exp = loaded("mesh_shape='rows:4;cols:2'", "batch_size=16")
    mesh = exp.dry_mesh(None)
    compiled = compilers.compile_step(exp.programs, "tpu:v2:2x2", mesh)
    predicted = forecast(exp.programs(mtf.abstract_mesh(mesh)))
    assert compiled.fits and compiled.ledger is not None
    rows = compiled.ledger.elements_by_mesh_dimension()[("rows",)]
    assert rows == predicted.ledger.elements_by_mesh_dimension()[("rows",)]
    assert compiled.argument_bytes >= predicted.argument_bytes  # tiles are padded


@TPU
def test_the_tpu_compiler_refuses_what_does_not_fit():
    exp = loaded("mesh_shape='rows:8;cols:1'", "d_ff=8388608")
    compiled = compilers.compile_step(exp.programs, "tpu:v2:2x2", exp.dry_mesh(None))
    assert not compiled.fits and "of 7.48 GiB" in compiled.reason
    assert dataclasses.replace(compiled, ledger=None).temporary_bytes is None


@TPU
def test_an_unknown_slice_is_refused():
    with pytest.raises(UserError, match="does not know this slice"):
        compilers.target_mesh("tpu:v2:3x5", mtf.MeshShape("rows:30"))
