"""Products with packed 4- and 8-bit weights. What they compute for a row has the same bits whatever the other rows,
their number and the number of threads are.

Activations are float32 or bfloat16; for float16, which no kernel is written for, there is the reference's matrix.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from workerkit.kernels.cpu.native.runtime import SUFFIX, Runtime
from workerkit.kernels.reference import quantized as reference

_GROUP = 32  # inputs; of q4 and q8, those that share a scale
_PANEL = 32  # output columns that are packed together
_GROUP_STRUCT = 40  # bytes of QuantizedGroup
_ROW_EXTRA = 8  # bytes after the codes of a row that quantize_rows has made


class _Matrix:
    """Packed weights [O, H] as quantized.h describes them, the only copy, and the bias [O] or None."""

    def __init__(
        self,
        runtime: Runtime,
        codes: torch.Tensor,
        scales: torch.Tensor,
        minima: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        size: int,
        offset: int,
        flip: int = 0,
    ) -> None:
        """codes [O, bytes], whole groups of 32; scales [O, groups] or [O], minima like scales. Packing flips the bits
        `flip` of each byte; then a weight is (byte or nibble - offset) * scale + minimum."""
        self._runtime, self._dtype, self._size, self._offset = runtime, dtype, size, offset
        self._num_outputs = len(codes)
        self._num_groups = -(-size // _GROUP)
        self._vectors = codes.shape[1] // (4 * self._num_groups)  # of 64 bytes, that 16 columns of a group take
        self._has_minima = minima is not None
        self._bias = None if bias is None else bias.float().contiguous()
        self._channel_scales, self._scale_bytes = None, 0
        if scales.ndim == 1:
            self._channel_scales = F.pad(scales.float(), (0, -len(scales) % _PANEL))
        else:  # GGUF's are fp16: that is exact, and less to read
            self._scale_bytes = 2 if all(_fits_half(t) for t in (scales, minima) if t is not None) else 4
        panels = -(-self._num_outputs // _PANEL)
        group_bytes = _PANEL * (4 * self._vectors + self._scale_bytes * (1 + self._has_minima))
        self._packed = torch.empty(panels, self._num_groups, group_bytes, dtype=torch.uint8)
        runtime.call(
            "pack_panels",
            panels,
            self._packed,
            codes.contiguous(),
            self._vectors,
            flip,
            self._num_outputs,
            self._num_groups,
            self._scale_bytes,
            scales.float().contiguous(),
            None if minima is None else minima.float().contiguous(),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it keeps."""
        return tuple(t for t in (self._packed, self._channel_scales, self._bias) if t is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H], with any stride between rows -> [T, O] in x's dtype."""
        return self._product(self._checked(x), x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, O]."""
        return self._product(self._checked(x), torch.float32)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int32 or int64 -> [N, H] in the activations' dtype. An id that the weight does not have gives NaN."""
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids are {ids.dtype}: they must be int32 or int64")
        out = self._runtime.empty(len(ids), self._size, dtype=self._dtype)
        self._runtime.call(
            f"unpack_rows_{SUFFIX[self._dtype]}",
            len(ids),
            out,
            ids.contiguous(),
            ids.element_size(),
            self._packed,
            self._vectors,
            self._offset,
            self._num_outputs,
            self._size,
            self._scale_bytes,
            self._channel_scales,
            self._has_minima,
        )
        return out

    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in SUFFIX or x.ndim != 2 or x.shape[1] != self._size:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}: it must be float32 or bfloat16 [T, {self._size}]")
        return x if x.stride(1) == 1 else x.contiguous()


class GroupMatrix(_Matrix):
    """4- or 8-bit codes with a scale for each group of 32 inputs (GGUF's Q4_0, Q4_1, Q8_0).

    Activations are rounded to int8 in the same groups (scale max|x| / 127), and products within a group are summed as
    integers. So |x - x'| <= max|x| / 254 for an element of a group, and the norm of x - x' is at most
    sqrt(32) / 254 = 2.3 % of the norm of x, whatever x is; a typical one is 0.6 % away. With weights that prefer no
    direction the result is off by as much, relative to the norm of the result.
    """

    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes = self._runtime.empty(len(x), self._num_groups * _GROUP_STRUCT, dtype=torch.uint8)
        offset = 0 if self._has_minima else self._offset
        self._runtime.call(f"quantize_groups_{SUFFIX[x.dtype]}", len(x), codes, x, x.stride(0), self._size, offset)
        out = self._runtime.empty(len(x), self._num_outputs, dtype=dtype)
        kind = "q8" if self._vectors == 8 else "q4_minima" if self._has_minima else "q4"
        self._runtime.call(
            f"product_{kind}_{SUFFIX[dtype]}",
            len(x),
            out,
            codes,
            self._packed,
            self._num_outputs,
            self._num_groups,
            self._scale_bytes,
            self._bias,
        )
        return out


