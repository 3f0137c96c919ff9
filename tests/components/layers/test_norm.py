"""Norms whose checkpoints hold their weights less an offset."""

import pytest
import torch

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.layers.norm import RMSNorm
from workerkit.kernels.cpu.native.build import unavailable
from workerkit.plugins.builtin_kernels import CpuKernels, NativeKernels, ReferenceKernels

LIBRARIES = {
    "reference": (ReferenceKernels,),
    "cpu": (CpuKernels, ReferenceKernels),
    "native": (NativeKernels, ReferenceKernels),
}


@pytest.mark.parametrize("libraries", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_lower_type_takes_no_digits_from_weights_behind_an_offset(libraries, dtype):
    """1 + w would have those of 1 alone."""
    if libraries == "native" and unavailable():
        pytest.skip("no native kernels here")
    kernels = OrderedKernels(tuple(library() for library in LIBRARIES[libraries]))
    norm = RMSNorm(64, 1e-6, kernels, dtype, torch.device("cpu"), offset=1.0)
    stored = (torch.randn(64, generator=torch.Generator().manual_seed(1)) / 100).to(dtype)
    norm.destination().fill(stored)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + stored.double())
    fused, _ = norm.add(torch.zeros_like(x), x.clone())
    for got in (norm(x), fused):
        assert got.dtype == dtype
        assert (got != expected.to(dtype)).float().mean() < 0.02  # sums in float32 may fall on the other side of a tie
