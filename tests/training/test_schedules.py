import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments.errors import UserError
from mtf_experiments.training.schedules import Constant, InverseSquareRootToZero, WarmupCosine

PAPER = InverseSquareRootToZero(train_steps=136_000)


@pytest.mark.parametrize(("step", "printed"), [(0, 0.0), (10_000, 0.0100), (50_000, 0.00447), (122_400, 0.00286)])
def test_paper_schedule_has_the_printed_values(step, printed):
    assert float(PAPER(step)) == pytest.approx(printed, abs=5e-6)


def test_paper_schedule_equals_its_formula_at_every_kind_of_step():
    for t in [0, 1, 9_999, 10_000, 10_001, 77_777, 122_399, 122_401, 135_999, 136_000, 140_000]:
        expected = min(1, t / 1e4) * max(t, 1e4) ** -0.5 * min(max((136_000 - t) / 13_600, 0), 1)
        assert float(PAPER(t)) == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_translation_variant_falls_over_its_last_epoch():
    schedule = InverseSquareRootToZero(train_steps=154_000, final_steps=51_400)
    assert float(schedule(102_600)) == pytest.approx(102_600**-0.5, rel=1e-5)
    assert float(schedule(128_300)) == pytest.approx(0.5 * 128_300**-0.5, rel=1e-5)
    assert float(schedule(154_000)) == 0.0


def test_scale_multiplies_the_schedule():
    half = InverseSquareRootToZero(train_steps=136_000, scale=0.5)
    assert float(half(50_000)) == pytest.approx(0.5 * float(PAPER(50_000)))


def test_warmup_cosine_equals_its_formula():
    schedule = WarmupCosine(train_steps=110, peak=0.3, warmup_steps=10, final_fraction=0.1)
    for t in [0, 5, 10, 60, 109, 110, 200]:
        along = min(max(t - 10, 0) / 100, 1)
        expected = 0.3 * t / 10 if t < 10 else 0.3 * (0.1 + 0.9 * (1 + math.cos(math.pi * along)) / 2)
        assert float(schedule(t)) == pytest.approx(expected, rel=1e-5)


def test_constant_is_constant():
    assert [float(Constant(0.25)(t)) for t in (0, 1, 10**6)] == [0.25] * 3


SCHEDULES = [
    InverseSquareRootToZero(train_steps=20, warmup_steps=8, final_steps=5),
    WarmupCosine(train_steps=20, peak=1.0, warmup_steps=8),
    Constant(0.1),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_traced_and_python_steps_give_the_same_learning_rate(schedule):
    traced = [np.asarray(jax.jit(schedule)(jnp.int32(t))) for t in range(21)]
    np.testing.assert_allclose(traced, [np.asarray(schedule(t)) for t in range(21)], rtol=1e-6)
    assert traced[0].dtype == np.float32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_five_restarts_do_not_shift_the_learning_rate(schedule):
    straight = [float(schedule(t)) for t in range(20)]
    resumed, step = [], 0
    for stop in (3, 7, 8, 13, 17, 20):  # each process knows nothing but the saved step
        restarted = type(schedule)(**vars(schedule))
        resumed += [float(restarted(t)) for t in range(step, stop)]
        step = stop
    assert resumed == straight


def test_impossible_step_counts_are_refused_with_the_name_of_the_setting():
    with pytest.raises(UserError, match="train_steps is 0"):
        InverseSquareRootToZero(train_steps=0)
    with pytest.raises(UserError, match="warmup_steps is 50"):
        WarmupCosine(train_steps=50, peak=1.0, warmup_steps=50)
