"""Which layers share a block table, how large the blocks of each group are, and which storages hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.kv_cache import SCALE_BYTES, AttentionLayer, KVCacheGroup, KVCacheSpec, KVLayout
from workerkit.framework.interfaces.sections import CacheSection

_MANY_GROUPS = 8  # each costs every step a gather of its table and slots


def layers_by_spec(
    layers: Sequence[AttentionLayer], cache: CacheSection, dtype: torch.dtype
) -> dict[KVCacheSpec, list[AttentionLayer]]:
    """What each layer keeps, in blocks of `cache.block_size` tokens; layers in order."""
    members: dict[KVCacheSpec, list[AttentionLayer]] = {}
    for layer in layers:
        kept = torch.int8 if cache.quantization.of(layer) == "int8" else dtype
        spec = KVCacheSpec(
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=str(kept).removeprefix("torch."),
            block_size=cache.block_size,
            element_bytes=kept.itemsize,
            sliding_window=layer.sliding_window,
            latent_dim=layer.latent_dim,
        )
        members.setdefault(spec, []).append(layer)
    return members


def groups_of(
    members: Mapping[KVCacheSpec, Sequence[AttentionLayer]], kernel_block_size: int
) -> tuple[KVCacheGroup, ...]:
    """Groups of at most `group_size` layers, whose blocks are equally far apart in bytes.

    Of layers that keep less per token a block holds more tokens: two, four, … times as many, while it is no larger than
    the largest. Raises UnsupportedError when blocks of a common size would be more than half empty.
    """
    block_size = next(iter(members)).block_size
    largest = block_size * max(spec.token_bytes for spec in members)
    # A multiple of everyone's kernel blocks, so that kernel blocks have numbers within a storage.
    unit = math.lcm(*(kernel_block_size * spec.token_bytes for spec in members))
    page = -(-largest // unit) * unit
    size = group_size([len(layers) for layers in members.values()])
    groups = []
    for spec, layers in members.items():
        fitting = largest // (block_size * spec.token_bytes)
        larger = attrs.evolve(spec, block_size=block_size << (fitting.bit_length() - 1))
        if 2 * larger.block_size * spec.token_bytes < page:
            sizes = ", ".join(
                f"{layers[0].name}: {block_size * spec.token_bytes} bytes" for spec, layers in members.items()
            )
            raise UnsupportedError(
                f"layers whose blocks differ in size cannot share the KV cache, whose blocks would have to be {page} "
                f"bytes large and more than half empty ({sizes})"
            )
        groups += [
            KVCacheGroup(
                spec=larger,
                layers=tuple(layer.index for layer in layers[start : start + size]),
                stride=page // (kernel_block_size * spec.token_bytes),
            )
            for start in range(0, len(layers), size)
        ]
    return tuple(groups)


def group_size(counts: Sequence[int]) -> int:
    """How many layers groups have at most, given how many layers there are of each kind.

    A group of fewer layers leaves storages unused, and every group has a table to be kept: the sum of both is least, as
    long as tables are few.
    """

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    def cost(size: int) -> tuple[int, int]:
        return num_groups(size) * size - sum(counts) + num_groups(size), -size

    few = [size for size in counts if num_groups(size) <= _MANY_GROUPS]
    return min(few or [max(counts)], key=cost)


@attrs.frozen(order=True)
class Storage:
    """One piece of memory: a page for each block. Layers of several groups share it."""

    holds: str  # "keys", "values", "key scales" or "value scales"
    position: int  # of the layer within its group
    page_bytes: int


def storages_of(layout: KVLayout) -> Iterator[tuple[int, Storage, torch.dtype]]:
    """For each layer: its index, and each storage that holds something of it, and as which type."""
    for group, stride in zip(layout.groups, layout.strides, strict=True):
        spec, tokens = group.spec, stride * layout.kernel_block_size
        for position, index in enumerate(group.layers, group.first_storage):
            for name in ("key", "value") if spec.latent_dim is None else ("key",):
                yield index, Storage(f"{name}s", position, tokens * spec.token_bytes), getattr(torch, spec.dtype)
                if spec.is_quantized:
                    scales = Storage(f"{name} scales", position, tokens * spec.num_kv_heads * SCALE_BYTES)
                    yield index, scales, torch.float32
