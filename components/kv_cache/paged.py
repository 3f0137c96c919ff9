"""The paged KV cache: groups of equal layers that share one pool of blocks, and work on whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workerkit.framework.errors import CacheError, IntegrityError, UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import (
    AttentionLayer,
    KVCacheGroup,
    KVCacheManager,
    KVCaches,
    KVCacheSpec,
    KVLayout,
)
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sections import CacheSection


def _distinct(storages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({storage.data_ptr(): storage for storage in storages}.values())


def _check_ids(block_ids: Sequence[int], num_blocks: int) -> None:
    wrong = [block_id for block_id in block_ids if not 0 < block_id < num_blocks]
    if wrong:
        raise CacheError(f"block ids {wrong} are not blocks of a request: right is 1 to {num_blocks - 1}")


class AscendKVBlockZeroer:
    """Zeroes whole manager blocks, so that nothing of a block's former owner can be read."""

    def __init__(self, storages: Sequence[torch.Tensor]) -> None:
        self._storages = _distinct(storages)  # [num_blocks, …] each

    def zero_block_ids(self, block_ids: Sequence[int]) -> None:
        """Raises CacheError, before anything is written, for an id outside the pool."""
        if not block_ids:
            return
        _check_ids(block_ids, len(self._storages[0]))
        index = torch.tensor(block_ids, device=self._storages[0].device)
        for storage in self._storages:
            storage.index_fill_(0, index, 0)


