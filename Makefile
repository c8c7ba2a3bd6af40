# `make help` lists what there is. Every target sets up .venv on first use and again when the pins change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := hgraph passes strategies runtime
CODE := $(PACKAGES) $(wildcard tests examples benchmarks conftest.py)

ARGS ?=
TESTS ?= tests
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

# Many processes import the same files: they are compiled to bytecode once, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install train test test-all lint format clean

help: ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "PYTHON=python3.12 chooses the interpreter of a new .venv; ARGS='...' is passed on to what a target runs"

install: $(STAMP) ## create .venv with the pinned versions and this package in editable form

# torch comes first and alone: with its pin in force, no other requirement can pull in a second, larger build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "hydraulis needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another interpreter: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "setting up $(VENV) with the versions of constraints.txt; this takes a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: $(STAMP) ## train the example model on four processes (ARGS='steps=80 seed=1' overrides settings)
	$(BIN)/hgraph train examples/first_light/config.yaml $(ARGS)

test: $(STAMP) ## run the tests, long sweeps left out (TESTS=tests/test_x.py for one file)
	$(PYTEST) -m "not long" $(ARGS) $(TESTS)

test-all: $(STAMP) ## run every test, long seeded sweeps included
	$(PYTEST) $(ARGS) $(TESTS)

lint: $(STAMP) ## check style, format, types and the layers between the packages
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the code in the common format and order of imports
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean: ## remove .venv, caches and build products; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
