"""Norms, activation, angles and choices of the native library against the reference."""

import pytest
import torch

from workerkit.kernels import reference
from workerkit.kernels.cpu.native import OPS
from workerkit.kernels.cpu.native.recording import NotRecordable

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1), (3, 15), (2, 16), (7, 33), (4, 576)]


def rand(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(one, other):
    torch.testing.assert_close(one, other, atol=TOLERANCE[other.dtype], rtol=TOLERANCE[other.dtype])


@pytest.mark.parametrize(("dtype", "kept"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("size", SIZES)
def test_norms(runtime, dtype, kept, size):
    x, residual, weight = rand(*size, dtype=dtype), rand(*size, dtype=dtype, seed=1), rand(size[1], dtype=kept, seed=2)
    close(OPS["rms_norm"](runtime, x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, total = reference.fused_add_rms_norm(x, residual.clone(), weight, 1e-5)
    ours, ours_total = OPS["fused_add_rms_norm"](runtime, x, residual, weight, 1e-5)
    close(ours, normed)
    assert torch.equal(ours_total, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_a_merged_result(runtime, dtype):
    merged, weight = rand(5, 6 * 24, dtype=dtype), rand(24, dtype=dtype, seed=1)
    heads = merged[:, 24:96].view(5, 3, 24)
    close(OPS["rms_norm"](runtime, heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_activation_and_sum(runtime, dtype, size):
    x = 30 * rand(size[0], 2 * size[1], dtype=dtype)
    close(OPS["silu_and_mul"](runtime, x), reference.silu_and_mul(x.float()).to(dtype))
    a, b = x.chunk(2, dim=1)
    assert torch.equal(OPS["add"](runtime, a, b), a + b)


def test_activation_at_the_ends_of_float32(runtime):
    gate = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30]])
    x = torch.cat([gate, torch.ones_like(gate)], dim=1)
    close(OPS["silu_and_mul"](runtime, x), reference.silu_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles(runtime, dtype):
    positions, inv_freq = torch.tensor([0, 1, 17, 4096, 100_000]), 10000.0 ** -(torch.arange(20) / 20)
    for ours, theirs in zip(
        OPS["rotary_cos_sin"](runtime, positions, inv_freq, 1.25, dtype),
        reference.rotary_cos_sin(positions, inv_freq, 1.25, dtype),
        strict=True,
    ):
        close(ours, theirs)


@pytest.mark.parametrize("size", [1, 15, 64, 127, 128, 129, 1000])
def test_choices(runtime, size):
    logits = 4 * rand(6, size, seed=3)
    logits[1, size // 2 :] = logits[1].max()  # a tie: the first one counts
    logits[2] = -float("inf")
    logits[3, size - 1] = float("nan")
    logits[4, 0] = float("inf")
    assert torch.equal(OPS["greedy_tokens"](runtime, logits), reference.greedy_tokens(logits))
    uniform = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(OPS["sample_tokens"](runtime, logits, uniform), reference.sample_tokens(logits, uniform))


def test_draws_follow_the_distribution(runtime):
    logits = rand(1, 300, seed=4) * 3
    logits[0, 100:200] = -float("inf")
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens = OPS["sample_tokens"](runtime, logits.expand(20_000, -1), uniform)
    counts = torch.bincount(tokens, minlength=300) / 20_000
    torch.testing.assert_close(counts, logits[0].softmax(-1), atol=1e-4, rtol=0)
    assert not counts[100:200].any()


def test_a_recording_runs_over_other_rows(runtime):
    weight = rand(48, dtype=torch.bfloat16)
    x = rand(9, 96, dtype=torch.bfloat16, seed=1)

    def forward(x):
        y = OPS["silu_and_mul"](runtime, x)
        y, total = OPS["fused_add_rms_norm"](runtime, y, OPS["rms_norm"](runtime, y, weight, 1e-5), weight, 1e-5)
        return {"out": OPS["add"](runtime, y, total), "view": y[:, 16:32]}

    program, result = runtime.record(lambda: forward(x[:2]), 2, 9)
    expected = forward(x)
    for rows in (9, 1, 5):
        result["out"].zero_()
        program.run(rows)
        assert torch.equal(result["out"][:rows], expected["out"][:rows])
        assert torch.equal(result["view"][:rows], expected["view"][:rows])
        assert not result["out"][rows:].any()


def test_what_is_no_kernel_cannot_be_recorded(runtime):
    x, more = rand(2, 32), rand(3, 32)
    with pytest.raises(NotRecordable, match=r"aten.mul.*is not a native kernel"):
        runtime.record(lambda: OPS["silu_and_mul"](runtime, x) * 2, 2, 4)
    with pytest.raises(NotRecordable, match="3 rows in a recording of 2"):
        runtime.record(lambda: OPS["silu_and_mul"](runtime, more), 2, 4)
    with pytest.raises(NotRecordable, match="one row says nothing"):
        runtime.record(lambda: OPS["silu_and_mul"](runtime, x[:1]), 1, 4)
    assert OPS["silu_and_mul"](runtime, x).shape == (2, 16), "an error leaves nothing recording"
