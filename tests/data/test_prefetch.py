"""Batches made ahead are the same batches; errors arrive, and the thread ends."""

import threading
import time

import pytest

from mtf_experiments.data.prefetch import prefetch


def alive():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_items_come_in_order_from_the_first_step_on(depth):
    with prefetch(lambda step: step * step, 3, depth, stop_step=20) as items:
        assert list(items) == [step * step for step in range(3, 20)]
    assert not alive()


def test_not_more_than_depth_items_are_made_ahead():
    made = []
    with prefetch(lambda step: made.append(step) or step, 0, depth=2) as items:
        assert next(items) == 0
        time.sleep(0.3)
        assert made[-1] <= 3  # one taken, two waiting, one in the hand of the thread


def test_an_exception_arrives_at_the_step_where_it_happened():
    def fail(step):
        if step == 2:
            raise ValueError("bad step 2")
        return step

    items = prefetch(fail, 0, depth=4)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="bad step 2"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    assert not alive()


def test_closing_in_the_middle_ends_the_thread_soon():
    items = prefetch(lambda step: step, 0, depth=1)
    next(items)
    begin = time.monotonic()
    items.close()
    assert not alive() and time.monotonic() - begin < 5
    assert list(items) == []


def test_depth_must_be_positive():
    with pytest.raises(ValueError, match="depth"):
        prefetch(lambda step: step, 0, depth=0)
