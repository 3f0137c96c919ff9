"""Writing new keys and values into the paged cache."""

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
    written = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[written].long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new[written].to(cache.dtype))
