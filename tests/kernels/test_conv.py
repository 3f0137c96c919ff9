"""Causal convolution over ragged rows: the reference against one over whole sequences, the CPU library against it."""

import pytest
import torch

from workerkit.kernels import cpu, reference

LIBRARIES = {"reference": reference.OPS, "cpu": cpu.OPS}
CHANNELS = 6


@pytest.fixture(params=LIBRARIES)
def causal_conv1d(request):
    return LIBRARIES[request.param]["causal_conv1d"]


def starts_of(lens):
    return torch.tensor([0, *lens]).cumsum(0).int()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 2, 3, 20])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_of_sequences_are_the_convolution_of_the_whole(causal_conv1d, width, chunk, with_bias):
    lens = [11, 5, 20]
    weight, bias = torch.randn(CHANNELS, width), torch.randn(CHANNELS) if with_bias else None
    sequences = [torch.randn(length, CHANNELS) for length in lens]
    expected = [
        torch.nn.functional.conv1d(whole.T[None], weight[:, None], bias, padding=width - 1, groups=CHANNELS)[0].T
        for whole in sequences
    ]
    states = torch.full((7, CHANNELS, width - 1), 9.0)
    own = [4, 1, 6]
    states[own] = 0.0
    done = 0
    while any(done < length for length in lens):
        rows = [row for row in (2, 0, 1) if done < lens[row]]
        parts = [sequences[row][done : done + chunk] for row in rows]
        starts = starts_of([len(part) for part in parts])
        token_states = torch.full((int(starts[-1]),), -1)
        initial = torch.tensor([own[row] for row in rows])
        token_states[starts[1:].long() - 1] = initial  # the same rows: read before they are written
        got = causal_conv1d(torch.cat(parts), weight, bias, states, initial, token_states, starts)
        for row, output in zip(rows, got.split([len(part) for part in parts]), strict=True):
            torch.testing.assert_close(output, expected[row][done : done + chunk][: len(output)], atol=1e-5, rtol=1e-5)
        done += chunk
    for row, whole in enumerate(sequences):
        assert torch.equal(states[own[row]], whole[len(whole) - width + 1 :].T)
    others = [row for row in range(7) if row not in own]
    assert (states[others] == 9.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [[1], [5], [1, 1, 1], [3, 1, 7, 2, 1]], ids=str)
@pytest.mark.parametrize("width", [2, 4])
def test_cpu_equals_the_reference(lens, width, dtype):
    num_tokens, num_rows = sum(lens), len(lens)
    x = torch.randn(num_tokens, 3 * CHANNELS).to(dtype)[:, CHANNELS : 2 * CHANNELS]  # a part of something wider
    weight, bias = torch.randn(CHANNELS, width).to(dtype), torch.randn(CHANNELS).to(dtype)
    places = torch.randperm(num_rows + num_tokens)
    token_states = torch.where(torch.rand(num_tokens) < 0.6, places[num_rows:], -1)
    before = torch.randn(num_rows + num_tokens, CHANNELS, width - 1).to(dtype)
    results = []
    for ops in (reference.OPS, cpu.OPS):
        states = before.clone()
        results.append(
            (ops["causal_conv1d"](x, weight, bias, states, places[:num_rows], token_states, starts_of(lens)), states)
        )
    (expected, expected_states), (got, got_states) = results
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 2e-2}
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, **tolerance)
    assert torch.equal(got_states, expected_states)
