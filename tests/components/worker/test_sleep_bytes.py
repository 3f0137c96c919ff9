"""Level 2 drops weights in whatever form the kernels keep them, and waking up brings them back."""

import gc
import weakref

import pytest
from tiny_gguf import write_tiny_gguf

from workerkit.components.layers.linear import MergedLinear
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams


def tokens_of(worker, prompt=(5, 6, 7), count=6):
    """Greedy tokens of one request, which is then finished."""
    sampling = SamplingParams(temperature=0.0)
    new = NewRequest(req_id="a", token_ids=prompt, prompt_len=3, sampling=sampling, block_ids=((1, 2, 3),))
    outputs = [SchedulerOutput(new_requests=(new,), num_scheduled_tokens={"a": len(prompt)})]
    for step in range(count - 1):
        cached = CachedRequest(req_id="a", num_computed_tokens=len(prompt) + step)
        outputs.append(SchedulerOutput(cached_requests=(cached,), num_scheduled_tokens={"a": 1}))
    tokens = []
    for output in outputs:
        worker.execute_model(output)
        tokens += worker.sample_tokens().get().sampled_token_ids[0]
    worker.execute_model(SchedulerOutput(finished_req_ids=frozenset({"a"})))
    return tokens


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("quantization", "kernels"),
    [*((quantization, "auto") for quantization in ("none", "keep", "int8", "w8a8")), ("none", ["cpu", "reference"])],
)
def test_matrices_go_with_the_weights_and_come_back(tmp_path, quantization, kernels, runner):
    write_tiny_gguf(tmp_path / "m.gguf", {})
    model = {"source": str(tmp_path / "m.gguf"), "max_model_len": 64, "dtype": "bfloat16"}
    config = {
        "model": model | {"quantization": quantization},
        "cache": {"block_size": 4, "num_blocks": 40},
        "limits": {"max_num_reqs": 2},
        "components": {"runner": runner, "kernels": kernels},
    }
    with assemble(config) as assembly:
        worker = assembly.worker
        worker.start()
        before, loaded = tokens_of(worker), assembly.value(LoadedModel)
        assert loaded.weight_bytes == sum(tensor.nbytes for _, tensor in loaded.network.weights())
        linears = [module for module in loaded.network.modules() if isinstance(module, MergedLinear)]
        matrices = [weakref.ref(linear.matrix) for linear in linears]
        tensors = [weakref.ref(tensor) for linear in linears for tensor in linear.matrix.tensors]
        worker.sleep(2)
        gc.collect()
        assert [ref() for ref in matrices + tensors] == [None] * (len(matrices) + len(tensors))
        assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in loaded.network.weights())
        worker.wake_up()
        assert tokens_of(worker) == before
        assert loaded.weight_bytes == sum(tensor.nbytes for _, tensor in loaded.network.weights())
