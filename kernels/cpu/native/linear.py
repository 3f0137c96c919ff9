"""Products with dense weights, float32 and bfloat16. What they compute for a row has the same bits whatever the other
rows, their number and the number of threads are.

float16, which no kernel is written for, goes the way of plain torch.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from workerkit.kernels.cpu import projection as torch_projection
from workerkit.kernels.cpu.native.runtime import SUFFIX, Runtime

_PANEL = 32  # outputs that are packed together
_STEP_BYTES = 4  # of a row that a product takes at a time: a number or a pair


class DenseMatrix:
    """A weight [O, H] in panels as linear.cpp describes them, which is the only copy of it, and its bias [O] or None.

    Products are sums in float32 over the inputs in their order, rounded once, after the bias.
    """

    def __init__(self, runtime: Runtime, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._runtime = runtime
        self._dtype = weight.dtype
        self._num_outputs, self._size = weight.shape
        self._packed = _pack(weight.detach())
        self._bias = None if bias is None else bias.detach().to(weight.dtype).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] of the weight's dtype, with any stride between rows -> [T, O]."""
        return self._product(f"linear_{SUFFIX[self._dtype]}", x, self._dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, O]."""
        if self._dtype == torch.float32:
            return self(x)
        return self._product(f"linear_logits_{SUFFIX[self._dtype]}", x, torch.float32)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int32 or int64 -> [N, H]. An id that the weight does not have gives its first or last row."""
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids are {ids.dtype}: they must be int32 or int64")
        out = self._runtime.empty(len(ids), self._size, dtype=self._dtype)
        self._runtime.call(
            f"linear_rows_{SUFFIX[self._dtype]}",
            len(ids),
            out,
            ids.contiguous(),
            ids.element_size(),
            self._packed,
            self._size,
            self._num_outputs,
        )
        return out

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it keeps."""
        return (self._packed,) if self._bias is None else (self._packed, self._bias)

    def _product(self, kernel: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.dtype != self._dtype or x.ndim != 2 or x.shape[1] != self._size:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}: it must be {self._dtype} [T, {self._size}]")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = self._runtime.empty(len(x), self._num_outputs, dtype=dtype)
        self._runtime.call(kernel, len(x), out, x, x.stride(0), self._packed, self._bias, self._size, self._num_outputs)
        return out


def linear(
    runtime: Runtime, weight: torch.Tensor, bias: torch.Tensor | None
) -> DenseMatrix | torch_projection.OneDnnMatrix | torch_projection.RowMatrix:
    """weight [O, H], bias [O] or None -> the matrix that multiplies by them."""
    if weight.dtype not in SUFFIX:
        return torch_projection.linear(weight, bias)
    return DenseMatrix(runtime, weight, bias)


def embedding(runtime: Runtime, weight: torch.Tensor) -> DenseMatrix | torch_projection.RowMatrix:
    """weight [V, H] -> the matrix whose rows are read, and that a tied head multiplies by."""
    if weight.dtype not in SUFFIX:
        return torch_projection.embedding(weight)
    return DenseMatrix(runtime, weight, None)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[O, H] -> [panels, steps, outputs of a panel * inputs of a step], with zeros where O or H do not fill them."""
    per_step = _STEP_BYTES // weight.element_size()
    num_outputs, size = weight.shape
    if (missing := (-size % per_step, -num_outputs % _PANEL)) != (0, 0):
        weight = F.pad(weight, (0, missing[0], 0, missing[1]))
    panels = weight.contiguous().view(torch.int32).view(-1, _PANEL, weight.shape[1] // per_step)
    return panels.transpose(1, 2).contiguous().view(weight.dtype)
