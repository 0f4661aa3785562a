# `make run` trains the small language model; `make test` checks everything.  Both work in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test clean

run: .venv/run.stamp
	$(BIN)/python -m mtf_experiments.train --gin_file=lm_tiny.gin --model_dir=runs/lm_tiny

test: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/python -m pytest -n 2 --dist loadfile -q

.venv/bin/python:
	$(PYTHON) -m venv .venv

# A stamp is written only after a whole install, so that an interrupted one is repeated.
.venv/run.stamp: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q -e .
	touch $@

.venv/dev.stamp: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@ .venv/run.stamp

clean:
	rm -rf .venv runs