class ChannelMatrix(_Matrix):
    """int8 codes with a scale for each output; activations stay as they are. bfloat16 holds the codes exactly."""

    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = self._runtime.empty(len(x), self._num_outputs, dtype=dtype)
        self._runtime.call(
            f"product_w8_{SUFFIX[x.dtype]}_{SUFFIX[dtype]}",
            len(x),
            out,
            x,
            x.stride(0),
            self._packed,
            self._num_outputs,
            self._size,
            self._channel_scales,
            self._bias,
        )
        return out


class DynamicMatrix(_Matrix):
    """int8 codes with a scale for each output; activations are rounded to int8 row by row (scale max|x| / 127). The
    sum of products is an exact integer, multiplied by the product of both scales in float32."""

    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        padded = self._num_groups * _GROUP
        codes = self._runtime.empty(len(x), padded + _ROW_EXTRA, dtype=torch.uint8)
        self._runtime.call(f"quantize_rows_{SUFFIX[x.dtype]}", len(x), codes, x, x.stride(0), self._size, padded)
        out = self._runtime.empty(len(x), self._num_outputs, dtype=dtype)
        self._runtime.call(
            f"product_w8a8_{SUFFIX[dtype]}",
            len(x),
            out,
            codes,
            self._packed,
            self._num_outputs,
            padded,
            self._channel_scales,
            self._bias,
        )
        return out


def linear_q4(
    runtime: Runtime,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> GroupMatrix | reference.QuantizedMatrix:
    """Weights code * scale + minimum. codes uint8 [O, H / 2], 16 bytes for a group of 32: byte j has element j in its
    low and j + 16 in its high nibble; scales, minima [O, H / 32]; bias [O] or None. Minima that are -8 * scale (Q4_0)
    are not kept. ValueError if H is no multiple of 32."""
    size = 2 * codes.shape[1]
    _check_groups("linear_q4", size, scales, minima)
    if dtype not in SUFFIX:
        return reference.linear_q4(codes, scales, minima, bias, dtype)
    if torch.equal(minima, scales * -8):
        return GroupMatrix(runtime, codes, scales, None, bias, dtype, size=size, offset=8)
    return GroupMatrix(runtime, codes, scales, minima, bias, dtype, size=size, offset=0)


def linear_q8(
    runtime: Runtime, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> GroupMatrix | reference.QuantizedMatrix:
    """Weights code * scale. codes int8 [O, H]; scales [O, H / 32]; bias [O] or None. ValueError if H is no multiple of
    32."""
    _check_groups("linear_q8", codes.shape[1], scales)
    if dtype not in SUFFIX:
        return reference.linear_q8(codes, scales, bias, dtype)
    return GroupMatrix(runtime, codes, scales, None, bias, dtype, size=codes.shape[1], offset=128, flip=128)


def linear_w8(
    runtime: Runtime, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> ChannelMatrix | reference.QuantizedMatrix:
    """Weights code * scale, activations as they are. codes int8 [O, H]; scales [O]; bias [O] or None."""
    if dtype not in SUFFIX:
        return reference.linear_w8(codes, scales, bias, dtype)
    return ChannelMatrix(runtime, _padded(codes), scales, None, bias, dtype, size=codes.shape[1], offset=128, flip=128)


def linear_w8a8(
    runtime: Runtime, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> DynamicMatrix | reference.QuantizedMatrix:
    """Weights code * scale, activations rounded at run time. codes int8 [O, H]; scales [O]; bias [O] or None."""
    if dtype not in SUFFIX:
        return reference.linear_w8a8(codes, scales, bias, dtype)
    return DynamicMatrix(runtime, _padded(codes), scales, None, bias, dtype, size=codes.shape[1], offset=128, flip=128)


def _check_groups(op: str, size: int, *tensors: torch.Tensor) -> None:
    if size % _GROUP:
        raise ValueError(f"{op}: the weight has {size} inputs, which is no multiple of {_GROUP}, the size of a group")
    for tensor in tensors:
        if tensor.shape[1:] != (size // _GROUP,):
            raise ValueError(f"{op}: {list(tensor.shape)} scales or minima for {size // _GROUP} groups in a row")


def _fits_half(values: torch.Tensor) -> bool:
    return torch.equal(values.half().float(), values.float())


def _padded(codes: torch.Tensor) -> torch.Tensor:
    return F.pad(codes, (0, -codes.shape[1] % _GROUP))
