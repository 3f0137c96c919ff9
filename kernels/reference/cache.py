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
    if not len(slot_mapping):
        return
    # Shapes must not depend on the slots, or a device could not capture it: a token without a slot writes what the
    # first token with one writes, and where there is none, what is there already.
    written = slot_mapping >= 0
    first = written.int().argmax(0, keepdim=True)
    slots = torch.where(written, slot_mapping, slot_mapping[first]).clamp(min=0).long()
    for new, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        fill = torch.where(written[first, None, None], new[first].to(cache.dtype), flat[:1])
        flat.index_copy_(0, slots, torch.where(written[:, None, None], new.to(cache.dtype), fill))
