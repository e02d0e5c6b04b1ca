# Two commands are enough: `make train` and `make test`. Everything is installed into $(VENV).

PYTHON ?= python3
VENV ?= .venv
RECIPE ?= license_plate
TEST_WORKERS ?= 2
BIN := $(VENV)/bin
TORCH := torch==2.13.0
SETTINGS := pyproject.toml constraints.txt setup.py
# Found by its path and not by a hook, the package is also found by a script that lies beside a clone of the same name.
EDITABLE := --config-settings editable_mode=compat
# Small networks gain nothing from threads, lose much to them on a busy machine, and the number of threads is part of
# what "bit by bit" depends on. For a large recipe: make train OMP_NUM_THREADS=8
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-all lint docs pace hooks evaluation processes hub kill clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# One pip command with torch in it: pip then chooses one torch for all, and the constraints hold for every package.
# A stamp is as old as the last installation, so that nothing is installed again until the settings change.
$(VENV)/.installed-recipes: $(SETTINGS) | $(BIN)/python
	$(BIN)/python -m pip install $(EDITABLE) -c constraints.txt -e ".[recipes]" $(TORCH)
	@touch $@

$(VENV)/.installed-test: $(SETTINGS) | $(BIN)/python
	$(BIN)/python -m pip install $(EDITABLE) -c constraints.txt -e ".[recipes,test]" $(TORCH)
	@touch $@ $(VENV)/.installed-recipes

$(VENV)/.installed-lint: $(SETTINGS) | $(BIN)/python
	$(BIN)/python -m pip install $(EDITABLE) -c constraints.txt -e ".[lint]" $(TORCH)
	@touch $@

train: $(VENV)/.installed-recipes ## install, then train a reader of licence plates (RECIPE=name for another recipe); again: go on, or say that it is done
	$(BIN)/hezar-train train $(RECIPE)

test: $(VENV)/.installed-test ## install, then run the tests, two files at a time (TEST_WORKERS=n)
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_WORKERS) --dist loadfile

test-all: $(VENV)/.installed-test ## run the tests, also the slow ones
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-lint ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-recipes ## write the pages that are made from the source
	$(BIN)/python docs/make_config.py
	$(BIN)/python docs/make_contract.py

pace: $(VENV)/.installed-recipes ## compare the pace with a loop written by hand
	$(BIN)/python benchmarks/pace.py

hooks: $(VENV)/.installed-recipes ## measure what the hook system costs in a step
	$(BIN)/python benchmarks/hooks.py

evaluation: $(VENV)/.installed-recipes ## compare memory and pace of an evaluation with a loop written by hand
	$(BIN)/python benchmarks/evaluation.py

processes: $(VENV)/.installed-recipes ## compare one run on two processes with two runs, then kill ranks of a run
	$(BIN)/python benchmarks/processes.py
	$(BIN)/python benchmarks/elastic.py

hub: $(VENV)/.installed-recipes ## start a Hub on this machine, to try pushing without an account
	$(BIN)/python -m tests.hub.server

kill: $(VENV)/.installed-recipes ## kill runs at random moments, go on, and compare with an unbroken run
	$(BIN)/python benchmarks/kill.py

clean: ## remove the environment and all caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
