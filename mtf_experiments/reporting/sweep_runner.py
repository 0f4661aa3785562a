"""Runs the members of a sweep as processes: those that are done are skipped, one that fails does not stop the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from mtf_experiments.reporting.console import duration, table
from mtf_experiments.reporting.sweeps import Member, Progress, progress

_POLL_SECONDS = 1.0
_LOG = "sweep.log"


@dataclass
class _Running:
    member: Member
    commands: list[list[str]]
    log: TextIO
    process: subprocess.Popen[bytes]


@dataclass
class SweepRunner:
    """Runs members, `parallel` at a time. `totals` has the steps that each is to train.

    What a member prints goes to `sweep.log` in its run directory.
    """

    members: Sequence[Member]
    totals: Mapping[str, int]
    output: Path
    parallel: int = 1
    more: Sequence[str] = ()
    show: Callable[[str], None] = print
    failed: dict[str, str] = field(default_factory=dict)
    """The last line that a failed member printed, by its name."""

    def __post_init__(self) -> None:
        self._running: list[_Running] = []
        self._stopped = 0

    def run(self) -> bool:
        """Runs all that is not done. Returns whether all is done now.

        SIGTERM and SIGINT are passed on to the members, which save and end; then raises SystemExit(143 or 130).
        """
        waiting = [m for m in self.members if not self.progress(m).done]
        for m in self.members:
            if m not in waiting:
                self.show(f"{m.name}: done already")
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.parallel and not self._stopped:
                    self._start(waiting.pop(0))
                time.sleep(_POLL_SECONDS if self._running else 0)
                for running in [r for r in self._running if r.process.poll() is not None]:
                    self._ended(running)
                if self._stopped and not self._running:
                    raise SystemExit(128 + self._stopped)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return not self.failed

    def progress(self, member: Member) -> Progress:
        """How far a member is."""
        return progress(member, self.output, self.totals[member.name])

    def overview(self) -> str:
        """A table of all members: state, step, loss, and the time that training still takes."""
        running = {r.member.name for r in self._running}
        rows = [("member", "state", "step", "loss", "left")]
        for m in self.members:
            p = self.progress(m)
            state = (
                "done" if p.done else "failed" if m.name in self.failed else "runs" if m.name in running else "waits"
            )
            left = duration((p.total - p.step) / p.rate) if state == "runs" and p.rate else ""
            rows.append((m.name, state, f"{p.step:,}/{p.total:,}", f"{p.loss:.4g}" if p.loss is not None else "", left))
        return table(rows, right=(2, 3, 4))

    def _start(self, member: Member) -> None:
        commands = member.commands(self.output, self.more)
        if self.progress(member).trained:
            commands = commands[1:]
        folder = self.output / member.name
        folder.mkdir(parents=True, exist_ok=True)
        log = open(folder / _LOG, "a", encoding="utf-8")
        self.show(f"{member.name}: starts ({folder / _LOG})")
        self._running.append(_Running(member, commands[1:], log, _process(commands[0], log)))

    def _ended(self, running: _Running) -> None:
        code = running.process.returncode
        if code == 0 and running.commands and not self._stopped:
            running.process = _process(running.commands.pop(0), running.log)
            return
        self._running.remove(running)
        running.log.close()
        name = running.member.name
        if code == 0:
            self.show(f"{name}: done")
        elif not self._stopped:
            last = _last_line(self.output / name / _LOG)
            self.failed[name] = last
            self.show(f"{name}: failed with exit code {code}: {last}")

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = number
        for running in self._running:
            running.process.send_signal(signal.SIGTERM)


def _process(command: Sequence[str], log: TextIO) -> subprocess.Popen[bytes]:
    # In a session of its own: a Ctrl-C on the terminal reaches the sweep alone, which passes on what it means.
    return subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ
    )


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]


def live(runner: SweepRunner, stream: TextIO = sys.stdout) -> Callable[[], bool]:
    """`runner.run` under a table that is kept up to date, where the stream is a terminal; else as it is."""
    if not stream.isatty():
        return runner.run

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def run() -> bool:
        console = Console(file=stream)
        with Live(get_renderable=lambda: Text(runner.overview()), console=console, refresh_per_second=0.5):
            runner.show = console.print
            return runner.run()

    return run
