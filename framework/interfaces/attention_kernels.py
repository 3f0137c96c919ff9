"""Signatures of the ops that write the paged cache and attend to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class ReshapeAndCache(Protocol):
    """Writes keys and values into the paged cache."""

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...


class QuantizeAndCache(Protocol):
    """Likewise, rounded to 8 bits: a token's head is its codes times a scale, its largest element over 127."""

    """key, value [T, Nk, D]; caches [blocks, b, Nk, D] int8; scales [blocks, b, Nk] float32; slot_mapping [T], -1 is
    not written."""

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        key_scales: torch.Tensor,
        value_scales: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...


class DequantizeBlocks(Protocol):
    """cache [blocks, b, Nk, D] int8, scales [blocks, b, Nk], block_ids [N] -> [N, b, Nk, D], codes times scales."""

    def __call__(
        self, cache: torch.Tensor, scales: torch.Tensor, block_ids: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor: ...


class PagedAttention(Protocol):
    """Attention over the paged cache, the general form. Raises NotImplementedError for heads or types it has not."""

    """Any mix of rows. query [T, Nq, D]; caches [blocks, b, Nk, D]; block_table [R, W]; query_start_loc [R + 1];
    seq_lens [R], the queries of a row being the last positions of its sequence. Tokens of no row yield zeros."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...


class DecodeAttention(Protocol):
    """Attention of rows with one query."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...


class PrefillAttention(Protocol):
    """Attention of one request with many queries."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_ids: torch.Tensor,
        seq_len: int,
        scale: float,
        sliding_window: int | None,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...
