"""The proposer alone, in workers of both runners, and through the suite that defines what a proposer is."""

from typing import ClassVar

import pytest
import torch
from workerkit_echo_proposer.proposer import EchoProposer

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.conformance_speculation import Row, SpeculatorConformance, draft_inputs, write
from workerkit.framework.testing.fakes_model import fake_tokens
from workerkit.framework.testing.registry import fake_config


def proposer(count=3):
    shape = WorkerShape(
        max_model_len=64, max_num_reqs=2, max_num_batched_tokens=64, vocab_size=20, num_speculative_tokens=count
    )
    return EchoProposer(shape, DeviceContext(device=torch.device("cpu"), dtype=torch.float32))


def request(*token_ids):
    return NewRequest(
        req_id="r", token_ids=token_ids, prompt_len=len(token_ids), sampling=SamplingParams(), block_ids=((1,),)
    )


def test_what_followed_a_token_last_time_follows_again():
    part = proposer()
    part.add(0, request(1, 2, 3, 1, 4, 5))
    step = Row(slot=0, computed=0, tokens=[1, 2, 3, 1, 4, 5], sampled=[2], prompt_len=6)
    assert part.propose(draft_inputs([step])).token_ids.tolist() == [[3, 1, 4]]
    step = Row(slot=0, computed=6, tokens=[2, 3, 1, 4], drafts=3, sampled=[3, 9], prompt_len=6)  # 1 and 4 are rejected
    assert part.propose(draft_inputs([step])).token_ids.tolist() == [[-1, -1, -1]]
    step = Row(slot=0, computed=8, tokens=[9], sampled=[3], prompt_len=6)
    assert part.propose(draft_inputs([step])).token_ids.tolist() == [[9, 3, 9]]


def test_it_needs_a_number_of_drafts():
    with pytest.raises(UnsupportedError, match=r"limits\.num_speculative_tokens"):
        proposer(0)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_it_changes_no_token_of_a_worker_of_fakes(runner, assembly_factory):
    config = fake_config(runner, kernels="ordered", speculator="echo")
    config["limits"]["num_speculative_tokens"] = 4
    engine = assembly_factory(config).engine
    engine.start()
    (done,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert list(done.token_ids) == fake_tokens([5, 6, 7], 12)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_it_is_chosen_by_a_request_of_a_composite(runner, assembly_factory):
    config = fake_config(runner, kernels="ordered", speculator={"use": "composite", "proposers": ["ngram", "echo"]})
    config["limits"]["num_speculative_tokens"] = 2
    engine = assembly_factory(config).engine
    engine.start()
    params = SamplingParams(temperature=0.0, extra_args={"speculator": "echo"})
    assert write(engine, {"r": [5, 6, 7]}, params)["r"] == fake_tokens([5, 6, 7], 125)


class TestConformance(SpeculatorConformance):
    names: ClassVar = ("echo",)
