# Every target sets up .venv when it is missing and again when pyproject.toml has changed.

# The first of these that runs and is new enough (a version manager's shim may exist and not run).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test test-all check format bench clean

demo: .venv/installed
	$(BIN)/python examples/demo.py

test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS)

test-all: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) -m ""

check: .venv/installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: .venv/installed
	$(BIN)/python benchmarks/search.py

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@
