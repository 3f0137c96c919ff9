"""Norms, rotary embedding and activation against formulas, and the CPU library against the reference."""

import pytest
import torch

from workerkit.kernels import cpu, reference

LIBRARIES = {"reference": reference.OPS, "cpu": reference.OPS | cpu.OPS}
LOOSE = {torch.float32: {"atol": 2e-6, "rtol": 1e-6}, torch.bfloat16: {"atol": 4e-2, "rtol": 2e-2}}


@pytest.fixture(params=LIBRARIES)
def ops(request):
    return LIBRARIES[request.param]


@pytest.fixture(params=LOOSE, ids=str)
def dtype(request):
    return request.param


def test_libraries_offer_known_ops_only():
    from workerkit.framework.interfaces.kernels import OPS

    assert tuple(reference.OPS) == OPS
    assert set(cpu.OPS) <= set(OPS)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_linear(ops, dtype, rows, with_bias):
    weight, bias = torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype) if with_bias else None
    x = torch.randn(rows, 40).to(dtype)[:, 8:24]  # rows of a wider tensor
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = ops["linear"](weight, bias)(x)
    torch.testing.assert_close(got, expected.to(dtype), atol=4e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)


def test_cpu_linear_gives_the_bits_of_the_reference():
    for rows in (1, 8, 50):
        weight, x = torch.randn(192, 576).bfloat16(), torch.randn(rows, 576).bfloat16()
        assert torch.equal(cpu.OPS["linear"](weight, None)(x), reference.OPS["linear"](weight, None)(x))


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_linear_heads(ops, dtype, rows):
    weight = torch.randn(3, 5, 16).to(dtype)
    x = torch.randn(rows, 3, 24).to(dtype)[..., 4:20]  # a part of each head
    expected = torch.einsum("noh,tnh->tno", weight.double(), x.double()).to(dtype)
    matrices = ops["linear_heads"](weight)
    torch.testing.assert_close(matrices(x), expected, atol=4e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)
    assert sum(tensor.numel() for tensor in matrices.tensors) == weight.numel()


def test_linear_heads_of_the_reference_keep_to_their_token():
    matrices, x = reference.OPS["linear_heads"](torch.randn(4, 32, 64).bfloat16()), torch.randn(40, 4, 64).bfloat16()
    assert all(torch.equal(matrices(x)[t], matrices(x[t : t + 1])[0]) for t in range(40))


def test_rms_norm(ops, dtype):
    x, weight = (torch.randn(3, 5, 16) * 7).to(dtype), torch.randn(16).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    torch.testing.assert_close(ops["rms_norm"](x, weight, 1e-3), expected.to(dtype), **LOOSE[dtype])


def test_fused_add_rms_norm(ops, dtype):
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((4, 16), (4, 16), (16,)))
    normed, total = ops["fused_add_rms_norm"](x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, ops["rms_norm"](x + residual, weight, 1e-5), **LOOSE[dtype])


def test_norms_with_float32_weights_round_once(ops):
    """The weights' digits below those of bfloat16 count."""
    x, residual = torch.randn(4, 16).bfloat16(), torch.randn(4, 16).bfloat16()
    weight = 1 + torch.rand(16) / 128
    total = x + residual
    wide = total.double()
    expected = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()).bfloat16()
    fused, _ = ops["fused_add_rms_norm"](x.clone(), residual.clone(), weight, 1e-5)
    for got in (ops["rms_norm"](total, weight, 1e-5), fused):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_cpu_norms_equal_the_reference_in_float32():
    x, residual, weight = torch.randn(50, 576), torch.randn(50, 576), torch.randn(576)
    torch.testing.assert_close(
        cpu.OPS["rms_norm"](x, weight, 1e-5), reference.OPS["rms_norm"](x, weight, 1e-5), atol=1e-6, rtol=1e-6
    )
    for got, expected in zip(
        cpu.OPS["fused_add_rms_norm"](x.clone(), residual.clone(), weight, 1e-5),
        reference.OPS["fused_add_rms_norm"](x, residual, weight, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_embedding_rotates_pairs_half_a_rotary_dim_apart(ops, dtype, adjacent, rotary_dim):
    half = rotary_dim // 2
    merged = torch.randn(5, 7 * 8).to(dtype)
    query, key = merged[:, : 4 * 8].view(5, 4, 8), merged[:, 4 * 8 : 6 * 8].view(5, 2, 8)
    if not adjacent:
        query, key = query.clone(), key.clone()
    before = merged.clone()
    angles = torch.randn(5, half)
    rotated = ops["rotary_embedding"](query, key, angles.cos().to(dtype), angles.sin().to(dtype))
    for x, got in zip((before[:, :32].view(5, 4, 8), before[:, 32:48].view(5, 2, 8)), rotated, strict=True):
        expected = x.double().clone()
        for token in range(5):
            for i in range(half):
                a, b = x[token, :, i].double(), x[token, :, i + half].double()
                angle = angles[token, i].double()
                expected[token, :, i] = a * angle.cos() - b * angle.sin()
                expected[token, :, i + half] = b * angle.cos() + a * angle.sin()
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected.to(dtype), **LOOSE[dtype])
        assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(merged[:, 48:], before[:, 48:])  # the values behind are not touched


def test_swigluoai_and_mul(ops, dtype):
    """In the middle, at both bounds of one side and at the only bound of the other."""
    gate, up = (6 * torch.randn(30, 16)).to(dtype), (6 * torch.randn(30, 16)).to(dtype)
    assert gate.max() > 7 > -7 > gate.min()
    assert up.max() > 7 > -7 > up.min()
    bounded, other = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    expected = bounded / (1 + (-1.702 * bounded).exp()) * (other + 1)
    got = ops["swigluoai_and_mul"](torch.cat((gate, up), dim=1))
    torch.testing.assert_close(got, expected.to(dtype), **LOOSE[dtype])


def test_silu_and_mul(ops, dtype):
    x = torch.randn(3, 12).to(dtype)
    gate, up = x[:, :6].double(), x[:, 6:].double()
    torch.testing.assert_close(ops["silu_and_mul"](x), (gate * torch.sigmoid(gate) * up).to(dtype), **LOOSE[dtype])
