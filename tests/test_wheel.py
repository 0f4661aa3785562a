"""The wheel carries the Gin files, and they are found without the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def test_gin_files_are_found_in_an_installed_wheel(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling, of the dev extra, builds the wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = "from mtf_experiments import config; print(*config.gin_folders())"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(installed / "mtf_experiments" / "gin"), done.stderr

    def shipped(folder):
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert shipped(installed / "mtf_experiments" / "gin") == shipped(REPOSITORY / "gin")
    assert shipped(REPOSITORY / "gin")
    paper = Path("mtf_experiments", "reporting", "paper.json")
    assert (installed / paper).read_bytes() == (REPOSITORY / paper).read_bytes()
