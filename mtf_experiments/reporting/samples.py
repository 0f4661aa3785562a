"""What runs make of one text: continuations or translations, side by side (paper, Appendix C)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from mtf_experiments.errors import UserError
from mtf_experiments.reporting.runs import Run


def samples(runs: Sequence[Run], prompt: str) -> dict[str, str]:
    """What each finished run makes of `prompt`, by name: its `decode` command's line, with the settings of the run.

    Raises UserError if the command fails.
    """
    made = {}
    for run in runs:
        if not run.finished:
            continue
        command = [sys.executable, "-m", "mtf_experiments.decode", f"--model_dir={run.path}", f"--prompt={prompt}"]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
        if done.returncode != 0:
            last = (done.stderr.strip().split("\n") or [""])[-1]
            raise UserError(f"no sample of {run.name}: {last.removeprefix('error: ')}")
        made[run.name] = done.stdout.strip()
    return made
