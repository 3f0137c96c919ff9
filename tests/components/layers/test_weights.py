"""Reading weights into plain and quantised form."""

import pytest
import torch

from workerkit.components.layers import weights
from workerkit.components.layers.weights import copy, destination, packed, to_int8
from workerkit.framework.interfaces.model import QuantizedTensor

CPU = torch.device("cpu")


def packed_4(rows, groups=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return QuantizedTensor(
        codes=torch.randint(0, 256, (rows, 16 * groups), dtype=torch.uint8, generator=generator),
        scales=torch.rand(rows, groups, generator=generator),
        minima=torch.randn(rows, groups, generator=generator),
    )


def packed_8(rows, groups=2):
    codes = torch.randint(-128, 128, (rows, 32 * groups), dtype=torch.int8)
    return QuantizedTensor(codes=codes, scales=torch.rand(rows, groups))


def test_halves_of_a_byte_are_16_elements_apart():
    codes = torch.arange(16, dtype=torch.uint8) + 16 * torch.arange(15, -1, -1, dtype=torch.uint8)
    tensor = QuantizedTensor(codes=codes[None], scales=torch.tensor([[2.0]]), minima=torch.tensor([[-1.0]]))
    expected = [2.0 * code - 1 for code in [*range(16), *reversed(range(16))]]
    assert tensor.dequantize().tolist() == [expected]
    assert tensor.shape == (1, 32)


def test_8_bits_with_a_scale_for_each_group():
    tensor = packed_8(3)
    expected = tensor.codes.view(3, 2, 32).double() * tensor.scales[..., None]
    torch.testing.assert_close(tensor.dequantize().double(), expected.view(3, 64))


@pytest.mark.parametrize("rows", [1, 2, 1024])
def test_weights_are_copied_in_parts(monkeypatch, rows):
    monkeypatch.setattr(weights, "_ROWS", rows)
    pieces = [packed_4(5), torch.randn(3, 64).double(), packed_8(2)]
    expected = torch.cat([pieces[0].dequantize(), pieces[1].float(), pieces[2].dequantize()]).bfloat16()
    assert torch.equal(copy(pieces, torch.empty(10, 64, dtype=torch.bfloat16)), expected)
    codes, scales = to_int8(pieces, CPU)
    exact = torch.cat([pieces[0].dequantize(), pieces[1].float(), pieces[2].dequantize()])
    assert torch.equal(codes.abs().amax(dim=1), torch.full((10,), 127, dtype=torch.int8))
    assert ((codes * scales[:, None] - exact).abs() <= 0.5001 * scales[:, None]).all()


def test_rows_of_zeros_have_codes_of_zero():
    codes, scales = to_int8([torch.zeros(2, 4)], CPU)
    assert (codes.tolist(), scales.tolist()) == ([[0] * 4] * 2, [1.0, 1.0])


def test_packed_pieces_are_joined_as_they_are():
    one, other = packed_4(2), packed_4(3, seed=1)
    both = packed([one, other], CPU)
    assert torch.equal(both.dequantize(), torch.cat([one.dequantize(), other.dequantize()]))
    assert packed([packed_8(2)], CPU).minima is None
    assert packed([one, packed_8(2)], CPU) is None
    assert packed([one, torch.zeros(1, 64)], CPU) is None


def test_a_tensor_that_is_kept_as_it_is():
    norm, ids = torch.empty(64), torch.empty(2, dtype=torch.int64)
    place = destination(norm)
    assert (place.shape, place.is_floating_point, destination(ids).is_floating_point) == ((64,), True, False)
    place.fill(torch.arange(64).bfloat16())
    assert norm.tolist() == list(range(64))
