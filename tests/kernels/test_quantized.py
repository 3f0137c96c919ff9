"""Reference products with quantised weights: against GGUF's own dequantisation, and formulas written out."""

import gguf
import numpy as np
import pytest
import torch

from workerkit.kernels.reference.quantized import linear_q4, linear_q8, linear_w8, linear_w8a8

OUTPUTS, GROUPS = 37, 3
TYPES = gguf.GGMLQuantizationType


@pytest.fixture
def random():
    return torch.Generator().manual_seed(3)


def gguf_blocks(random, num_scales, num_codes):
    """Blocks as they lie in a file: fp16 scale (and minimum), then bytes of codes -> (scales, bytes, all of it)."""
    scales = torch.randn(OUTPUTS, GROUPS, num_scales, generator=random).half()
    codes = torch.randint(0, 256, (OUTPUTS, GROUPS, num_codes), generator=random, dtype=torch.uint8)
    return scales, codes, torch.cat((scales.view(torch.uint8), codes), dim=-1).flatten(1).numpy()


def matrix_and_weight(kind, random, bias, dtype=torch.float32):
    if kind == "Q8_0":
        scales, codes, blocks = gguf_blocks(random, 1, 32)
        matrix = linear_q8(codes.view(torch.int8).flatten(1), scales[..., 0].float(), bias, dtype)
    else:
        scales, codes, blocks = gguf_blocks(random, 1 if kind == "Q4_0" else 2, 16)
        scales = scales.float()
        minima = scales[..., 0] * -8 if kind == "Q4_0" else scales[..., 1]
        matrix = linear_q4(codes.flatten(1), scales[..., 0].contiguous(), minima.contiguous(), bias, dtype)
    return matrix, torch.from_numpy(gguf.dequantize(np.ascontiguousarray(blocks), TYPES[kind]))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_what_gguf_dequantises(kind, dtype, random):
    matrix, weight = matrix_and_weight(kind, random, None, dtype)
    assert torch.equal(matrix.rows(torch.arange(OUTPUTS)), weight.to(dtype))
    assert torch.equal(matrix.rows(torch.tensor([5, 5, 0], dtype=torch.int32)), weight[[5, 5, 0]].to(dtype))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_the_dequantised_weight(kind, with_bias, random):
    bias = torch.randn(OUTPUTS, generator=random) if with_bias else None
    matrix, weight = matrix_and_weight(kind, random, bias)
    x = torch.randn(5, 32 * GROUPS, generator=random)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(matrix(x), expected.float(), atol=1e-3, rtol=1e-5)
    narrow = x.bfloat16()
    assert matrix(narrow).dtype == torch.bfloat16
    assert torch.equal(matrix.logits(narrow).bfloat16(), matrix(narrow))
    torch.testing.assert_close(matrix.logits(narrow), matrix(narrow.float()))


def test_all_that_is_kept_is_counted(random):
    matrix, _ = matrix_and_weight("Q4_1", random, torch.zeros(OUTPUTS))
    assert sum(t.numel() * t.element_size() for t in matrix.tensors) == OUTPUTS * (GROUPS * (16 + 4 + 4) + 4)


@pytest.mark.parametrize("size", [32, 45])
def test_w8_scales_each_output(size, random):
    codes = torch.randint(-127, 128, (OUTPUTS, size), generator=random, dtype=torch.int8)
    scales, bias = torch.rand(OUTPUTS, generator=random), torch.randn(OUTPUTS, generator=random)
    matrix, x = linear_w8(codes, scales, bias, torch.float32), torch.randn(4, size, generator=random)
    expected = x.double() @ codes.double().T * scales.double() + bias.double()
    torch.testing.assert_close(matrix(x), expected.float(), atol=1e-3, rtol=1e-5)
    assert torch.equal(matrix.rows(torch.tensor([3, 36])), codes[[3, 36]].float() * scales[[3, 36], None])


def test_w8a8_rounds_each_token_to_127_steps():
    codes = torch.tensor([[1, -2, 3], [127, 0, -127]], dtype=torch.int8)
    scales = torch.tensor([0.5, 2.0])
    matrix = linear_w8a8(codes, scales, torch.tensor([1.0, 0.0]), torch.float32)
    # The first token's scale is 2: 254, -3 and 1 become 127, -2 (half way, to even) and 0. The second's is 0.
    x = torch.tensor([[254.0, -3.0, 1.0], [0.0, 0.0, 0.0]])
    expected = torch.tensor([[(127 + 4) * 2 * 0.5 + 1, 127 * 127 * 2 * 2.0], [1.0, 0.0]])
    assert torch.equal(matrix(x), expected)
    assert torch.equal(matrix.rows(torch.tensor([1])), codes[1:].float() * 2)


def test_w8a8_against_a_loop(random):
    codes = torch.randint(-127, 128, (OUTPUTS, 40), generator=random, dtype=torch.int8)
    scales, x = torch.rand(OUTPUTS, generator=random), torch.randn(3, 40, generator=random)
    got = linear_w8a8(codes, scales, None, torch.float32)(x)
    for row, result in zip(x.double().numpy(), got.double().numpy(), strict=True):
        step = np.abs(row).max() / 127
        sums = codes.numpy().astype(np.int64) @ np.rint(row / step).astype(np.int64)
        np.testing.assert_allclose(result, sums * step * scales.double().numpy(), rtol=1e-6)
