"""Named tensor functions. A library offers some; `Kernels` binds one implementation to each name at assembly."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.device import DeviceContext

OPS = (
    "linear",
    "rms_norm",
    "fused_add_rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "reshape_and_cache",
    "paged_attention",
    "decode_attention",
    "prefill_attention",
    "apply_top_k_top_p",
    "uniform_from_seed",
    "sample_from_probs",
)


class KernelLibrary(abc.ABC):
    """Offers implementations of some of OPS."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What configs and `bindings` call it."""

    @property
    @abc.abstractmethod
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Name in OPS -> function with the signature of the same name in `kernels/reference`."""


class Kernels(abc.ABC):
    """Every op of OPS, each from the first library of the configured order that has it."""

    linear: Linear
    rms_norm: RmsNorm
    fused_add_rms_norm: FusedAddRmsNorm
    rotary_embedding: RotaryEmbedding
    silu_and_mul: SiluAndMul
    reshape_and_cache: ReshapeAndCache
    paged_attention: PagedAttention
    decode_attention: DecodeAttention
    prefill_attention: PrefillAttention
    apply_top_k_top_p: ApplyTopKTopP
    uniform_from_seed: UniformFromSeed
    sample_from_probs: SampleFromProbs

    @property
    @abc.abstractmethod
    def bindings(self) -> Mapping[str, str]:
        """Op -> name of the library that it comes from."""

    @abc.abstractmethod
    def prepare(self, context: DeviceContext) -> None:
        """Load native code for the device, before weights are read."""


class Linear(Protocol):
    """weight [O, H], bias [O] or None -> a function [T, H] -> [T, O] that multiplies by them.

    It may hold the weight in a form of its own: made after the weight is in place, and anew when that changes.
    """

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]: ...


class RmsNorm(Protocol):
    """Root mean square norm."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class FusedAddRmsNorm(Protocol):
    """Residual add and norm in one."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class RotaryEmbedding(Protocol):
    """Rotary position embedding, neox style."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class SiluAndMul(Protocol):
    """Gated activation."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


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


class PagedAttention(Protocol):
    """Attention over the paged cache, the general form."""

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
    ) -> torch.Tensor: ...


class ApplyTopKTopP(Protocol):
    """Truncates distributions."""

    """float32 [N, V], k [N] int (0 or V: off), p [N] float32 (1: off). Top-k keeps every logit tied with the k-th;
    top-p then works on the renormalised rest and keeps the smallest set whose mass reaches p, at least one token;
    tokens tied with the last one kept are kept. Others become -inf."""

    def __call__(self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor: ...


class UniformFromSeed(Protocol):
    """Counter-based randomness."""

    """seeds, positions [N] int64 -> [N] float64 in (0, 1): a hash, so the same whatever else is in the batch.
    `stream` separates independent uses (0 sampling)."""

    def __call__(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor: ...


class SampleFromProbs(Protocol):
    """One draw a row."""

    """Inverse CDF. probs [N, V] float32 (rows need not be normalised), uniform [N] -> [N] int64; never a token of
    probability 0."""

    def __call__(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor: ...
