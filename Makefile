# Each target starts from a bare clone: it creates .venv, installs, and does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: survey reproduce test golden lint bench docs clean

# Trains the embedded example, surveys it, prints the findings and writes survey/index.html.
# SURVEY="--model mymodule:build --data mymodule:data" surveys your own model instead.
survey: $(VENV)/installed
	$(BIN)/theodolite survey --out survey $(SURVEY)

# Every registered experiment at tiny size, into gallery/index.html; exit code 1 if a claim failed.
reproduce: $(VENV)/installed
	$(BIN)/theodolite reproduce --size tiny --engine joblib --out gallery --resume

test: $(VENV)/installed-test lint
	$(BIN)/python -m pytest

# Golden results in golden/: recorded by the first call, compared by every later one (rm -r golden starts anew).
golden: $(VENV)/installed-test
	$(BIN)/python tools/golden.py $(if $(wildcard golden/*.json),compare,record) golden $(GOLDEN)

lint: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# BENCH="--quick" tries the harness, BENCH="--items product layers" measures only these.
bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/run.py --out benchmarks/results $(BENCH)

# The documentation with its gallery executed; a warning is an error.
docs: $(VENV)/installed-docs
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

clean:
	rm -rf $(VENV) survey gallery benchmarks/results docs/_build docs/gallery docs/reference .mypy_cache .ruff_cache .pytest_cache
