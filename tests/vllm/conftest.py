"""Tests with vLLM: collected only where it is installed, which is in the environments of `make test-vllm`.

Nothing here imports vLLM at its top: the filters below must come first.
"""

import importlib.util
import os

import pytest
import vllm_model
import yaml

INSTALLED = importlib.util.find_spec("vllm") is not None
# `pytest tests/vllm` without vLLM finds no test, which pytest counts as a failure: `make test-vllm` cannot pass idly.
collect_ignore_glob = [] if INSTALLED else ["*"]

if INSTALLED:  # vLLM settles both for the whole process; engines in it name their config in additional_config
    os.environ.setdefault("WORKERKIT_CONFIG", "named by no test")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

# vLLM and its imports warn by the dozen, of each other. What our code, its tests and pytest itself cause stays an
# error; a warning is filed under the module that it points to, so that is what decides. The last line that fits wins.
FILTERS = (
    "ignore",
    r"error:::(workerkit|tests\.|vllm_)",
    "error::pytest.PytestWarning",
)


def pytest_configure(config):
    if INSTALLED:
        for line in FILTERS:
            config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def model_dir():
    """SmolLM2-135M-Instruct in bf16 as a Hugging Face folder."""
    return vllm_model.smollm2_folder()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory, model_dir):
    """Two layers of random float32 weights, with SmolLM2's tokenizer and chat template."""
    return vllm_model.write_tiny(tmp_path_factory.mktemp("tiny"), model_dir)


@pytest.fixture(scope="session")
def cpu_v1(tmp_path_factory):
    """A workerkit config around the V1 runner, as a file."""
    return _config(tmp_path_factory, "v1")


@pytest.fixture(scope="session")
def cpu_v2(tmp_path_factory):
    """A workerkit config around the V2 runner, as a file."""
    return _config(tmp_path_factory, "v2")


def _config(folders, runner):
    path = folders.mktemp("config") / f"{runner}.yaml"
    cache = {"memory_bytes": 2**28}  # 11,000 tokens of SmolLM2 in bf16
    path.write_text(yaml.safe_dump({"cache": cache, "components": {"runner": runner, "device": "cpu"}}))
    return path
