"""Folders that the tests of commands share."""

import os
from pathlib import Path

import pytest

from tests.commands import runs


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of commands; all of them share compiled programs, also those of other test processes."""
    base = tmp_path_factory.getbasetemp()
    compiled = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    compiled.mkdir(exist_ok=True)
    return runs.environment(compiled)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the small experiment as tiny.gin."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "tiny.gin").write_text(runs.TINY, encoding="utf-8")
    return folder
