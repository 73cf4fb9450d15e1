# `make demo` and `make test` do all their set-up, and are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tiny models: more threads only wait for one another.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

STAMP := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

.PHONY: setup demo test test-all notebooks docs lint format ci eval eval-long eval-smoke clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, $(PYTHON) is %d.%d: make PYTHON=..." % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,notebooks]'
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

# Each is run and written as a page to look at; those in notebooks/ stay without outputs. In two steps, since cells whose
# progress bars nobody wants to read are found before a run, not after it.
NOTEBOOKS_OUT ?= build/notebooks
notebooks: setup
	$(BIN)/hf-sparsekv fetch --quiet
	TOKENIZERS_PARALLELISM=false $(BIN)/python -m nbconvert --to notebook --execute --output-dir $(NOTEBOOKS_OUT) \
	  --ExecutePreprocessor.timeout=600 notebooks/*.ipynb
	$(BIN)/python -m nbconvert --to html --TagRemovePreprocessor.enabled=True \
	  --TagRemovePreprocessor.remove_all_outputs_tags=quiet $(NOTEBOOKS_OUT)/*.ipynb
	@sed -i.links 's/href="\([0-9a-z_]*\)\.ipynb"/href="\1.html"/g' $(NOTEBOOKS_OUT)/*.html && rm $(NOTEBOOKS_OUT)/*.links

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_limits.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Every method at every ratio, and the published layers and budgets; interrupted, the same command goes on. The seeds are
# of the half that options are not tuned on, and of a range that no option was chosen with.
EVAL_DIR ?= evals/results
EVAL_ARGS ?=
odd = $(shell seq -s, $(1) 2 $(2))
compare = $(BIN)/hf-sparsekv eval --method all --compression 2,4,10 --dtype bfloat16 $(EVAL_ARGS) \
  --out $(EVAL_DIR)/comparison_$(1).jsonl --json $(EVAL_DIR)/comparison_$(1).json
eval: setup
	$(BIN)/hf-sparsekv fetch --quiet
	$(call compare,retrieval) --tasks needle,multi_key,key_value --lengths 1024 --seeds $(call odd,2001,2015)
	$(call compare,words) --tasks document_qa,cloze --lengths 512 --seeds $(call odd,2001,2047)
	$(call compare,perplexity) --tasks perplexity --lengths 2048 --seeds $(call odd,2001,2031)
	$(call compare,long_answers) --tasks needle_long,copy --lengths 1024 --seeds $(call odd,2001,2011)
	$(call compare,mmlu) --tasks mmlu --suite offline --lengths 1024 --seeds $(call odd,2001,2007)
	$(call compare,needle_2k) --tasks needle --lengths 2048 --seeds $(call odd,2001,2007)
	$(call compare,documents_2k) --tasks document_qa --lengths 2048 --seeds $(call odd,2001,2009)
	$(BIN)/hf-sparsekv eval --method published-layers --tasks needle,perplexity --lengths 2048 --seeds $(call odd,2001,2005) \
	  --dtype bfloat16 $(EVAL_ARGS) --out $(EVAL_DIR)/published_layers.jsonl --json $(EVAL_DIR)/published_layers.json
	$(BIN)/python -m evals.tables

# Longer documents, for a GPU.
eval-long: setup
	$(BIN)/hf-sparsekv fetch --quiet
	$(call compare,needle_4k) --tasks needle --lengths 4096 --seeds $(call odd,2001,2011)
	$(call compare,multi_key_4k) --tasks multi_key --lengths 4096 --seeds 2001,2003
	$(call compare,documents_4k) --tasks document_qa --lengths 4096 --seeds $(call odd,2001,2009)
	$(call compare,perplexity_4k) --tasks perplexity --lengths 4096 --seeds $(call odd,2001,2007)
	$(call compare,needle_8k) --tasks needle --lengths 8192 --seeds $(call odd,2001,2005)
	$(call compare,documents_8k) --tasks document_qa --lengths 8192 --seeds $(call odd,2001,2005)
	$(call compare,perplexity_8k) --tasks perplexity --lengths 7936 --seeds $(call odd,2001,2007)
	$(BIN)/python -m evals.tables

# The same path in miniature: no figure of it says anything.
eval-smoke: setup
	$(BIN)/hf-sparsekv fetch --quiet
	@mkdir -p .cache && rm -f .cache/eval_smoke.jsonl
	$(BIN)/hf-sparsekv eval --tasks needle,document_qa,perplexity --lengths 512 --limit 2 --essay pydoc \
	  --method random,snapkv,balanced --compression 4 --out .cache/eval_smoke.jsonl --json .cache/eval_smoke.json
	@$(BIN)/python -c 'import json; rows = json.load(open(".cache/eval_smoke.json"))["rows"]; \
	  evicting = {row["task"] for row in rows if row["config"] != "dense" and row.get("num_evicting")}; \
	  assert evicting == {"needle", "document_qa", "perplexity"}, evicting'
	$(BIN)/python -m evals.tables --check

# The site, in .cache/site; a broken link or reference fails. Nothing is loaded from elsewhere.
docs: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# All that has to pass before a change lands; `make lint test` is its first part.
ci:
	.ci/run

clean:
	rm -rf $(VENV) build dist kernels/build .cache/site .cache/eval_smoke.json* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
