"""Host arrays to the device in one copy, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def upload(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """1-D integer arrays -> int64 tensors on the device, which share no memory with the arrays."""
    packed = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
    if device.type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return torch.split(packed, [len(array) for array in arrays])
