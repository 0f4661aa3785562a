"""Where the real text for tests lies: the folder named by MTF_TEST_DATA, or `shared/data` beside the repository."""

import os
from pathlib import Path

import pytest


def real_text(name: str) -> Path:
    """The folder or file `name` of the real text; the test is skipped if it is not there."""
    root = os.environ.get("MTF_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(root) / name
    if not path.exists():
        pytest.skip(f"real text not present ({name}); set MTF_TEST_DATA to the folder that holds it")
    return path
