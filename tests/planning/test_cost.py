"""The time of a step from a ledger, by hand."""

import pytest

from mtf_experiments.mtf import Collective, Ledger, Product
from mtf_experiments.planning.cost import step_time
from mtf_experiments.planning.explain import shares
from mtf_experiments.planning.hardware import RING, Hardware, Level

MESH = {"rows": 2, "cols": 4}
MACHINE = Hardware(
    name="toy",
    float32_flops=100.0,
    bfloat16_flops=200.0,
    memory=1e3,
    memory_bandwidth=10.0,
    levels=(Level("y", RING, 2, 4.0, 0.0), Level("x", RING, 4, 8.0, 0.0)),
)
LEDGER = Ledger(
    collectives=(
        Collective("allreduce", ("rows",), 10, 40, 2),
        Collective("allgather", ("cols",), 20, 80, 1),
        Collective("allreduce", ("rows", "cols"), 1, 4, 1),
    ),
    products=(
        Product(1000, 20, "float32", 3, "big", ("rows", "cols")),  # arithmetic: 10 s against 2 s of memory
        Product(100, 50, "bfloat16", 1, "small", ("rows",)),  # memory: 5 s against 0.5 s
    ),
)


def test_products_take_the_longer_of_arithmetic_and_memory():
    time = step_time(LEDGER, 70, MACHINE, MESH)
    assert time.products == pytest.approx(3 * 10 + 5)
    assert time.elementwise == pytest.approx(7)
    assert time.compute == pytest.approx(42)


def test_collectives_are_charged_to_their_mesh_dimensions():
    time = step_time(LEDGER, 0, MACHINE, MESH)
    assert time.communication[("rows",)] == pytest.approx(2 * 2 * 1 / 2 * 40 / 4)
    assert time.communication[("cols",)] == pytest.approx(3 / 4 * 80 / 8)
    assert time.communication[("rows", "cols")] == pytest.approx(2 * (3 / 4 * 4 / 8 + 1 / 2 * 1 / 4))


def test_a_step_is_the_sum_and_at_best_the_larger_part():
    time = step_time(LEDGER, 70, MACHINE, MESH)
    assert time.seconds == pytest.approx(time.compute + time.communicating)
    assert time.overlapped == pytest.approx(max(time.compute, time.communicating))


def test_shares_add_up_to_the_step_and_the_useful_one_is_the_efficiency():
    time = step_time(LEDGER, 70, MACHINE, MESH)
    model_flops = 8 * 2900.0
    parts = shares(time, LEDGER.products, MACHINE, MESH, model_flops)
    assert sum(parts.values()) == pytest.approx(time.seconds)
    assert parts["useful arithmetic"] == pytest.approx(29.0)
    # 0.5 s of the small product, of which a quarter would do on four columns.
    assert parts["the same products on several processors"] == pytest.approx(0.5 * 3 / 4)


def test_replicated_and_attainable_peak_slow_products_down():
    slower = Hardware(**{**vars(MACHINE), "attainable": 0.5})
    assert step_time(LEDGER, 0, slower, MESH).products == pytest.approx(3 * 20 + 5)
