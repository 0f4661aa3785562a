"""What a run shows while it goes: the start-up block, progress lines, throughput; numbers with readable units."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def count(n: float) -> str:
    """A number in three digits with the suffix of its thousands: 950, 12.3k, 4.9B."""
    return _scaled(n, 1000, ("", "k", "M", "B", "T", "P", "E"), "")


def rate(n: float, unit: str) -> str:
    """A rate with an SI prefix: 2.00 GFLOP/s."""
    return _scaled(n, 1000, ("", "k", "M", "G", "T", "P", "E"), " ") + unit


def size(n: float | None) -> str:
    """Bytes: 1.9 GiB; "unknown" where there is no number, which back-ends report as 0 or None."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), " ") if n else "unknown"


def duration(seconds: float) -> str:
    """A time: 0.35s, 42s, 5m07s, 3h05m, 2d04h; "unknown" if it is not finite."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.2g}s"
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02}s"
    m = round(seconds / 60)
    if m < 24 * 60:
        return f"{m // 60}h{m % 60:02}m"
    h = round(seconds / 3600)
    return f"{h // 24}d{h % 24:02}h"


def duration_of(seconds: float) -> str:
    """A time of any size: 12 µs, 3.4 ms, 2.1 s, then as `duration`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def perplexity(nll: float) -> str:
    """exp(nll) with its NLL beside it, "inf" where it is beyond a float: `24.1 (3.182 nats)`."""
    value = math.exp(nll) if nll < 709 else math.inf
    return f"{value:.4g} ({nll:.4g} nats)"


def _scaled(n: float, base: int, units: tuple[str, ...], space: str) -> str:
    if not math.isfinite(n):
        return str(n)
    rank = 0
    # 999.6 would round to 1000 of its unit: that is 1 of the next.
    while abs(n) >= base - 0.5 and rank + 1 < len(units):
        n, rank = n / base, rank + 1
    digits = 0 if rank == 0 and n == int(n) else 2 if abs(n) < 9.995 else 1 if abs(n) < 99.95 else 0
    return f"{n:.{digits}f}{space}{units[rank]}"


