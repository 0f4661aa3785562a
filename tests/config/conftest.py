"""No configuration outlives a test; files are written where the test runs."""

import pytest

from mtf_experiments import config


@pytest.fixture(autouse=True)
def clean():
    config.clear()
    yield
    config.clear()


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return write_file