def copy_kv_cache_blocks_inplace(storages: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy manager blocks (source, destination) in storages [num_blocks, …].

    All sources are read before any destination is written, so pairs may form cycles. Raises CacheError, before
    anything is written, for an id outside the pool or a destination named twice.
    """
    if not pairs:
        return
    sources, destinations = (list(ids) for ids in zip(*pairs, strict=True))
    _check_ids(sources + destinations, len(storages[0]))
    if len(set(destinations)) < len(destinations):
        twice = sorted({block_id for block_id in destinations if destinations.count(block_id) > 1})
        raise CacheError(f"blocks {twice} are the destination of more than one copy")
    read, written = torch.tensor([sources, destinations], device=storages[0].device)
    for storage in _distinct(storages):
        storage.index_copy_(0, written, storage.index_select(0, read))


class PagedKVCache(KVCacheManager):
    """The j-th layers of all groups share storage j: a block id belongs to one group at a time."""

    def __init__(self, cache: CacheSection, shape: WorkerShape, context: DeviceContext) -> None:
        self._cache = cache
        self._shape = shape
        self._context = context

    def plan(
        self,
        layers: Sequence[AttentionLayer],
        kernel_block_sizes: Sequence[int],
        available_bytes: int,
        state_bytes: int = 0,
    ) -> KVLayout:
        groups = self._groups(layers)
        kernel_block_size = self._kernel_block_size(kernel_block_sizes)
        block_bytes = groups[0].spec.page_bytes * max(len(group.layers) for group in groups)
        state_blocks = -(-state_bytes // block_bytes)
        return KVLayout(
            num_blocks=self._num_blocks(len(groups), block_bytes, available_bytes),
            groups=groups,
            kernel_block_size=kernel_block_size,
            state_blocks=state_blocks,
            state_interval=self._cache.state_interval or state_blocks * self._cache.block_size,
        )

    def _groups(self, layers: Sequence[AttentionLayer]) -> tuple[KVCacheGroup, ...]:
        members: dict[KVCacheSpec, list[int]] = {}
        for layer in layers:
            spec = KVCacheSpec(
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                dtype=str(self._context.dtype).removeprefix("torch."),
                block_size=self._cache.block_size,
                element_bytes=self._context.dtype.itemsize,
                sliding_window=layer.sliding_window,
            )
            members.setdefault(spec, []).append(layer.index)
        if not members:
            raise CacheError("the model has no attention layer, so there is nothing to cache")
        if len({spec.page_bytes for spec in members}) > 1:
            names = {layer.index: layer.name for layer in layers}
            sizes = ", ".join(f"{names[indices[0]]}: {spec.page_bytes} bytes" for spec, indices in members.items())
            raise UnsupportedError(f"layers whose blocks differ in size cannot share the KV cache ({sizes})")
        return tuple(KVCacheGroup(spec=spec, layers=tuple(indices)) for spec, indices in members.items())

    def _kernel_block_size(self, accepted: Sequence[int]) -> int:
        block_size = self._cache.block_size
        for size in accepted or (block_size,):
            if block_size % size == 0:
                return size
        raise CacheError(
            f"cache.block_size {block_size} is a multiple of none of the block sizes that the attention backend "
            f"accepts: {', '.join(map(str, accepted))}"
        )

    def _num_blocks(self, num_groups: int, block_bytes: int, available_bytes: int) -> int:
        per_request = num_groups * -(-self._shape.max_model_len // self._cache.block_size)
        least, most = per_request + 1, per_request * self._shape.max_num_reqs + 1
        if self._cache.num_blocks is not None:
            num_blocks, source, remedy = self._cache.num_blocks, "cache.num_blocks", "cache.num_blocks"
        elif self._cache.memory_bytes is not None:
            num_blocks, remedy = self._cache.memory_bytes // block_bytes, "cache.memory_bytes"
            source = f"cache.memory_bytes = {self._cache.memory_bytes}"
        else:
            num_blocks, remedy = max(available_bytes, 0) // block_bytes, "cache.memory_fraction"
            source = f"the {available_bytes} bytes that are available"
        if num_blocks < least:
            raise CacheError(
                f"{source}: that makes {num_blocks} blocks of {self._cache.block_size} tokens and {block_bytes} bytes, "
                f"but one request of max_model_len = {self._shape.max_model_len} tokens needs {least} "
                f"({least * block_bytes} bytes), block 0 included; raise {remedy} or lower model.max_model_len"
            )
        # Nobody could use more than `most`; a number of blocks that was asked for is kept all the same.
        return num_blocks if self._cache.num_blocks is not None else min(num_blocks, most)

    def allocate(self, layout: KVLayout, layers: Sequence[AttentionLayer]) -> KVCaches:
        place = {
            index: (group, storage)
            for group, members in enumerate(layout.groups)
            for storage, index in enumerate(members.layers)
        }
        if sorted(place) != list(range(len(layers))) or {layer.index for layer in layers} != place.keys():
            raise IntegrityError(f"the layout places layers {sorted(place)}, the model has {len(layers)}")
        spec = layout.groups[0].spec
        size = (layout.num_blocks, spec.block_size * spec.num_kv_heads * spec.head_dim)
        num_storages = max(len(group.layers) for group in layout.groups)
        keys, values = (
            [
                torch.zeros(size, dtype=getattr(torch, spec.dtype), device=self._context.device)
                for _ in range(num_storages)
            ]
            for _ in range(2)
        )

        def view(storage: torch.Tensor, group: int) -> torch.Tensor:
            member = layout.groups[group].spec
            return storage.view(-1, layout.kernel_block_size, member.num_kv_heads, member.head_dim)

        places = [place[index] for index in range(len(place))]
        return KVCaches(
            layout=layout,
            keys=tuple(view(keys[storage], group) for group, storage in places),
            values=tuple(view(values[storage], group) for group, storage in places),
            group_of_layer=tuple(group for group, _ in places),
            storages=(*keys, *values),
        )

    def zero_blocks(self, caches: KVCaches, block_ids: Sequence[int]) -> None:
        AscendKVBlockZeroer(caches.storages).zero_block_ids(block_ids)

    def copy_blocks(self, caches: KVCaches, pairs: Sequence[tuple[int, int]]) -> None:
        copy_kv_cache_blocks_inplace(caches.storages, pairs)

    def write_state(self, caches: KVCaches, block_ids: Sequence[int], state: torch.Tensor) -> None:
        index = torch.tensor(block_ids, device=state.device)
        start = 0
        for page in _pages(caches):
            part = state[start : start + len(index) * page.shape[1]]
            padded = torch.nn.functional.pad(part, (0, len(index) * page.shape[1] - len(part)))
            page.index_copy_(0, index, padded.view(len(index), -1))
            start += len(part)

    def read_state(self, caches: KVCaches, block_ids: Sequence[int], num_bytes: int) -> torch.Tensor:
        pages = _pages(caches)
        index = torch.tensor(block_ids, device=pages[0].device)
        return torch.cat([page.index_select(0, index).flatten() for page in pages])[:num_bytes]


def _pages(caches: KVCaches) -> list[torch.Tensor]:
    """[num_blocks, page] uint8 of each storage."""
    return [storage.flatten(1).view(torch.uint8) for storage in _distinct(caches.storages)]
