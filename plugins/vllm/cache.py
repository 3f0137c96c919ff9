"""The KV cache, as vLLM cuts it and as our parts do: its specs of layers, its groups, and the blocks of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.kv_cache import (
    NULL_BLOCK_ID,
    AttentionLayer,
    KVCacheGroup,
    KVCacheSpec,
    KVLayout,
)
from workerkit.framework.interfaces.request import CachedRequest, NewRequest


def specs_of_layers(layout: KVLayout, layers: Sequence[AttentionLayer]) -> dict[str, Any]:
    """vLLM's KVCacheSpec of each layer, by name. Raises UnsupportedError for layers that vLLM has no spec for."""
    group_of = _groups(layout)
    specs = [group.spec for group in layout.groups]
    page = None
    if not _share_a_table(specs):
        # Pages of one size: vLLM lets groups share them, and leaves block sizes as they are.
        page = max(_page_bytes(group, stride * layout.kernel_block_size) for group, stride in _strides(layout))
    return {layer.name: _vllm_spec(layer, group_of[layer.index].spec, page) for layer in layers}


def layout_of(config: Any, planned: KVLayout, layers: Sequence[AttentionLayer]) -> tuple[KVLayout, tuple[int, ...]]:
    """A vLLM KVCacheConfig as our layout, and for each group of it the number of vLLM's group whose table it has.

    `planned` says what the layers need, in whatever groups. Recurrent states live in slots: nothing of them is kept in
    blocks. Raises UnsupportedError for blocks that do not fit.
    """
    index_of, group_of = {layer.name: layer.index for layer in layers}, _groups(planned)
    groups: list[KVCacheGroup] = []
    tables: list[int] = []
    for number, theirs in enumerate(config.kv_cache_groups):
        members: dict[KVCacheGroup, list[int]] = {}  # of one of ours each
        for index in map(index_of.__getitem__, theirs.layer_names):
            kind = attrs.evolve(group_of[index], layers=())
            members.setdefault(kind, []).append(index)
        if len(members) > 1 and len(config.kv_cache_groups) > 1:
            raise UnsupportedError(f"vLLM mixes layers of different shapes in group {number} of several")
        size, first = theirs.kv_cache_spec.block_size, 0
        for kind, indices in members.items():
            page_tokens = (kind.stride or 0) * planned.kernel_block_size or kind.spec.block_size
            if size % planned.kernel_block_size or (len(members) == 1 and size > page_tokens):
                raise UnsupportedError(
                    f"vLLM gives layer {theirs.layer_names[0]} blocks of {size} tokens: right would be a multiple of "
                    f"{planned.kernel_block_size} up to {page_tokens}"
                )
            groups.append(
                KVCacheGroup(
                    spec=attrs.evolve(kind.spec, block_size=size),
                    layers=tuple(indices),
                    # Layers that have one table use the same blocks at the same time, each in a storage of its own.
                    stride=kind.stride if len(members) == 1 else None,
                    first_storage=first,
                )
            )
            tables.append(number)
            first += len(indices) if len(members) > 1 else 0
    layout = attrs.evolve(planned, num_blocks=config.num_blocks, groups=tuple(groups), state_blocks=0, state_interval=0)
    return layout, tuple(tables)


class Blocks:
    """The blocks of a step, as our groups have them."""

    def __init__(self, layout: KVLayout | None = None, tables: Sequence[int] = ()) -> None:
        self._layout = layout
        self._tables = tables

    def of_groups(self, block_ids: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
        """Of our groups, given those of vLLM's; () for None."""
        if block_ids is None:
            return ()
        return tuple(tuple(block_ids[table]) for table in self._tables or range(len(block_ids)))

    def to_zero(self, new: Iterable[NewRequest], cached: Iterable[CachedRequest]) -> tuple[int, ...]:
        """Those that a step hands out, where what a former owner left is no number to the next. vLLM has no such
        groups, so it does not say."""
        if self._layout is None or not self._layout.needs_zeroing:
            return ()
        fresh = [block for request in cached for ids in request.new_block_ids for block in ids]
        for request in new:
            for ids, size in zip(request.block_ids, self._layout.block_sizes, strict=True):
                fresh += ids[-(-request.num_computed_tokens // size) :]
        return tuple(dict.fromkeys(block for block in fresh if block != NULL_BLOCK_ID))


def _groups(layout: KVLayout) -> dict[int, KVCacheGroup]:
    return {index: group for group in layout.groups for index in group.layers}


def _strides(layout: KVLayout) -> Iterable[tuple[KVCacheGroup, int]]:
    return zip(layout.groups, layout.strides, strict=True)


def _share_a_table(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether vLLM makes one group of such layers, whatever they keep."""
    return len({spec.block_size for spec in specs}) == 1 and all(spec.sliding_window is None for spec in specs)


def _page_bytes(group: KVCacheGroup, tokens: int) -> int:
    """Bytes from one block to the next in all storages of a layer, `tokens` apart."""
    return attrs.evolve(group.spec, block_size=tokens).page_bytes


def _vllm_spec(layer: AttentionLayer, spec: KVCacheSpec, page: int | None) -> Any:
    """`page`: bytes of a block, where groups share them; None: as many as it needs."""
    if spec.latent_dim is not None and spec.sliding_window is not None:
        raise UnsupportedError(f"{layer.name}: vLLM has no spec for latent attention with a sliding window")
    kept = 2 if spec.latent_dim is None else 1
    page = page or spec.page_bytes
    common = {
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_dim,
        "dtype": getattr(torch, spec.dtype),
        # Scales are not in vLLM's count.
        "page_size_padded": None if page == kept * spec.block_size * spec.token_bytes else page,
    }
    if spec.latent_dim is not None:
        return MLAAttentionSpec(**common)
    if spec.sliding_window is None:
        return FullAttentionSpec(**common)
    return SlidingWindowSpec(**common, sliding_window=spec.sliding_window)
