# Every target sets itself up: a virtual environment in .venv with the exact versions of constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# PIP_CONSTRAINT reaches the isolated build environment too, so the build backend is pinned as well.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet
# An environment of its own for the lowest version of transformers that pyproject.toml allows.
FLOOR := .venv-floor
LOWEST := $(shell sed -nE 's/^hf = .*"transformers>=([0-9.]+)".*/\1/p' pyproject.toml)

.PHONY: help demo test lint slow floor fuzz bench peers graph docs format clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/.demo  ## train a small model and its transformer, compare them, draw, sample
	$(BIN)/crt demo

test: $(VENV)/.dev  ## fast tests
	$(BIN)/pytest -n 2

slow: $(VENV)/.dev floor  ## tests that take minutes, and make floor
	$(BIN)/pytest -m slow

floor: $(FLOOR)/.hf  ## all Hugging Face tests with the lowest supported transformers
	$(FLOOR)/bin/pytest -m '' tests/hf

CASES ?= 20000
fuzz: $(VENV)/.dev  ## open mutated files and run odd commands, CASES of them (20000)
	PYTHONPATH=tests $(BIN)/python -m fuzz --cases $(CASES)

lint: $(VENV)/.dev  ## ruff (lint and format), mypy, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

graph: $(VENV)/.dev  ## draw the packages and list their files in docs/architecture.md
	$(BIN)/python tools/architecture.py

docs: $(VENV)/.docs  ## build the documentation site in site/; broken links and anchors fail
	$(BIN)/mkdocs build --strict

format: $(VENV)/.dev  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.core  ## benchmarks; each ends with one JSON line
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/gradients.py

peers: $(VENV)/.bench  ## decoding beside Hugging Face and llama.cpp (builds llama.cpp: needs a C++ compiler)
	$(BIN)/crt bench --peers --engines eager,compiled,ggml --plot bench.png

clean:  ## remove the environments and every cache
	rm -rf $(VENV) $(FLOOR) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.core: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; set PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(INSTALL) --editable '.[dev]'
	@if command -v c++ >/dev/null; then $(INSTALL) --editable '.[ggml]'; \
	else echo "There is no C++ compiler, so the engine ggml is not built and its tests are skipped."; fi
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(INSTALL) --editable '.[docs]'
	@touch $@

# The same versions, except that of transformers.
$(FLOOR)/.hf: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; set PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(FLOOR)/bin/pip || $(PYTHON) -m venv $(FLOOR)
	sed 's/^transformers==.*/transformers==$(LOWEST)/' constraints.txt > $(FLOOR)/constraints.txt
	PIP_CONSTRAINT=$(FLOOR)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(FLOOR)/bin/pip install --quiet --editable '.[hf,data]' pytest
	@touch $@

$(VENV)/.bench: $(VENV)/.core
	$(INSTALL) --editable '.[bench]'
	@touch $@
