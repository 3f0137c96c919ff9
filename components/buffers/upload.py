"""Host arrays to the device in one copy, without waiting for it, and cheap arithmetic where the device is the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """1-D integer arrays -> int64 tensors on the device, which share no memory with the arrays."""
    if device.type == "cpu":
        return tuple([torch.from_numpy(array.astype(np.int64)) for array in arrays])
    packed = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
    return torch.split(packed.pin_memory().to(device, non_blocking=True), [len(array) for array in arrays])


def to_device(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """An array as it is, without waiting for it; on a CPU the tensor shares its memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def operand(tensor: torch.Tensor) -> Any:
    """A tensor on a CPU as a numpy view of its memory, any other as it is.

    For arithmetic on a few numbers that is written so that it means the same for both: a call of numpy costs a fifth
    of torch's, and a step has dozens of them. Kinds must not be mixed in an expression.
    """
    return tensor.numpy() if tensor.is_cpu else tensor


def int32(values: Any) -> Any:
    """An operand narrowed."""
    return values.astype(np.int32) if isinstance(values, np.ndarray) else values.int()


def maximum(first: Any, second: Any) -> Any:
    """The larger of each two."""
    return np.maximum(first, second) if isinstance(first, np.ndarray) else torch.maximum(first, second)


def send(device: torch.device, *arrays: np.ndarray) -> tuple[Any, ...]:
    """`upload` for operands that are read once: on a CPU the arrays themselves."""
    return arrays if device.type == "cpu" else upload(device, *arrays)
