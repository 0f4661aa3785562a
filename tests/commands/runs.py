"""Runs commands of the project as their own processes, as a user does, on a small experiment."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]

TINY = """# One small layer on a few sentences of the made-up grammar.
include 'lm_tiny.gin'
row_length = 16
batch_size = 8
train_steps = 8
d_model = 16
d_ff = 32
num_heads = 8
d_kv = 4
num_layers = 1
# A rate that does not depend on the number of steps: runs of other lengths have the same beginning (and program).
Experiment.schedule = @Constant()
Constant.learning_rate = 0.01
LanguageModelConfig.relu_dropout = 0.1
SyntheticSource.train_lines = 300
SyntheticSource.validation_lines = 20
LanguageModelTask.cache_dir = 'cache'
Evaluation.logit_scales = (1.0,)
Training.log_every = 1
Training.eval_every = 4
Training.checkpoint_every = 4
"""


class Result(NamedTuple):
    """How a command ended. `seconds` is wall time."""

    code: int
    out: str
    err: str
    seconds: float


def environment(compiled: Path | None = None) -> dict[str, str]:
    """One CPU device, the C locale; with `compiled` the processes share what they compile in that folder."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
    kept = {"PATH", "HOME", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
    env = {name: value for name, value in os.environ.items() if name in kept}
    env |= {"PYTHONPATH": str(REPOSITORY), "LC_ALL": "C", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": "64"}
    if compiled:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
    return env


def start(command: str, *arguments: str, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """A running command whose output can be read line by line."""
    argv = [sys.executable, "-u", "-m", f"mtf_experiments.{command}", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=cwd, env=dict(env), stdout=pipe, stderr=pipe, text=True, encoding="utf-8")


def run(command: str, *arguments: str, cwd: Path, env: Mapping[str, str], limit: float = 180) -> Result:
    """Runs a command to its end; it is killed after `limit` seconds, which fails the test."""
    began = time.monotonic()
    with start(command, *arguments, cwd=cwd, env=env) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Result(process.returncode, out, err, time.monotonic() - began)


def stop_at(
    line: str,
    command: str,
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str],
    signals: Sequence[int] = (signal.SIGTERM,),
) -> Result:
    """Runs a command until it prints a line that begins with `line`, and sends it `signals`."""
    began = time.monotonic()
    with start(command, *arguments, cwd=cwd, env=env) as process:
        assert process.stdout is not None
        try:
            seen = []
            for text in process.stdout:
                seen.append(text)
                if text.startswith(line):
                    break
            else:
                raise AssertionError(f"no line {line!r} in:\n{''.join(seen)}")
            for number in signals:
                process.send_signal(number)
                time.sleep(0.05)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    return Result(process.returncode, "".join(seen) + out, err, time.monotonic() - began)


def files_below(folder: Path) -> set[str]:
    """Names of all files (not folders) below `folder`, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
