"""Lists of numbers by slot, of any length: what the stages keep of allowed ids, biases, stop ids and bad words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class SlotTable:
    """[R, width] on the device, as wide as the longest list so far, and the lists' lengths on the host.

    Behind a list stands `pad`; with None its own first entry, which a gather or scatter may meet twice without harm.
    There is no limit to a list's length but memory: 4 or 8 bytes times R times the longest list that was ever there.
    """

    def __init__(self, num_slots: int, device: torch.device, dtype: torch.dtype, pad: float | None = None) -> None:
        self._pad = pad
        self._table = torch.zeros(num_slots, 0, dtype=dtype, device=device)
        self.lengths = np.zeros(num_slots, np.int64)

    def write(self, slot: int, values: Sequence[float]) -> None:
        """The slot's list, in place of the one before."""
        self.lengths[slot] = len(values)
        self._widen(len(values))
        self._table[slot] = (values[0] if values else 0) if self._pad is None else self._pad
        self._table[slot, : len(values)] = to_device(values, self._table.dtype, self._table.device)

    def _widen(self, needed: int) -> None:
        rows, width = self._table.shape
        if needed <= width:
            return
        more = max(needed, 2 * width) - width
        if self._pad is None and width:
            tail = self._table[:, :1].expand(rows, more)
        else:
            tail = self._table.new_full((rows, more), self._pad or 0)
        self._table = torch.cat((self._table, tail), dim=1)

    def gather(self, slots: torch.Tensor, host_slots: np.ndarray) -> torch.Tensor:
        """Slots [N], on the device and on the host -> [N, W], W being the length of their longest list."""
        width = int(self.lengths[host_slots].max(initial=0))
        return self._table[:, :width].index_select(0, slots)


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host numbers as a tensor on the device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
