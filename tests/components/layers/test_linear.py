"""Linear layers: pieces from a checkpoint, one matrix in the kernels' own form, and nothing beside it."""

import pytest
import torch
from reachable import tensor_bytes

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.layers.embedding import Embedding
from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.framework.interfaces.model import QuantizedTensor
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

CPU = torch.device("cpu")
KERNELS = OrderedKernels((CpuKernels(), ReferenceKernels()))
REFERENCE = OrderedKernels((ReferenceKernels(),))


def test_outputs_lie_side_by_side_in_order():
    merged = MergedLinear(5, {"a": 3, "b": 2}, True, KERNELS, torch.float32, CPU)
    parts = {name: torch.randn(place.shape) for name, place in merged.destinations().items()}
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "a.weight": (3, 5), "a.bias": (3,), "b.weight": (2, 5), "b.bias": (2,),
    }  # fmt: skip
    for name, place in merged.destinations().items():
        assert merged.matrix is None
        place.fill(parts[name])
    x = torch.randn(4, 5)
    expected = torch.cat([x @ parts[f"{n}.weight"].T + parts[f"{n}.bias"] for n in "ab"], -1)
    torch.testing.assert_close(merged(x), expected)


def test_one_projection_without_bias():
    linear = Linear("o_proj", 5, 3, False, KERNELS, torch.bfloat16, CPU)
    assert list(linear.destinations()) == ["o_proj.weight"]
    linear.destinations()["o_proj.weight"].fill(torch.ones(3, 5))
    assert {tensor.dtype for tensor in linear.matrix.tensors} == {torch.bfloat16}
    assert linear(torch.ones(1, 5, dtype=torch.bfloat16)).tolist() == [[5.0] * 3]


def filled(layer, weights):
    for place, weight in zip(layer.destinations().values(), weights, strict=True):
        place.fill(weight)
    return layer


def packed(rows, bits):
    codes = torch.randint(0, 256, (rows, 32 * bits // 8), dtype=torch.uint8)
    minima = torch.randn(rows, 1) if bits == 4 else None
    return QuantizedTensor(
        codes=codes if bits == 4 else codes.view(torch.int8), scales=torch.rand(rows, 1), minima=minima
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_pieces_stay_packed_in_one_matrix(bits):
    merged = MergedLinear(32, {"a": 3, "b": 2}, False, REFERENCE, torch.float32, CPU)
    merged.quantization = "keep"
    pieces = [packed(3, bits), packed(2, bits)]
    filled(merged, pieces)
    plain = torch.cat([piece.dequantize() for piece in pieces])
    x = torch.randn(4, 32)
    torch.testing.assert_close(merged(x), x @ plain.T, atol=1e-4, rtol=1e-5)
    assert tensor_bytes(merged) == 5 * 32 * bits // 8 + 5 * 4 * (2 if bits == 4 else 1)
    assert not merged.is_unpacked


def test_pieces_of_different_kinds_become_plain():
    merged = MergedLinear(32, {"a": 3, "b": 2}, False, REFERENCE, torch.float32, CPU)
    merged.quantization = "keep"
    pieces = [packed(3, 4), packed(2, 8)]
    filled(merged, pieces)
    assert merged.is_unpacked
    assert torch.equal(merged.matrix.tensors[0], torch.cat([piece.dequantize() for piece in pieces]))
    merged.release()
    assert merged.matrix is None
    assert not merged.is_unpacked
    filled(merged, [torch.ones(3, 32), torch.ones(2, 32)])
    assert not merged.is_unpacked


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
@pytest.mark.parametrize("source", ["packed", "plain"])
def test_8_bits_for_each_output_channel(quantization, source):
    merged = MergedLinear(32, {"a": 3, "b": 2}, True, REFERENCE, torch.float32, CPU)
    merged.quantization = quantization
    pieces = [packed(3, 4), packed(2, 8)] if source == "packed" else [torch.randn(3, 32), torch.randn(2, 32)]
    bias = torch.randn(5)
    filled(merged, [pieces[0], bias[:3], pieces[1], bias[3:]])
    plain = torch.cat([piece.dequantize() if source == "packed" else piece for piece in pieces])
    x = torch.randn(50, 32)
    exact = x @ plain.T + bias
    assert ((merged(x) - exact).abs() / (x.norm(dim=1, keepdim=True) * plain.norm(dim=1))).max() < 0.02
    assert tensor_bytes(merged) == 5 * 32 + 5 * 4 + 5 * 4


@pytest.mark.parametrize("quantization", ["none", "keep", "int8", "w8a8"])
def test_an_embedding_is_read_and_multiplied_by(quantization):
    table = Embedding("embed", 7, 32, KERNELS, torch.bfloat16, CPU)
    table.quantization = quantization
    weight = packed(7, 8)
    filled(table, [weight])
    plain, ids = weight.dequantize(), torch.tensor([6, 0, 6])
    torch.testing.assert_close(table.rows(ids).float(), plain[ids], rtol=0.02, atol=float(plain.abs().max()) / 127)
    assert table.rows(ids.int()).dtype == torch.bfloat16
    x = torch.randn(3, 32)
    scale = x.norm(dim=1, keepdim=True) * plain.norm(dim=1)
    logits = table.logits(x.bfloat16())
    assert logits.dtype == torch.float32
    assert ((logits - x @ plain.T).abs() / scale).max() < 0.02


def test_a_mapped_file_is_not_kept():
    """Even where kernels keep a weight as it is: what the loader yields may be a file mapped into memory."""
    weight = torch.randn(3, 5)
    linear = filled(Linear("a", 5, 3, False, REFERENCE, torch.float32, CPU), [weight])
    assert torch.equal(linear.matrix.tensors[0], weight)
    assert linear.matrix.tensors[0].data_ptr() != weight.data_ptr()


def test_pieces_of_an_interrupted_load_are_forgotten():
    merged = MergedLinear(5, {"a": 3, "b": 2}, False, KERNELS, torch.float32, CPU)
    first, second = merged.destinations().values()
    second.fill(torch.zeros(2, 5))
    merged.release()
    first.fill(torch.ones(3, 5))
    assert merged.matrix is None
