"""Which sizes are captured and which one a step runs in, against the rule said in one line."""

import itertools

import pytest
import torch

from workerkit.components.attention.reference import ReferenceAttention
from workerkit.components.attention.sdpa import SdpaAttention
from workerkit.components.graph.candidates import Candidates, default_sizes
from workerkit.components.graph.cuda import CudaGraphConfig, CudaGraphManager
from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.framework.errors import ConfigError, UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape
from workerkit.framework.interfaces.model import ModelInputs, ModelOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.testing.fakes import FakeDevice
from workerkit.plugins.builtin_kernels import ReferenceKernels

CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
KERNELS = OrderedKernels((ReferenceKernels(),))
MODES = ("full", "full_decode_only", "piecewise", "full_and_piecewise")


def shape_of(max_num_reqs=14, drafts=2, max_num_batched_tokens=64):
    return WorkerShape(
        max_model_len=64,
        max_num_reqs=max_num_reqs,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=100,
        num_speculative_tokens=drafts,
    )


def uniform(num_reqs, length):
    return BatchShape(num_tokens=num_reqs * length, num_reqs=num_reqs, uniform_query_len=length, max_query_len=length)


def manager(config, shape=None, attention=SdpaAttention):
    return CudaGraphManager(config, shape or shape_of(), CONTEXT, FakeDevice(), attention(KERNELS))


def test_b163_sizes_of_decodes_are_whole_rows_of_one_token_and_the_drafts():
    candidates = Candidates("full_decode_only", False, [1, 2, 4, 8], shape_of())
    assert [(case.num_tokens, case.num_reqs) for case in candidates.cases] == [(9, 3), (6, 2), (3, 1)]
    assert {case.uniform_query_len for case in candidates.cases} == {3}


def test_b163_nine_tokens_are_padded_to_twelve_and_fifteen_run_eagerly():
    candidates = Candidates("full_decode_only", False, [3, 6, 12], shape_of())
    case = candidates.find(uniform(3, 3))
    assert (case.mode, case.num_tokens, case.num_reqs) == ("full", 12, 4), "three rows and an empty one"
    assert candidates.find(uniform(5, 3)) is None, "beyond the largest"
    assert candidates.find(uniform(9, 1)) is None, "rows of one token are not what was captured"
    assert candidates.find(BatchShape(num_tokens=9, num_reqs=3, max_query_len=5)) is None


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("varlen", [False, True])
def test_a_step_runs_in_the_first_kind_that_fits_at_its_smallest_size(mode, drafts, varlen):
    shape = shape_of(max_num_reqs=6, drafts=drafts, max_num_batched_tokens=40)
    sizes = [2, 5, 7, 16, 24]
    candidates = Candidates(mode, varlen, sizes, shape)
    modes = [case.mode for case in candidates.cases]
    assert modes == sorted(modes, key=["piecewise", "full"].index)
    for _, cases in itertools.groupby(candidates.cases, key=lambda case: case.mode):
        numbers = [case.num_tokens for case in cases]
        assert numbers == sorted(numbers, reverse=True)
    for case in candidates.cases:
        assert case.num_reqs <= min(shape.max_num_reqs, case.num_tokens)
        assert case.num_tokens <= shape.max_num_batched_tokens

    def rank(case):
        kind = 0 if case.uniform_query_len else 1 if case.max_query_len else 2 if case.mode == "full" else 3
        return (kind, case.num_tokens)

    for counts in itertools.chain(
        itertools.product((1, 3), repeat=4), ([n] for n in range(1, 41)), ([1] * n for n in range(1, 7)), ([3] * 6,)
    ):
        step = BatchShape(
            num_tokens=sum(counts),
            num_reqs=len(counts),
            uniform_query_len=counts[0] if len(set(counts)) == 1 else None,
            max_query_len=max(counts),
        )
        fitting = [
            case
            for case in candidates.cases
            if case.num_tokens >= step.num_tokens
            and case.num_reqs >= (step.num_reqs if case.mode == "full" else 0)
            and case.uniform_query_len in (None, step.uniform_query_len)
            and (case.max_query_len is None or case.max_query_len >= step.max_query_len)
        ]
        assert candidates.find(step) == (min(fitting, key=rank) if fitting else None), counts


def test_sizes_by_default_end_with_the_limits():
    assert default_sizes(shape_of(6, 0, 32)) == (1, 2, 4, 6, 8)
    assert default_sizes(shape_of(20, 0, 64)) == (1, 2, 4, 8, 16, 20, 24, 32, 40)
    large = default_sizes(shape_of(512, 3, 8192))
    assert large[-1] == 512
    assert set(range(8, 257, 8)) | set(range(256, 513, 16)) <= set(large)
    full = Candidates("full_decode_only", False, default_sizes(shape_of(20, 0, 64)), shape_of(20, 0, 64))
    assert full.find(uniform(20, 1)).num_reqs == 20, "the worker's largest decode is among them"


def test_nothing_is_dispatched_before_all_is_captured_and_after_a_release():
    graphs = manager(CudaGraphConfig(mode="piecewise", capture_sizes=(2, 4)))
    eager = BatchDescriptor(num_tokens=2, num_reqs=1)
    step = BatchShape(num_tokens=2, num_reqs=1)

    def forward(inputs):
        return ModelOutput(hidden=inputs.positions[:, None] * 1.0)

    for case in graphs.cases:
        assert graphs.dispatch(step) == eager
        ids = torch.zeros(case.num_tokens, dtype=torch.int64)
        graphs.capture(case, forward, ModelInputs(input_ids=ids, positions=ids, rope_lens=ids, attend=None))
    assert graphs.dispatch(step) == BatchDescriptor(mode="piecewise", num_tokens=2, num_reqs=1)
    graphs.release()
    assert graphs.dispatch(step) == eager


@pytest.mark.parametrize(
    ("config", "attention", "message"),
    [
        (CudaGraphConfig(capture_sizes=(128,)), SdpaAttention, "128 tokens .*max_num_batched_tokens is 64"),
        (CudaGraphConfig(mode="full"), SdpaAttention, "graph_support is 'uniform': right .* full_decode_only"),
        (CudaGraphConfig(varlen_decode=True), SdpaAttention, "'uniform'"),
        (CudaGraphConfig(), ReferenceAttention, "graph_support is 'never': right would be mode piecewise"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(config, attention, message):
    with pytest.raises(UnsupportedError, match=message):
        manager(config, attention=attention)


def test_rows_that_no_step_can_hold_are_refused():
    with pytest.raises(UnsupportedError, match="no whole row of 9 tokens"):
        manager(CudaGraphConfig(mode="full_decode_only"), shape_of(4, 8, 8))


def test_a_device_without_graphs_and_wrong_options_are_refused_before_anything_is_built(assembly_factory, fake_config):
    with pytest.raises(ConfigError, match=r"components\.graph 'cuda' .* components\.device 'cpu' has none"):
        assembly_factory(fake_config("v2", graph="cuda", device="cpu"))
    with pytest.raises(ConfigError, match="'capture_sizes' must name sizes >= 1"):
        assembly_factory(fake_config("v2", graph={"use": "cuda", "capture_sizes": [0]}))
    with pytest.raises(ConfigError, match="mode"):
        assembly_factory(fake_config("v2", graph={"use": "cuda", "mode": "half"}))
