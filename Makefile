# `make demo` and `make test` do all set-up; they need Python >= 3.11, make and a package index.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PYTEST_ARGS ?=

.PHONY: demo test test-long lint bench bench-peers clean

demo: $(VENV)/.runtime
	$(BIN)/workerkit chat -c configs/cpu-v2.yaml --once "What is the capital of France?" --max-tokens 64

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not long" $(PYTEST_ARGS)

test-long: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test
	$(BIN)/workerkit bench -c configs/cpu-v2.yaml --set model.dtype=bfloat16
	$(BIN)/python tests/benchmarks/decode.py
	$(BIN)/python tests/benchmarks/sampling.py
	$(BIN)/python tests/benchmarks/scaling.py

# Peers are not built here: `python tests/benchmarks/peers.py --help` says what it looks for, and where.
bench-peers: $(VENV)/.test
	$(BIN)/python tests/benchmarks/peers.py

# torch is pinned here and not in the package: a range would take a CUDA build of several gigabytes.
$(VENV)/.runtime: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit('workerkit needs Python >= 3.11, this is %d.%d: make PYTHON=…' % sys.version_info[:2] if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) -e .
	touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) -e '.[test,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage htmlcov
