# `make demo` and `make test` do all their set-up, and are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tiny models: more threads only wait for one another.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

STAMP := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

.PHONY: setup demo test test-all lint format ci clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, $(PYTHON) is %d.%d: make PYTHON=..." % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@

demo: setup
	$(BIN)/hf-sparsekv demo

test: setup
	$(BIN)/hf-sparsekv fetch --quiet
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m "not slow"

test-all: setup
	$(BIN)/hf-sparsekv fetch --quiet
	$(TEST_ENV) $(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_limits.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

ci: lint test

clean:
	rm -rf $(VENV) kernels/build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
