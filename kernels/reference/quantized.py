"""Products with quantised weights: dequantised and multiplied in float32; 8-bit activations in exact integers."""

from __future__ import annotations

import torch

_CHUNK = 8192  # rows of a weight that are dequantised at a time


class QuantizedMatrix:
    """Codes [O, groups, per group] and what makes weights of them: w = code * scale + minimum, [O, groups] each."""

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        minima: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.minima = minima
        self.bias = bias
        self.dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, O], in x's dtype."""
        return self.logits(x).to(x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, O]."""
        wide = x.float()
        parts = torch.split(torch.arange(len(self.codes), device=x.device), _CHUNK)
        product = torch.cat([wide @ self._dequantised(part).T for part in parts], dim=1)
        return product if self.bias is None else product + self.bias.float()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] integer ids -> [N, H] in the activations' dtype."""
        return self._dequantised(ids.long()).to(self.dtype)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it keeps."""
        return tuple(t for t in (self.codes, self.scales, self.minima, self.bias) if t is not None)

    def _values(self, ids: torch.Tensor) -> torch.Tensor:
        """[N, groups, elements] float32."""
        return self.codes[ids].float()

    def _dequantised(self, ids: torch.Tensor) -> torch.Tensor:
        weight = self._values(ids) * self.scales[ids][..., None]
        if self.minima is not None:
            weight = weight + self.minima[ids][..., None]
        return weight.flatten(1)


class PackedMatrix(QuantizedMatrix):
    """Two codes a byte, 16 elements apart."""

    def _values(self, ids: torch.Tensor) -> torch.Tensor:
        pairs = self.codes[ids]
        return torch.cat((pairs & 15, pairs >> 4), dim=-1).float()


class W8A8Matrix(QuantizedMatrix):
    """Activations are rounded to 8 bits as well, with a scale for each token."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, O]; sums of integers are exact in float64."""
        wide = x.float()
        largest = wide.abs().amax(dim=1, keepdim=True)
        steps = torch.full_like(largest, 127)  # a tensor: number / tensor is rounded twice
        inverse = torch.where(largest > 2.0**-120, steps / largest, 0.0)  # of a smaller one it would overflow
        sums = (wide * inverse).round().double() @ self.codes[:, 0].double().T
        product = sums.float() * (largest / 127 * self.scales[:, 0])
        return product if self.bias is None else product + self.bias.float()


def linear_q4(
    codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> QuantizedMatrix:
    """codes uint8 [O, H / 2]: byte j of a group's 16 has element j in its low half, j + 16 in its high half; scales,
    minima [O, H / 32] float32 -> the matrix of code * scale + minimum."""
    return PackedMatrix(codes.view(*scales.shape, 16), scales, minima, bias, dtype)


def linear_q8(
    codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> QuantizedMatrix:
    """codes int8 [O, H], scales [O, H / 32] float32 -> the matrix of code * scale."""
    return QuantizedMatrix(codes.view(*scales.shape, 32), scales, None, bias, dtype)


def linear_w8(
    codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> QuantizedMatrix:
    """codes int8 [O, H], scales [O] float32 -> the matrix of code * scale."""
    return QuantizedMatrix(codes[:, None], scales[:, None], None, bias, dtype)


def linear_w8a8(
    codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> QuantizedMatrix:
    """Like linear_w8; products are of activations rounded to 8 bits, to a scale of max |x| / 127 for each token."""
    return W8A8Matrix(codes[:, None], scales[:, None], None, bias, dtype)
