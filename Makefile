# Each target starts from a bare clone: it creates .venv, installs, and does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := survey
.PHONY: help survey reproduce test test-docs test-fast golden lint rules types suite bench docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# SURVEY="--model mymodule:build --data mymodule:data" surveys your own model instead.
survey: $(VENV)/installed ## train the embedded example, survey it, write survey/index.html
	$(BIN)/theodolite survey --out survey $(SURVEY)

reproduce: $(VENV)/installed ## every experiment at tiny size into gallery/index.html; exit code 1 if a claim failed
	$(BIN)/theodolite reproduce --size tiny --engine joblib --out gallery --resume

test: rules suite ## rules and all tests on two cores

test-docs: $(VENV)/installed-test ## the documentation builds, and the code of its long pages runs (a minute)
	$(BIN)/python -m pytest -m slow tests/docs/test_docs.py -k 'not cluster'

test-fast: $(VENV)/installed-test ## the quick tests, for while you write (under 2 minutes)
	$(BIN)/python -m pytest -m 'not slow and not long' tests/architecture tests/unit

# Recorded by the first call, compared by every later one; rm -r golden starts anew.
golden: $(VENV)/installed-test ## record golden results before a big step, compare after it
	$(BIN)/python tools/golden.py $(if $(wildcard golden/*.json),compare,record) golden $(GOLDEN)

lint: rules types ## ruff and mypy

rules: $(VENV)/installed-test ## ruff, rules and format
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/installed-test ## mypy
	$(BIN)/python -m mypy

suite: $(VENV)/installed-test ## all tests
	$(BIN)/python -m pytest

# BENCH="--quick" tries the harness, BENCH="--items product layers" measures only these.
bench: $(VENV)/installed-bench ## measure speed beside the peers, into benchmarks/results
	$(BIN)/python benchmarks/run.py --out benchmarks/results $(BENCH)

docs: $(VENV)/installed-docs ## the documentation with its gallery executed; a warning is an error
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html
	@echo "The page is docs/_build/html/index.html"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

# curvlinops (the oracle of some tests) and nngeometry come without their own demands, which would drag torchvision.
$(VENV)/installed-test: $(VENV)/installed
	$(PIP) -e '.[test]'
	$(PIP) --no-deps curvlinops-for-pytorch backpack-for-pytorch
	touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) -e '.[bench]'
	$(PIP) --no-deps curvlinops-for-pytorch backpack-for-pytorch nngeometry cockpit-for-pytorch
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) -e '.[docs]'
	touch $@

clean: ## remove .venv and all that was made
	rm -rf $(VENV) survey gallery benchmarks/results docs/_build docs/gallery docs/reference docs/sources.rst .mypy_cache .ruff_cache .pytest_cache
