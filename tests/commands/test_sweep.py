"""The sweep command on three small members: it skips what is done, survives a failure, and goes on after being stopped."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from tests.commands import runs

SWEEP = """# Three small members, of which the last diverges.
Sweep.title = 'toy'
Sweep.base = ['tiny.gin']
Sweep.axes = {
    'rate': {'good': [], 'other': ["Constant.learning_rate=0.02"], 'bad': ["Constant.learning_rate=1e30"]},
}
"""


@pytest.fixture(scope="module")
def folder(here):
    (here / "toy.gin").write_text(SWEEP)
    return here


def sweep(folder, env, output, *flags):
    return runs.run("sweep", "--gin_file=toy.gin", f"--output={output}", *flags, cwd=folder, env=env)


def results(folder):
    """What a report is made of, without the times: evaluations of each member."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("*/eval/*.json"))}


def without_places(found):
    return {name: re.sub(rb'"checkpoint": "[^"]*"', b"", text) for name, text in found.items()}


@pytest.fixture(scope="module")
def whole(folder, env):
    return sweep(folder, env, "whole"), folder / "whole"


def test_one_that_fails_does_not_stop_the_others_and_is_told(whole):
    result, output = whole
    assert result.code == 1, result
    assert re.search(r"rate=good +done +8/8", result.out) and re.search(r"rate=other +done +8/8", result.out)
    assert "failed: rate=bad: error: step" in result.out and "Traceback" not in result.err
    assert "loss" in (output / "rate=bad" / "sweep.log").read_text()


def test_what_is_done_is_not_done_again(whole, folder, env):
    shutil.copytree(folder / "whole", folder / "again")
    before = results(folder / "again")
    result = sweep(folder, env, "again")
    assert "rate=good: done already" in result.out and "rate=bad: starts" in result.out
    assert results(folder / "again") == before


def test_stopped_anywhere_and_started_again_it_ends_the_same(whole, folder, env):
    with runs.start("sweep", "--gin_file=toy.gin", "--output=stopped", cwd=folder, env=env) as process:
        deadline = time.monotonic() + 120
        while not (folder / "stopped" / "rate=good" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143
    assert not (folder / "stopped" / "rate=other").exists()
    assert sweep(folder, env, "stopped", "--parallel=2").code == 1
    assert without_places(results(folder / "stopped")) == without_places(results(folder / "whole"))


def test_commands_are_printed_for_other_launchers(folder, env):
    result = sweep(folder, env, "nowhere", "--print", "--gin_param=d_ff=64")
    lines = result.out.strip().split("\n")
    assert result.code == 0 and len(lines) == 3 and not (folder / "nowhere").exists()
    assert all("--gin_param=d_ff=64" in line and "mtf_experiments.train" in line for line in lines)


def test_how_far_it_is_can_be_listed(whole, folder, env):
    result = sweep(folder, env, "whole", "--list")
    assert result.code == 0 and re.search(r"rate=good +done +8/8", result.out)


@pytest.mark.parametrize(
    ("flags", "words"),
    {
        ("--gin_param=d_f=64",): ["member rate=good of toy.gin", "d_f", "d_ff"],
        ("--gin_param=Sweep.titel='x'",): ["titel", "title"],
        ("--gin_file=tiny.gin",): ["never read"],
        ("--print", "--list"): ["--print and --list"],
        ("--gin_param=Sweep.leave_out=['rate=best']",): ["rate=best", "rate=good"],
    }.items(),
)
def test_mistakes_are_told_before_anything_runs(flags, words, folder, env):
    result = sweep(folder, env, "refused", *flags)
    assert result.code == 2 and all(word in result.err for word in words), result
    assert not (folder / "refused").exists()


@pytest.fixture
def printed(tmp_path):
    """Lines as `sweep --print` writes them, that leave a file each."""
    (tmp_path / "members.txt").write_text("echo 'a b' > first && echo done\ntouch second && false\ntouch third\n")
    return tmp_path


def script(name, *arguments, cwd, **env):
    path = runs.REPOSITORY / "scripts" / name
    argv = ["sh", path, *arguments]
    done = subprocess.run(argv, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_task_of_a_slurm_array_runs_its_member(printed):
    code, out, _ = script("sweep_slurm.sh", "members.txt", cwd=printed, SLURM_ARRAY_TASK_ID="1")
    assert code == 0 and out.endswith("done\n") and (printed / "first").read_text() == "a b\n"
    assert not (printed / "second").exists()
    assert script("sweep_slurm.sh", "members.txt", cwd=printed, SLURM_ARRAY_TASK_ID="2")[0] == 1
    code, _, err = script("sweep_slurm.sh", "members.txt", cwd=printed, SLURM_ARRAY_TASK_ID="9")
    assert code == 2 and "has no line 9" in err


def test_a_cloud_tpu_runs_all_members_whatever_fails(printed):
    (printed / "gcloud").write_text(
        '#!/bin/sh\nfor a; do case "$a" in --command=*) sh -c "${a#--command=}";; esac; done\n'
    )
    (printed / "gcloud").chmod(0o755)
    code, _, err = script("sweep_cloud_tpu.sh", "members.txt", "v4", "us", cwd=printed, GCLOUD=str(printed / "gcloud"))
    assert code == 1 and err.strip() == "failed: touch second && false"
    assert all((printed / name).exists() for name in ("first", "second", "third"))
