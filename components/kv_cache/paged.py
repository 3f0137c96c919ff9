"""The paged KV cache: groups of equal layers that share one pool of blocks, and work on whole blocks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import attrs
import torch

from workerkit.components.kv_cache.groups import Storage, groups_of, layers_by_spec, storages_of
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


def _halves(size: int) -> list[int]:
    """The size, its half, and so on, as long as they are whole."""
    return [size, *(_halves(size // 2) if size % 2 == 0 else ())]


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
        if not layers:
            raise CacheError("the model has no attention layer, so there is nothing to cache")
        self._check_quantization(layers)
        members = layers_by_spec(layers, self._cache, self._context.dtype)
        groups, kernel_block_size = self._groups(members, kernel_block_sizes)
        layout = KVLayout(num_blocks=0, groups=groups, kernel_block_size=kernel_block_size)
        block_bytes = sum(storage.page_bytes for storage in {storage for _, storage, _ in storages_of(layout)})
        state_blocks = -(-state_bytes // block_bytes)
        return attrs.evolve(
            layout,
            num_blocks=self._num_blocks(groups, block_bytes, available_bytes),
            block_bytes=block_bytes,
            state_blocks=state_blocks,
            state_interval=self._state_interval(state_blocks, max(layout.block_sizes)),
        )

    def _check_quantization(self, layers: Sequence[AttentionLayer]) -> None:
        quantization = self._cache.quantization
        known = [layer.index for layer in layers if not layer.is_draft]
        if unknown := sorted(quantization.numbers.keys() - set(known)):
            raise CacheError(
                f"cache.quantization.layers names {', '.join(map(str, unknown))}: the model's attention layers are "
                f"{known[0]} to {known[-1]}"
            )
        for layer in layers:
            if layer.latent_dim is not None and quantization.of(layer) != "none":
                raise UnsupportedError(
                    f"{layer.name}: cache.quantization is {quantization.of(layer)!r}, and latent attention keeps its "
                    "keys in model.dtype: right would be 'none'"
                )

    def _state_interval(self, state_blocks: int, largest: int) -> int:
        """`largest`: block size, of which those of all groups are parts."""
        wanted = self._cache.state_interval
        if wanted is None:
            return -(-state_blocks * self._cache.block_size // largest) * largest
        if wanted % largest:
            raise CacheError(f"cache.state_interval {wanted} is no multiple of the largest block size, {largest}")
        return wanted

    def _groups(
        self, members: Mapping[KVCacheSpec, Sequence[AttentionLayer]], accepted: Sequence[int]
    ) -> tuple[tuple[KVCacheGroup, ...], int]:
        """And the kernel block size: the preferred one, or where blocks differ in size the first that wastes little."""
        block_size = self._cache.block_size
        sizes = [size for size in accepted or _halves(block_size) if block_size % size == 0]
        if not sizes:
            raise CacheError(
                f"cache.block_size {block_size} is a multiple of none of the block sizes that the attention backend "
                f"accepts: {', '.join(map(str, accepted))}"
            )
        for size in sizes[:-1]:
            with contextlib.suppress(UnsupportedError):
                return groups_of(members, size), size
        return groups_of(members, sizes[-1]), sizes[-1]

    def _num_blocks(self, groups: Sequence[KVCacheGroup], block_bytes: int, available_bytes: int) -> int:
        shape = self._shape
        num_ahead = shape.num_speculative_tokens + 1 if shape.num_speculative_tokens else 0
        step_tokens = shape.max_num_batched_tokens + num_ahead
        per_request = sum(group.spec.count_blocks(shape.max_model_len, step_tokens) for group in groups)
        least, most = per_request + 1, per_request * shape.max_num_reqs + 1
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
                f"{source}: that makes {num_blocks} blocks of {block_bytes} bytes, but one request of "
                f"max_model_len = {shape.max_model_len} tokens needs {least} ({least * block_bytes} bytes), block 0 "
                f"included; raise {remedy} or lower model.max_model_len"
            )
        # Nobody could use more than `most`; a number of blocks that was asked for is kept all the same.
        return num_blocks if self._cache.num_blocks is not None else min(num_blocks, most)

    def allocate(self, layout: KVLayout, layers: Sequence[AttentionLayer]) -> KVCaches:
        group_of = {index: number for number, group in enumerate(layout.groups) for index in group.layers}
        if sorted(group_of) != list(range(len(layers))) or {layer.index for layer in layers} != group_of.keys():
            raise IntegrityError(f"the layout places layers {sorted(group_of)}, the model has {len(layers)}")
        types: dict[Storage, torch.dtype] = {}  # the largest of those that share it: they are aligned then
        for _, storage, dtype in storages_of(layout):
            types[storage] = max(types.get(storage, dtype), dtype, key=lambda kind: kind.itemsize)
        memory = {
            storage: torch.zeros(
                layout.num_blocks, storage.page_bytes // dtype.itemsize, dtype=dtype, device=self._context.device
            )
            for storage, dtype in sorted(types.items(), key=lambda entry: entry[0])
        }
        views: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        for index, storage, dtype in storages_of(layout):
            spec = layout.groups[group_of[index]].spec
            head = () if storage.holds.endswith("scales") else (spec.head_dim,)
            view = memory[storage].view(dtype).view(-1, layout.kernel_block_size, spec.num_kv_heads, *head)
            views[storage.holds][index] = view
            if spec.latent_dim is not None:
                views["values"][index] = view[..., : spec.latent_dim]
        keys, values = views["keys"], views["values"]
        return KVCaches(
            layout=layout,
            keys=tuple(keys[index] for index in range(len(keys))),
            values=tuple(values[index] for index in range(len(values))),
            group_of_layer=tuple(group_of[index] for index in range(len(group_of))),
            storages=tuple(memory.values()),
            scales={index: (scales, views["value scales"][index]) for index, scales in views["key scales"].items()},
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
