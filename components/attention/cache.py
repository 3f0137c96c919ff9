"""How the backends write a layer's keys and values into the paged cache, and how they find them there."""

from __future__ import annotations

import torch

from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer, KVCaches


def write_kv(
    kernels: Kernels,
    layer: AttentionLayer,
    key: torch.Tensor,
    value: torch.Tensor,
    caches: KVCaches,
    slot_mapping: torch.Tensor,
) -> None:
    """key [T, num_kv_heads, D], value [T, num_kv_heads, Dv]; slot_mapping [T], -1 is not written."""
    key_cache, value_cache = caches.keys[layer.index], caches.values[layer.index]
    if (scales := caches.scales.get(layer.index)) is not None:
        kernels.quantize_and_cache(key, value, key_cache, value_cache, *scales, slot_mapping)
        return
    if layer.latent_dim is not None:  # values are the beginnings of keys: nothing is left to write of them
        value, value_cache = value[..., :0], value_cache[..., :0]
    kernels.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def read_kv(
    kernels: Kernels, layer: AttentionLayer, caches: KVCaches, block_table: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and block table for an op that knows no scales: the caches and `block_table`, of any shape, as they
    are; of a quantised layer small caches of `dtype` with the blocks that the table names, and a table for these."""
    key_cache, value_cache = caches.keys[layer.index], caches.values[layer.index]
    if (scales := caches.scales.get(layer.index)) is None:
        return key_cache, value_cache, block_table
    blocks = block_table.flatten()
    keys = kernels.dequantize_blocks(key_cache, scales[0], blocks, dtype)
    values = kernels.dequantize_blocks(value_cache, scales[1], blocks, dtype)
    own = torch.arange(len(blocks), dtype=block_table.dtype, device=blocks.device)
    return keys, values, own.view(block_table.shape)
