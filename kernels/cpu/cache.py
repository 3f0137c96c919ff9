"""Writing new keys and values into the paged cache; a CPU can look at the slots, so it filters only when it must."""

from __future__ import annotations

import torch


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """key, value [T, Nk, D]; caches [blocks, b, Nk, D], contiguous; slot_mapping [T], -1 is not written."""
    if slot_mapping.numel() == 0:
        return
    slots = slot_mapping.long()
    if int(slots.min()) < 0:
        written = (slots >= 0).nonzero().flatten()
        slots, key, value = slots[written], key[written], value[written]
    key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))
