"""Writing new keys and values into the paged cache, and reading those that it keeps in 8 bits."""

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
        flat = cache.flatten(0, 1)
        fill = torch.where(written[first, None, None], new[first].to(cache.dtype), flat[:1])
        flat.index_copy_(0, slots, torch.where(written[:, None, None], new.to(cache.dtype), fill))


def quantize_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """key, value [T, Nk, D]; caches [blocks, b, Nk, D] int8; scales [blocks, b, Nk] float32; slot_mapping [T], -1 is
    not written."""
    (keys, scales_of_keys), (values, scales_of_values) = _quantize(key), _quantize(value)
    reshape_and_cache(keys, values, key_cache, value_cache, slot_mapping)
    reshape_and_cache(scales_of_keys, scales_of_values, key_scales[..., None], value_scales[..., None], slot_mapping)


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, Nk, D] -> codes [T, Nk, D] int8 in -127..127, scales [T, Nk, 1] float32, 0 where all is 0."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / scales.where(scales > 0, 1.0)).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def dequantize_blocks(
    cache: torch.Tensor, scales: torch.Tensor, block_ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """cache [blocks, b, Nk, D] int8, scales [blocks, b, Nk], block_ids [N] -> [N, b, Nk, D], codes times scales."""
    return (cache[block_ids.long()] * scales[block_ids.long(), ..., None]).to(dtype)
