"""Swapping a part is one line in a config, and one `with_override` in a test."""

import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ConfigError
from workerkit.framework.interfaces.kernels import KernelLibrary
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import NewRequest, SchedulerOutput
from workerkit.framework.interfaces.sampling import Sampler
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins

CONFIG = {
    "model": {"source": "random", "max_model_len": 64},
    "limits": {"max_num_reqs": 2, "max_num_batched_tokens": 16},
    "cache": {"block_size": 4, "num_blocks": 40},
    "components": {"loader": "random", "sampler": {"use": "torch", "temperature": 0.0}},
}


class Always7(Sampler):
    def keys(self, batch):
        raise AssertionError("nobody proposes anything")

    def process(self, logits, batch):
        return logits

    def draw(self, logits, batch):
        return torch.full((len(logits),), 7)


def token(worker, req_id="a"):
    new = NewRequest(req_id=req_id, token_ids=(1, 2), prompt_len=2, sampling=SamplingParams(), block_ids=((1,),))
    worker.execute_model(SchedulerOutput(new_requests=(new,), num_scheduled_tokens={req_id: 2}))
    result = worker.sample_tokens().get().sampled_token_ids[0][0]
    worker.execute_model(SchedulerOutput(finished_req_ids=frozenset({req_id})))
    return result


@pytest.mark.parametrize(
    ("line", "role", "class_name"),
    [
        ({"components.runner": "v1"}, roles.RUNNER, "NPUModelRunner"),
        ({"components.attention": "reference"}, roles.ATTENTION, "ReferenceAttention"),
        ({"components.block_table": "reference"}, roles.BLOCK_TABLE, "ReferenceBlockTables"),
        ({"components.kernels": ["reference"]}, roles.KERNELS, "OrderedKernels"),
    ],
)
def test_one_line_swaps_a_part_and_the_tokens_stay(line, role, class_name):
    with assemble(CONFIG) as plain, assemble(CONFIG, line) as swapped:
        plain.worker.start()
        swapped.worker.start()
        assert token(plain.worker) == token(swapped.worker)
        assert type(swapped.get(role)).__name__ == class_name
        if role is roles.RUNNER:
            assert type(swapped.get(role)).__module__.endswith("runner.v1")
        if role is roles.KERNELS:
            assert set(swapped.get(role).bindings.values()) == {"reference"}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_one_override_swaps_the_sampler_and_shares_the_loaded_model(runner):
    with assemble(CONFIG, {"components.runner": runner}) as plain:
        plain.worker.start()
        before = token(plain.worker)
        assert before != 7
        with plain.with_override(roles.SAMPLER, Always7()) as other:
            other.worker.start()
            assert token(other.worker) == 7
            assert other.value(LoadedModel) is plain.value(LoadedModel)
            assert other.worker is not plain.worker
        assert token(plain.worker, "b") == before


def test_a_plugin_replaces_one_kernel_by_name():
    class Doubling(KernelLibrary):
        """An rms_norm that is wrong on purpose."""

        name = "doubling"

        @property
        def ops(self):
            return {"rms_norm": lambda x, weight, eps: 2 * torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)}

    registry = load_plugins().registry
    registry.add(roles.KERNEL_LIBRARY, "doubling", Doubling)
    with assemble(CONFIG, {"components.kernels": ["doubling", "cpu", "reference"]}, registry) as assembly:
        bindings = assembly.get(roles.KERNELS).bindings
        assert bindings["rms_norm"] == "doubling"
        assert set(bindings.values()) == {"doubling", "cpu", "reference"} or set(bindings.values()) == {
            "doubling",
            "cpu",
        }
        x = torch.ones(1, 4)
        assert torch.equal(assembly.get(roles.KERNELS).rms_norm(x, torch.ones(4), 0.0), 2 * x)


def test_a_combination_that_cannot_work_is_refused_at_assembly_by_name():
    with pytest.raises(ConfigError, match=r"runner 'v1' needs a RowBlockTables.*'ascend' is none.*multi_group"):
        assemble(CONFIG, {"components.runner": "v1", "components.block_table": "ascend"})


def test_b175_a_part_of_the_wrong_kind_cannot_be_put_in_its_place():
    with (
        assemble(CONFIG) as assembly,
        pytest.raises(TypeError, match="sampler is filled by a Sampler, not by a object"),
    ):
        assembly.with_override(roles.SAMPLER, object())


def test_b77_of_two_parts_that_suit_the_one_of_higher_priority_is_taken_and_the_reason_is_kept():
    registry = load_plugins().registry
    attention = registry.entry("attention", "reference").factory
    registry.add(roles.ATTENTION, "mine", attention, suits=lambda chosen: "it is mine", priority=20)
    registry.add(roles.ATTENTION, "yours", attention, suits=lambda chosen: "it is yours", priority=20)
    node = assemble(CONFIG, {"components.attention": "auto"}, registry).plan.nodes["attention"]
    assert (node.name, node.why) == ("mine", "auto: it is mine")  # equal priorities: who registered first
