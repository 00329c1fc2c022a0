# Each target starts from a bare clone: it creates .venv, installs, and does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: survey reproduce test lint bench clean

survey: $(VENV)/installed
	$(BIN)/python examples/plot_first_spectrum.py --out survey

# Every registered experiment at tiny size, into gallery/index.html; exit code 1 if a claim failed.
reproduce: $(VENV)/installed
	$(BIN)/theodolite reproduce --size tiny --engine joblib --out gallery --resume

test: $(VENV)/installed-test lint
	$(BIN)/python -m pytest

lint: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# BENCH="--quick" tries the harness, BENCH="--items product layers" measures only these.
bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/run.py --out benchmarks/results $(BENCH)

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
	$(PIP) --no-deps curvlinops-for-pytorch backpack-for-pytorch nngeometry
	touch $@

clean:
	rm -rf $(VENV) survey gallery benchmarks/results .mypy_cache .ruff_cache .pytest_cache
