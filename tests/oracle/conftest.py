"""The real model, in our engines and in Hugging Face."""

import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.plugins import load_plugins


@pytest.fixture(scope="session")
def smollm2_engines():
    """runner -> a started engine over the real model in float32."""
    config = {
        "model": {"source": "smollm2", "dtype": "float32", "max_model_len": 1100},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 512},
        "cache": {"memory_bytes": 2**30},
        "components": {"runner": "v1", "sampler": {"use": "torch", "temperature": 0.0}},
    }
    engines = {runner: assemble(config, {"components.runner": runner}).engine for runner in ("v1", "v2")}
    for engine in engines.values():
        engine.start()
    yield engines
    for engine in engines.values():
        engine.shutdown()


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_engines):  # the engines fetch the file when it is not there yet
    """The same GGUF file, read by transformers' own code."""
    from transformers import AutoModelForCausalLM, GgufConfig

    entry = load_plugins().registry.entry(roles.MODEL_STORE.name, "local")
    path = entry.factory(config=entry.config()).resolve("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return model.eval()
