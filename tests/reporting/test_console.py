import io
import math

import pytest

from mtf_experiments.reporting import console
from mtf_experiments.reporting.console import ProgressDisplay, ThroughputMeter, progress_line


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_rate_is_of_the_window_and_pauses_are_apart():
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    with meter.pause("compile"):
        clock.now += 30
    for _ in range(3):
        clock.now += 2
        meter.step(tokens=100, positions=128)
    first = meter.read()
    assert (first.steps, first.seconds) == (3, pytest.approx(6))
    assert first.tokens_per_second == pytest.approx(50)
    for _ in range(2):
        clock.now += 1
        meter.step(tokens=100, positions=128)
    with meter.pause("evaluate"):
        clock.now += 7
    with meter.pause("evaluate"):
        clock.now += 3
    second = meter.read()
    assert second.tokens_per_second == pytest.approx(100)
    assert meter.pauses == {"compile": 30, "evaluate": 10}
    assert meter.elapsed == pytest.approx(48)


def test_steps_of_a_tenth_of_a_second_are_ten_steps_a_second():
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    for _ in range(20):
        clock.now += 0.1
        meter.step(1, 1)
    assert meter.read().steps_per_second == pytest.approx(10)


def test_pause_that_fails_is_still_counted():
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    with pytest.raises(RuntimeError), meter.pause("save"):
        clock.now += 5
        raise RuntimeError
    clock.now += 1
    meter.step(4, 4)
    assert meter.read().tokens_per_second == pytest.approx(4)


def test_padding_is_told_apart_from_tokens_globally_and_per_device():
    clock = Clock()
    meter = ThroughputMeter(devices=4, clock=clock)
    clock.now += 2
    meter.step(tokens=512, positions=1024)
    scalars = meter.read().scalars()
    assert scalars["tokens/s"] == 256 and scalars["positions/s"] == 512 and scalars["padding"] == 0.5
    assert scalars["tokens/s/device"] == 64 and scalars["positions/s/device"] == 128
    assert "FLOP/s" not in scalars and "peak_share" not in scalars


def test_share_of_the_peak_is_of_all_devices_together():
    clock = Clock()
    meter = ThroughputMeter(devices=4, flops_per_step=6e12, peak_flops=1e12, clock=clock)
    for _ in range(2):
        clock.now += 3
        meter.step(1, 1)
    read = meter.read()
    assert read.flops_per_second == pytest.approx(2e12)
    assert read.peak_share == pytest.approx(0.5)


def test_empty_window_has_no_rate_and_does_not_fail():
    meter = ThroughputMeter(flops_per_step=1.0, peak_flops=1.0, clock=Clock())
    read = meter.read()
    assert math.isnan(read.tokens_per_second) and math.isnan(read.padding) and read.flops_per_second is None
    assert "ETA unknown" in progress_line(0, 10, {}, read, 0.0)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999, "999"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (999_499, "999k"),
        (999_600, "1.00M"),
        (4_899_000_000, "4.90B"),
        (0.123, "0.12"),
        (math.inf, "inf"),
    ],
)
def test_counts_have_three_digits_and_a_unit(n, text):
    assert console.count(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2_040_109_466, "1.90 GiB"), (0, "unknown"), (None, "unknown")],
)
def test_bytes_are_readable_and_never_zero(n, text):
    assert console.size(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.352, "0.35s"),
        (9.97, "10s"),
        (59.6, "1m00s"),
        (307, "5m07s"),
        (3599.7, "1h00m"),
        (11_100, "3h05m"),
        (86_399, "1d00h"),
        (187_200, "2d04h"),
        (math.inf, "unknown"),
    ],
)
def test_durations_carry_over_to_the_next_unit(seconds, text):
    assert console.duration(seconds) == text


def test_perplexity_beyond_a_float_is_inf_with_its_nll():
    assert console.perplexity(3.182) == "24.09 (3.182 nats)"
    assert console.perplexity(20.0) == "4.852e+08 (20 nats)"
    assert console.perplexity(800.0) == "inf (800 nats)"


def test_progress_line_has_step_metrics_rates_and_time_to_go():
    clock = Clock()
    meter = ThroughputMeter(flops_per_step=4e9, peak_flops=1e10, clock=clock)
    clock.now += 2
    meter.step(tokens=12_000, positions=16_000)
    line = progress_line(40, 100, {"loss": 3.14159, "lr": 0.001}, meter.read(), meter.elapsed)
    assert line == (
        "step 40/100  loss 3.142  lr 0.001  6.00k tokens/s  8.00k positions/s (25.0% padding)  "
        "2.00 GFLOP/s (20.0% of peak)  elapsed 2s  ETA 2m00s"
    )


def test_block_aligns_names_and_further_lines():
    text = console.block("run", {"devices": "8 cpu", "layout": "batch:rows\nvocab:cols"})
    assert text == "run\n  devices  8 cpu\n  layout   batch:rows\n           vocab:cols"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_stream_gets_plain_lines_and_no_control_characters():
    stream = io.StringIO()
    with ProgressDisplay(10, stream=stream) as display:
        display.advance(3, "loss 2.0")
        display.log("step 3/10  loss [2.0]")
    assert stream.getvalue() == "step 3/10  loss [2.0]\n"


def test_terminal_gets_a_bar_and_whole_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream, line = Terminal(), "step 3/10  loss [2.0]" + " x" * 100
    with ProgressDisplay(10, stream=stream) as display:
        display.advance(3)
        display.log(line)
    assert line in stream.getvalue() and "3/10" in stream.getvalue().replace(line, "")


def test_inactive_display_prints_nothing():
    stream = io.StringIO()
    with ProgressDisplay(10, stream=stream, active=False) as display:
        display.log("line")
    assert stream.getvalue() == ""
