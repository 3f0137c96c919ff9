"""Merged projections: one product, and views that a checkpoint fills."""

import torch

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

CPU = torch.device("cpu")
KERNELS = OrderedKernels((CpuKernels(), ReferenceKernels()))


def test_outputs_lie_side_by_side_in_order():
    merged = MergedLinear(5, {"a": 3, "b": 2}, True, KERNELS, torch.float32, CPU)
    parts = {name: torch.randn_like(view) for name, view in merged.checkpoint_tensors().items()}
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "a.weight": (3, 5), "a.bias": (3,), "b.weight": (2, 5), "b.bias": (2,),
    }  # fmt: skip
    for name, view in merged.checkpoint_tensors().items():
        view.copy_(parts[name])
    merged.bind()
    x = torch.randn(4, 5)
    expected = torch.cat([x @ parts[f"{n}.weight"].T + parts[f"{n}.bias"] for n in "ab"], -1)
    torch.testing.assert_close(merged(x), expected)


def test_one_projection_without_bias():
    linear = Linear("o_proj", 5, 3, False, KERNELS, torch.bfloat16, CPU)
    assert list(linear.checkpoint_tensors()) == ["o_proj.weight"]
    assert linear.weight.dtype == torch.bfloat16
    assert not linear.weight.requires_grad
