# `make help` lists what there is. Every target sets itself up on a fresh machine and is quick the second time.
SHELL := /bin/bash
PYTHON ?= python3
SEED ?= 0
DIR ?= quickstart-run
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-fast test-full lint bench images chart clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(READY) ## virtual environment with everything pinned (about two minutes, once)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	@echo "setting up $(VENV) with pinned packages: about two minutes, this once" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --no-deps -r requirements.lock setuptools==80.9.0
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch' || { echo "torch does not load: pip chose a CUDA build; remove $(VENV) and give pip the CPU index of PyTorch: PIP_EXTRA_INDEX_URL=... make setup" >&2; exit 1; }
	@touch $@

quickstart: $(READY) ## the whole loop on this machine: a policy learns to sort while a quarter of its samples is lost
	$(BIN)/muster quickstart --dir $(DIR) --seed $(SEED)

test: $(READY) ## the test suite
	$(BIN)/python -m pytest -m "not full"

test-fast: $(READY) ## the inner loop, under three minutes
	$(BIN)/python -m pytest -m "not slow and not full"

test-full: $(READY) ## everything, with the long property, kill and soak runs
	$(BIN)/python -m pytest

lint: $(READY) ## ruff, mypy --strict, import time
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy does not know setuptools' package-dir: show it the tree as it is installed
	@rm -rf $(VENV)/tree && mkdir -p $(VENV)/tree && cp -rs $(CURDIR)/components $(VENV)/tree/muster && cp -rs $(CURDIR)/pipelines $(VENV)/tree/muster/pipelines
	MYPYPATH=$(VENV)/tree $(BIN)/mypy -p muster
	$(BIN)/python tests/import_time.py

chart: $(READY) ## put the compiled pipeline into the chart, check it, pack it into dist/
	env -u MUSTER_BASE_IMAGE $(BIN)/muster compile grpo --out charts/muster/files/grpo.yaml
	helm=$$($(BIN)/python -m tests.cluster.tools helm) && "$$helm" lint --strict charts/muster && "$$helm" package -d dist charts/muster

images: ## build the images (BASE, REGISTRY, TAG, IMAGES, ENGINE: see images/build.sh)
	images/build.sh

bench: $(READY) ## all benchmarks, as JSON on stdout
	@$(BIN)/python -m tests.benchmarks

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
