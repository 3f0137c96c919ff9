"""Memory that can be given back while the worker sleeps: the storage is freed, the tensor objects stay."""

from __future__ import annotations

import torch

from workerkit.framework.errors import StageError
from workerkit.framework.interfaces.device import MemoryPool


class StoragePool(MemoryPool):
    """Resizes tensor storages to nothing and back."""

    def __init__(self) -> None:
        self._tracked: dict[str, dict[int, torch.UntypedStorage]] = {}  # by address
        self._freed: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def track(self, tag: str, tensors: tuple[torch.Tensor, ...]) -> None:
        # What oneDNN keeps in a layout of its own has no storage to resize: it goes with its tensor.
        plain = (t for t in tensors if t.numel() and not t.is_mkldnn)
        by_address = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in plain}
        self._tracked.setdefault(tag, {}).update(by_address)

    def forget(self, tag: str) -> None:
        self._tracked.pop(tag, None)

    def discard(self, tag: str) -> int:
        if tag in self._freed:
            raise StageError(f"{tag} is already given back")
        self._freed[tag] = [(s, s.nbytes()) for s in self._tracked.get(tag, {}).values()]
        for storage, _ in self._freed[tag]:
            storage.resize_(0)
        return sum(size for _, size in self._freed[tag])

    def restore(self, tag: str) -> None:
        if tag not in self._freed:
            raise StageError(f"{tag} was not given back")
        for storage, size in self._freed.pop(tag):
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
