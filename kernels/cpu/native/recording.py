"""What native calls a function makes, and where their results may lie."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Argument = torch.Tensor | int | float | None

_ALIGNMENT = 64


class NotRecordable(RuntimeError):
    """Something computes that is no native kernel."""


class _Buffer:
    """A result: [rows, row_bytes], live from the call that writes it to the last one that uses it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.start = tensor.data_ptr()
        self.row_bytes = tensor[0].numel() * tensor.element_size()
        self.first = self.last = -1
        self.offset = -1


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes calls; refuses everything that torch itself would compute, but for views.

    Its few rows are enough to see which call reads and writes what; `plan` then finds room for any number of rows.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_rows = num_rows
        self.thread = threading.get_ident()
        self.kept: list[torch.Tensor] = []  # that calls were given from outside
        self._calls: list[tuple[Any, list[Any], bool]] = []
        self._time = -1  # counts the calls that wait for those before
        self._buffers: dict[int, _Buffer] = {}  # by address of the storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and saying so to dynamo means importing it: a second at every start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not is_view and func not in (torch.ops.aten.detach.default, torch.ops.aten.empty.memory_format):
            raise NotRecordable(f"{func} is not a native kernel")
        return func(*args, **(kwargs or {}))

    def empty(self, rows: int, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """A result that calls write to."""
        if rows != self.num_rows:
            raise NotRecordable(f"a result of {rows} rows in a recording of {self.num_rows}")
        tensor = torch.empty(rows, *size, dtype=dtype)
        self._buffers[tensor.untyped_storage().data_ptr()] = _Buffer(tensor)
        return tensor

    def note(self, kernel: Any, rows: int, args: Sequence[Any]) -> None:
        """One call."""
        if rows != self.num_rows:
            raise NotRecordable(f"{kernel.name} over {rows} rows in a recording of {self.num_rows}")
        # Kernels that keep to their row go on with it together: nobody waits for the other rows in between.
        waits = not (kernel.rowwise and self._calls and self._calls[-1][0].rowwise)
        self._time += waits
        for value in args:
            if isinstance(value, torch.Tensor):
                buffer = self._buffer_of(value)
                if buffer is None:
                    self.kept.append(value)
                else:
                    buffer.last = self._time
                    buffer.first = buffer.last if buffer.first < 0 else buffer.first
        self._calls.append((kernel, list(args), waits))

    def _buffer_of(self, tensor: torch.Tensor) -> _Buffer | None:
        return self._buffers.get(tensor.untyped_storage().data_ptr())

    def plan(self, result: Any, max_rows: int) -> tuple[torch.Tensor, list[tuple[Any, list[int], bool]], Any]:
        """(Memory for all results, (kernel, arguments with addresses in it, whether it waits for the calls before) of
        each call, `result` with tensors in it of max_rows rows)."""
        leaves, structure = pytree.tree_flatten(result)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and (buffer := self._buffer_of(leaf)) is not None:
                buffer.last = self._time + 1
        arena = torch.zeros(self._place(max_rows), dtype=torch.uint8)
        base = -(-arena.data_ptr() // _ALIGNMENT) * _ALIGNMENT

        def address(value: Any) -> int:
            buffer = self._buffer_of(value) if isinstance(value, torch.Tensor) else None
            if buffer is None:
                return as_integer(value)
            moved_to: int = base + buffer.offset + value.data_ptr() - buffer.start
            return moved_to

        def moved(leaf: Any) -> Any:
            buffer = self._buffer_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if buffer is None:
                return leaf
            start = base - arena.data_ptr() + buffer.offset
            rows = arena[start : start + max_rows * buffer.row_bytes].view(leaf.dtype)
            offset = rows.storage_offset() + leaf.storage_offset() - buffer.tensor.storage_offset()
            return rows.as_strided((max_rows, *leaf.shape[1:]), leaf.stride(), offset)

        calls = [(kernel, [self.num_rows, *map(address, args)], waits) for kernel, args, waits in self._calls]
        return arena, calls, pytree.tree_unflatten([moved(leaf) for leaf in leaves], structure)

    def _place(self, max_rows: int) -> int:
        """Give each buffer the lowest place that no buffer has which lives at the same time; returns bytes in all."""
        placed: list[_Buffer] = []
        total: int = 0
        for buffer in self._buffers.values():
            if buffer.first < 0:
                continue
            size = -(-buffer.row_bytes * max_rows // _ALIGNMENT) * _ALIGNMENT
            offset = 0
            for other in sorted(placed, key=lambda other: other.offset):
                if other.last < buffer.first or buffer.last < other.first:
                    continue
                if other.offset - offset >= size:
                    break
                offset = max(offset, other.offset + -(-other.row_bytes * max_rows // _ALIGNMENT) * _ALIGNMENT)
            buffer.offset = offset
            placed.append(buffer)
            total = max(total, offset + size)
        return total + _ALIGNMENT


def as_integer(value: Argument) -> int:
    """An argument as 64 bits: a tensor's address, a number, the bits of a double; None is 0."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        bits: int = struct.unpack("q", struct.pack("d", value))[0]
        return bits
    return 0 if value is None else int(value)
