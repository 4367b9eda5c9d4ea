# Every target sets up the virtual environment when it is missing, and again when pyproject.toml or the Python has changed.

# The newest Python that runs; for another one, make PYTHON=/path/to/python3.
ifndef PYTHON
PYTHON := $(shell .ci/python 3.13 3.12 3.11)
endif
# With JAX=0.11.2, that release is installed in place of the newest, in an environment of its own.
JAX ?=
VENV ?= .venv$(JAX:%=-jax-%)
BIN := $(VENV)/bin
EXTRAS ?= dev
WORKERS ?= 2

.PHONY: wheel attention docs build-docs docs-tables print-docs-tables demo test test-all quick check format bench clean which test-attention test-matrix quick-oldest

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS)

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) -m ""

# What the gate also runs on the oldest release of JAX.
quick: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) -m quick

# tokamax's kernels, in an environment of their own: they bring a gigabyte of packages.
test-attention:
	$(MAKE) attention VENV=.venv-attention EXTRAS=dev,attention

attention: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) -m "" -k "tokamax or flash" tests/tdl/test_attention.py tests/emit/test_attention.py

check: $(VENV)/installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/installed
	$(BIN)/python benchmarks/search.py

# The wheel as users get it: in a fresh environment, with what it depends on and nothing of this checkout on the path.
# It runs the project in examples/ and the snippets of README.md.
WHEEL_VENV := .venv-wheel
wheel: $(VENV)/installed
	rm -rf dist $(WHEEL_VENV)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check dist/shardplan-*.whl optax pytest
	$(WHEEL_VENV)/bin/shardplan doctor
	cd examples/project && ../../$(WHEEL_VENV)/bin/shardplan plan train.py:train_step --cluster 2x4 --html ../../dist/report.html
	rm -rf dist/project && cp -r examples/project dist/project
	cd dist/project && ../../$(WHEEL_VENV)/bin/python -m pytest
	.ci/readme $(CURDIR)/$(WHEEL_VENV)/bin/python

# The figures in docs/, each printed anew by the command in its marker: all of them, or those that contain a word of ONLY.
# XLA's compiler for GPUs brings a gigabyte of packages, so this has an environment of its own.
docs-tables:
	$(MAKE) print-docs-tables VENV=.venv-gpu-aot EXTRAS=dev,gpu-aot ONLY="$(ONLY)"

print-docs-tables: $(VENV)/installed
	$(BIN)/python benchmarks/docs_tables.py $(ONLY)

# The site, in build/docs/index.html. Warnings are errors. Sphinx needs Python 3.13, so this has an environment of its own.
docs:
	$(MAKE) build-docs VENV=.venv-docs EXTRAS=docs

build-docs: $(VENV)/installed
	@test -x $(BIN)/sphinx-build || { echo "the site needs Python 3.13: make PYTHON=/path/to/python3.13 docs" >&2; exit 1; }
	$(BIN)/sphinx-build -W --keep-going -b html docs build/docs

# The Python and the packages that decide what the tests mean.
which: $(VENV)/installed
	@$(BIN)/python -VV
	@$(BIN)/python -m pip list --disable-pip-version-check 2>/dev/null | grep -E '^(jax|jaxlib|flax|optax|numpy|scipy) '

# The suite on each tested release of JAX (shardplan/versions.py), each on its own Python in an environment of its own:
# `make -k test-matrix`, or one of them with `make test-jax-0.11.2`.
TESTED := $(PYTHON) -c 'import sys; from shardplan.versions import TESTED; print(TESTED.get(sys.argv[1], "") if sys.argv[1:] else " ".join(TESTED))'
test-matrix: $(addprefix test-jax-,$(shell $(TESTED)))

test-jax-%:
	$(MAKE) which test JAX=$* PYTHON="$$(.ci/python $$($(TESTED) $*))"

quick-oldest:
	oldest=$$($(TESTED) | cut -d' ' -f1) && $(MAKE) which quick JAX=$$oldest PYTHON="$$(.ci/python $$($(TESTED) $$oldest))"

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis

# An environment of another Python is made anew.
VERSION := -c 'import sys; print(sys.version)'
ifneq ($(shell $(BIN)/python $(VERSION) 2>/dev/null),$(shell $(PYTHON) $(VERSION)))
.PHONY: $(VENV)/installed
endif

$(VENV)/installed: pyproject.toml
	@test -n "$(PYTHON)" || exit 1
	test "$$($(BIN)/python $(VERSION) 2>/dev/null)" = "$$($(PYTHON) $(VERSION))" || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]" $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
	@touch $@
