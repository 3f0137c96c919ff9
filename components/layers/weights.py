"""Where the tensors of a checkpoint go, and how they are read into plain or quantised form, little at a time."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from workerkit.framework.interfaces.lora import AdaptedLinear
from workerkit.framework.interfaces.model import QuantizedTensor

Weight = torch.Tensor | QuantizedTensor

_ROWS = 1024  # that are dequantised at a time


@attrs.frozen
class Destination:
    """A place in a network that one tensor of a checkpoint fills, however that is kept there."""

    shape: tuple[int, ...]
    fill: Callable[[Weight], object]  # given a weight of that shape, of any dtype
    is_floating_point: bool = True
    linear: AdaptedLinear | None = None  # the layer whose projection this is the weight of
    projection: str = ""  # its name there


class KernelWeights(torch.nn.Module, abc.ABC):
    """Weights that the kernels keep in a form of their own."""

    @property
    @abc.abstractmethod
    def kept(self) -> tuple[torch.Tensor, ...]:
        """All of it; () before it is loaded."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give it up; loading makes it anew, elsewhere in memory."""


def destination(tensor: torch.Tensor) -> Destination:
    """Of a tensor that is kept as it is: a norm's weight, a buffer."""
    return Destination(tuple(tensor.shape), lambda weight: copy([weight], tensor), tensor.is_floating_point())


def copy(pieces: Sequence[Weight], target: torch.Tensor) -> torch.Tensor:
    """Write the pieces' rows, one after another, into `target`, and return it."""
    start = 0
    for values in _rows(pieces):
        target[start : start + len(values)].copy_(values)
        start += len(values)
    return target


def to_int8(pieces: Sequence[Weight], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of [O, H] -> codes int8 [O, H], scales [O] float32: to the nearest of scale * -127 … 127, the scale being
    a row's largest magnitude / 127. Rows of zeros have scale 1."""
    rows = sum(piece.shape[0] for piece in pieces)
    codes = torch.empty(rows, pieces[0].shape[1], dtype=torch.int8, device=device)
    scales = torch.empty(rows, dtype=torch.float32, device=device)
    start = 0
    for values in _rows(pieces):
        end = start + len(values)
        scale = values.float().abs().amax(dim=1) / 127
        scales[start:end] = torch.where(scale > 0, scale, 1.0)
        codes[start:end] = (values / scales[start:end, None].to(values.device)).round()
        start = end
    return codes, scales


def packed(pieces: Sequence[Weight], device: torch.device) -> QuantizedTensor | None:
    """The pieces' rows, one after another, as they are; None if they are not all packed in the same way."""
    parts = [piece for piece in pieces if isinstance(piece, QuantizedTensor)]
    if len(parts) < len(pieces) or len({part.codes.dtype for part in parts}) > 1:
        return None
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantizedTensor(
        codes=_joined([part.codes for part in parts], device),
        scales=_joined([part.scales for part in parts], device),
        minima=_joined(minima, device) if minima else None,
    )


def _joined(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device)


def _rows(pieces: Sequence[Weight]) -> Iterator[torch.Tensor]:
    """Some rows at a time, so that no large weight is there in float32 as a whole."""
    for piece in pieces:
        if isinstance(piece, QuantizedTensor):
            yield from (part.dequantize() for part in piece.split(_ROWS))
        else:
            yield from torch.split(piece, _ROWS)
