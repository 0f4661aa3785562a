"""Profiles, and the time of collectives: formulas by hand."""

from pathlib import Path

import pytest

from mtf_experiments import config
from mtf_experiments.errors import UserError
from mtf_experiments.planning.hardware import LINE, RING, SWITCH, Hardware, Level, collective_seconds

PROFILES = sorted((Path(__file__).parents[2] / "gin" / "hardware").glob("*.gin"))
TORUS = (Level("y", RING, 4, 8.0, 0.0), Level("x", RING, 4, 8.0, 0.0), Level("chip", SWITCH, 2, 100.0, 0.0))


def machine(*levels, any_order=False):
    return Hardware(
        name="toy",
        float32_flops=1e3,
        bfloat16_flops=2e3,
        memory=1e3,
        memory_bandwidth=10.0,
        levels=levels or TORUS,
        any_order=any_order,
    )


def hops(mesh, *dimensions, of=None):
    return [(h.level.name, h.size, h.bandwidth) for h in (of or machine()).hops(mesh, dimensions) if h.size > 1]


@pytest.fixture(params=PROFILES, ids=lambda path: path.stem)
def shipped(request):
    with config.loaded([request.param]):
        yield config.build(Hardware)
        config.check_all_read()


def test_shipped_profiles_are_whole(shipped):
    assert shipped.memory > 1e9 and shipped.bfloat16_flops >= shipped.float32_flops > shipped.memory_bandwidth > 1e11
    assert all(level.bandwidth <= shipped.memory_bandwidth and level.kind in (RING, SWITCH) for level in shipped.levels)
    assert shipped.peak("bfloat16") == shipped.bfloat16_flops and shipped.peak("float32") == shipped.float32_flops


def test_the_papers_machine_has_11_5_petaflops():
    with config.loaded(["hardware/tpu_v2.gin"]):
        tpu = config.build(Hardware)
    assert tpu.float32_flops * 512 == pytest.approx(11.5e15, rel=0.01)
    assert hops({"rows": 16, "cols": 32}, "cols", of=tpu) == [("cores of a chip", 2, 350e9), ("torus x", 16, 62e9)]
    assert hops({"rows": 16, "cols": 32}, "rows", of=tpu) == [("torus y", 16, 62e9)]


def test_mesh_dimensions_lie_over_the_levels_from_inside():
    assert hops({"rows": 4, "cols": 8}, "cols") == [("chip", 2, 100.0), ("x", 4, 8.0)]
    assert hops({"rows": 4, "cols": 8}, "rows") == [("y", 4, 8.0)]
    assert hops({"rows": 4, "cols": 8}, "rows", "cols") == [("chip", 2, 100.0), ("x", 4, 8.0), ("y", 4, 8.0)]


def test_a_part_of_a_ring_goes_one_way_and_shares_its_links_with_what_lies_between():
    # cols: the chip and half of x; rows: the other half of x, whose members are two apart, and y.
    assert hops({"rows": 8, "cols": 4}, "cols") == [("chip", 2, 100.0), ("x", 2, 4.0)]
    assert hops({"rows": 8, "cols": 4}, "rows") == [("x", 2, 2.0), ("y", 4, 8.0)]


def test_in_any_order_a_mesh_is_laid_so_that_it_crosses_fewest_levels():
    free = machine(any_order=True)
    assert hops({"rows": 8, "cols": 4}, "cols", of=free) in ([("x", 4, 8.0)], [("y", 4, 8.0)])


def test_a_small_part_of_a_torus_has_ends():
    level = machine().hops({"all": 4}, ["all"])[-1].level
    assert level.kind == LINE and level.size == 2
    wraps = machine(Level("z", RING, 16, 8.0, closes=4))
    assert wraps.hops({"all": 4}, ["all"])[0].level.kind == RING
    assert wraps.hops({"all": 4}, ["all"])[0].bandwidth == 8.0


def test_the_largest_machine_is_a_limit():
    machine().check({"rows": 4, "cols": 8})
    with pytest.raises(UserError, match="at most 32 devices.*rows:8;cols:8 has 64"):
        machine().check({"rows": 8, "cols": 8})


@pytest.mark.parametrize(
    ("kind", "seconds"),
    {
        "allreduce": 2 * 3 / 4 * 80 / 8,
        "allgather": 3 / 4 * 80 / 8,
        "reduce_scatter": 3 / 4 * 80 / 8,
        "alltoall": 4 / 4 * 80 / 8,  # n/4 links on average
        "exchange": 80 / 8,
    }.items(),
)
def test_ring_formulas(kind, seconds):
    (ring,) = machine(Level("x", RING, 4, 8.0, 0.0)).hops({"all": 4}, ["all"])
    assert collective_seconds(kind, 80, [ring]) == pytest.approx(seconds)


def test_an_alltoall_through_a_switch_sends_each_byte_once():
    (switch,) = machine(Level("x", SWITCH, 4, 8.0, 0.0)).hops({"all": 4}, ["all"])
    assert collective_seconds("alltoall", 80, [switch]) == pytest.approx(3 / 4 * 80 / 8)


def test_an_allreduce_over_levels_sends_only_parts_outside():
    crossed = machine().hops({"all": 32}, ["all"])
    # Half of the bytes between the cores of a chip twice; a half is left for x, an eighth for y.
    expected = 2 * (1 / 2 * 80 / 100 + 3 / 4 * 40 / 8 + 3 / 4 * 10 / 8)
    assert collective_seconds("allreduce", 80, crossed) == pytest.approx(expected)


def test_latency_is_paid_for_every_neighbour_on_the_way():
    (ring,) = machine(Level("x", RING, 4, 8.0, 0.5)).hops({"all": 4}, ["all"])
    assert collective_seconds("allreduce", 0, [ring]) == pytest.approx(2 * 3 * 0.5)


def test_unknown_kinds_of_levels_are_refused():
    with pytest.raises(UserError, match="'tree'.*want 'ring'"):
        machine(Level("x", "tree", 4, 8.0)).check({"all": 2})
