PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin

.PHONY: help setup demo test slow check format docs clean

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):.*##  */\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: .venv/.installed  ## make .venv with everything in it, at the versions of constraints.txt

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0 -e '.[dev]'
	touch $@

demo: setup  ## tune a small model and look at the result
	$(BIN)/python examples/demo.py

test: setup  ## the tests, and the examples in docstrings, docs and README
	$(BIN)/pytest -n auto

slow: setup  ## the tests, slow ones too
	$(BIN)/pytest -n auto --slow

check: setup  ## all that must pass before a commit: format, lint, types, tests, docs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest -n auto
	$(MAKE) docs

format: setup  ## format the code, and mend what the linter can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: setup  ## build the documentation into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -E -q docs docs/_build/html

clean:  ## remove caches and built files; .venv stays
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +
