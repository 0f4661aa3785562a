"""Table 1 comes out of traces: the paper's formulas, with the factors that it drops."""

import pytest

from mtf_experiments.models import two_layer
from mtf_experiments.planning.table1 import Table1, draw, formula, symbolic, value

# Terms of the highest order in each column: what the paper prints.
PAPER = {
    two_layer.EMPTY: ({"bdh"}, set(), {"bd", "bh", "dh"}),
    two_layer.DATA_PARALLEL: ({"bdh/n"}, {"dh"}, {"bd/n", "bh/n", "dh"}),
    two_layer.MODEL_PARALLEL: ({"bdh/n"}, {"bd"}, {"bd", "bh/n", "dh/n"}),
    two_layer.MIXED: ({"bdh/rc"}, {"bd/r", "dh/c"}, {"bd/r", "bh/rc", "dh/c"}),
    two_layer.THREE_DIMENSIONAL: ({"bdh/rcp"}, {"bd/rp", "bh/rc", "dh/cp"}, {"bd/rp", "bh/rc", "dh/cp"}),
}


def order(monomial):
    return len(monomial.partition("/")[0].replace("1", ""))


@pytest.mark.parametrize("row", symbolic(), ids=lambda row: row.name)
def test_terms_of_the_highest_order_are_the_papers(row):
    compute, communication, memory = PAPER[row.layout]
    assert set(row.compute) == compute
    assert {m for m in row.communication if order(m) == 2} == communication
    assert {m for m in row.memory if order(m) == 2} == memory


def test_factors_are_those_of_forward_and_backward_pass():
    mixed = next(row for row in symbolic() if row.layout == two_layer.MIXED)
    assert formula(mixed.compute) == "12 bdh/rc"  # two products, three times, two FLOPs each
    assert formula(mixed.communication) == "2 bd/r + 2 dh/c + h/c + 1"
    sizes = {"b": 100, "d": 10, "h": 40, "r": 5, "c": 2}
    assert value(mixed.communication, sizes) == 2 * 100 * 10 / 5 + 2 * 10 * 40 / 2 + 40 / 2 + 1


def test_it_is_printed_in_symbols_and_numbers():
    text = Table1(batch=16, io=8, hidden=64, rows=4, cols=2, planes=2).render()
    assert "2 bd/rp + 2 bh/rc + 2 dh/cp + h/c + 1" in text
    assert "n = 16 = 4 x 4 = 4 x 2 x 2" in text
    compute = 12 * 16 * 8 * 64
    assert f"{compute:,}" in text and f"{compute // 16:,}" in text


def test_the_efficiency_condition_is_drawn(tmp_path):
    draw(tmp_path / "table1.png")
    assert (tmp_path / "table1.png").stat().st_size > 10_000