@dataclass(frozen=True)
class Throughput:
    """Rates of the steps since the meter was last read; pauses are not in `seconds`.

    Tokens are real targets (not padding), positions all places of the batches. `flops_per_second` is of all devices
    together, `peak_share` its share of their peak; None where it is not known.
    """

    steps: int
    seconds: float
    tokens: int
    positions: int
    devices: int
    flops_per_second: float | None
    peak_share: float | None

    @property
    def steps_per_second(self) -> float:
        """Steps / s."""
        return self._rate(self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Real targets / s, all devices together."""
        return self._rate(self.tokens)

    @property
    def positions_per_second(self) -> float:
        """Places of the batches, padding included, / s, all devices together."""
        return self._rate(self.positions)

    @property
    def padding(self) -> float:
        """The share of positions that are padding."""
        return 1 - self.tokens / self.positions if self.positions else math.nan

    def scalars(self) -> dict[str, float]:
        """The rates under the names that they are logged by."""
        values = {
            "steps/s": self.steps_per_second,
            "tokens/s": self.tokens_per_second,
            "tokens/s/device": self.tokens_per_second / self.devices,
            "positions/s": self.positions_per_second,
            "positions/s/device": self.positions_per_second / self.devices,
            "padding": self.padding,
        }
        if self.flops_per_second is not None:
            values["FLOP/s"] = self.flops_per_second
        if self.peak_share is not None:
            values["peak_share"] = self.peak_share
        return values

    def _rate(self, amount: float) -> float:
        return amount / self.seconds if self.steps and self.seconds > 0 else math.nan


class ThroughputMeter:
    """Counts steps and tokens over time; compiling, evaluating and saving go to accounts of their own.

    Steps are dispatched ahead of the device: block on a step's results before `read`, or the times mean nothing.
    `flops_per_step` are the model's for one step over all devices, `peak_flops` one device's peak FLOP/s.
    """

    def __init__(
        self,
        devices: int = 1,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._devices, self._flops, self._peak, self._clock = devices, flops_per_step, peak_flops, clock
        self.pauses: dict[str, float] = {}
        self._started = clock()
        self._restart()

    def step(self, tokens: int, positions: int) -> None:
        """Counts one step with that many real targets and positions in its batch."""
        self._steps += 1
        self._tokens += tokens
        self._positions += positions

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """The time of the body counts as `pauses[name]` (seconds) and not as training. Pauses do not nest."""
        start = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - start
            self.pauses[name] = self.pauses.get(name, 0.0) + spent
            self._paused += spent

    def read(self) -> Throughput:
        """The rates since the last `read` (or the start); begins a new window."""
        seconds = self._clock() - self._window - self._paused
        flops = self._flops * self._steps / seconds if self._flops and self._steps and seconds > 0 else None
        share = flops / (self._peak * self._devices) if flops and self._peak else None
        result = Throughput(self._steps, seconds, self._tokens, self._positions, self._devices, flops, share)
        self._restart()
        return result

    @property
    def elapsed(self) -> float:
        """Seconds since the start, pauses included."""
        return self._clock() - self._started

    def _restart(self) -> None:
        self._window, self._paused = self._clock(), 0.0
        self._steps = self._tokens = self._positions = 0


def progress_line(step: int, total: int, metrics: Mapping[str, float], throughput: Throughput, elapsed: float) -> str:
    """One line of training: step/total, `metrics` in their order, rates, share of the peak, time so far, time to go.

    The time to go is the remaining steps at the present rate; pauses to come are not in it.
    """
    parts = [f"step {step}/{total}", *(f"{key} {value:.4g}" for key, value in metrics.items())]
    if math.isfinite(throughput.tokens_per_second):
        parts += [f"{count(throughput.tokens_per_second)} tokens/s"]
    if throughput.padding >= 0.0005:
        parts += [f"{count(throughput.positions_per_second)} positions/s ({throughput.padding:.1%} padding)"]
    if throughput.flops_per_second is not None:
        share = "" if throughput.peak_share is None else f" ({throughput.peak_share:.1%} of peak)"
        parts += [f"{rate(throughput.flops_per_second, 'FLOP/s')}{share}"]
    speed = throughput.steps_per_second
    left = 0.0 if step >= total else (total - step) / speed if speed > 0 else math.inf
    return "  ".join([*parts, f"elapsed {duration(elapsed)}", f"ETA {duration(left)}"])


def block(title: str, rows: Mapping[str, str]) -> str:
    """A title and aligned `name  value` rows; further lines of a value are indented to its column."""
    width = max(map(len, rows), default=0)
    lines = [title]
    for name, value in rows.items():
        first, *rest = value.split("\n")
        lines += [f"  {name:<{width}}  {first}", *(" " * (width + 4) + line for line in rest)]
    return "\n".join(line.rstrip() for line in lines)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns, the first row being the heading; those numbered in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


class ProgressDisplay:
    """A live bar on a terminal, plain lines everywhere else. `active` is false in processes that show nothing.

    `log` prints above the bar, one whole line a call, flushed.
    """

    def __init__(self, total: int, step: int = 0, stream: TextIO | None = None, active: bool = True) -> None:
        self._active = active
        self._stream = stream or sys.stdout
        self._bar = None
        if active and self._stream.isatty():
            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, completed=step)

    def __enter__(self) -> ProgressDisplay:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, step: int, note: str = "") -> None:
        """Moves the bar to `step`, with a short note beside it."""
        if self._bar:
            self._bar.update(self._task, completed=step, description=note)

    def log(self, line: str) -> None:
        """Prints a line that stays."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._active:
            print(line, file=self._stream, flush=True)
