"""Attention over the paged cache and what prepares it: rotary embedding and cache writes.

float32 and bfloat16, caches and activations alike; of other types attention is refused, the rest done by plain torch.
A token's result has the same bits in any batch, chunk, block size and number of threads. In bfloat16 softmax and sums
are float32, and weights are rounded to bfloat16, then normalised by the sum of the rounded ones: an error of at most
2^-8 of the mean distance between the values and the result, before that is rounded itself. On random inputs the two
roundings together are less than 1.1 times the second alone.
"""

from __future__ import annotations

import numpy as np
import torch

from workerkit.kernels.cpu import cache as torch_cache
from workerkit.kernels.cpu import rope as torch_rope
from workerkit.kernels.cpu.native.runtime import SUFFIX, Runtime

_SPLIT = 512  # keys, as in attention_plan.h; threads may share a row that has more
_WORKSPACE = 1 << 17  # float32 that hold what they find; a row for which there is no room is not shared


def paged_attention(
    runtime: Runtime,
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
) -> torch.Tensor:
    """Any mix of rows. query [T, Nq, D]; caches [blocks, b, Nk, D]; block_table [R, W], query_start_loc [R + 1] and
    seq_lens [R] int32, the queries of a row being the last positions of its sequence. Tokens of no row yield zeros.

    Raises NotImplementedError for sinks, for a soft cap, for values of another size than keys, and for a head_dim that
    is no multiple of 16 up to 256.
    """
    num_tokens, num_heads, head_dim = query.shape
    if sinks is not None or softcap is not None or value_cache.shape[-1] != head_dim:
        raise NotImplementedError("native attention has no sinks, no soft cap, and no values of another size than keys")
    if head_dim % 16 or head_dim > 256:
        raise NotImplementedError(f"head_dim {head_dim}: native attention has multiples of 16 up to 256")
    _check_cache("query", query, key_cache, value_cache)
    for name, tensor in {"block_table": block_table, "query_start_loc": query_start_loc, "seq_lens": seq_lens}.items():
        if tensor.dtype != torch.int32 or (tensor.numel() > 0 and tensor.stride(-1) != 1):
            raise TypeError(f"{name} is {tensor.dtype} with strides {tensor.stride()}, not contiguous int32")
    num_rows, width = block_table.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} key heads")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window {sliding_window}: a query sees itself at least")
    if not _heads_adjoin(query):
        query = query.contiguous()
    shared = width * block_size > _SPLIT
    # zeros that the system gives pages for when they are written to; torch's own would be noted as a computation
    workspace = torch.from_numpy(np.zeros(_WORKSPACE + 16, np.float32)) if shared else None
    out = runtime.empty(*query.shape, dtype=query.dtype)
    runtime.call(
        f"paged_attention_{SUFFIX[query.dtype]}",
        num_tokens,
        out,
        query,
        query.stride(0),
        key_cache,
        value_cache,
        key_cache.stride(0),
        block_table,
        block_table.stride(0),
        query_start_loc,
        seq_lens,
        num_rows,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        float(scale),
        sliding_window,
        workspace,
        _WORKSPACE if shared else 0,
    )
    return out


def reshape_and_cache(
    runtime: Runtime,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """key, value [T, Nk, D]; caches [blocks, b, Nk, D]; slot_mapping [T] int32 or int64, -1 is not written."""
    if key.dtype not in SUFFIX or key_cache.dtype != key.dtype or value.shape != key.shape:
        torch_cache.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        return
    _check_cache("key", key, key_cache, value_cache)
    if slot_mapping.dtype not in (torch.int32, torch.int64) or not slot_mapping.is_contiguous():
        raise TypeError(
            f"slot_mapping is {slot_mapping.dtype} with strides {slot_mapping.stride()}, not contiguous int"
        )
    key, value = (new if _heads_adjoin(new) else new.contiguous() for new in (key, value))
    runtime.call(
        f"reshape_and_cache_{SUFFIX[key.dtype]}",
        len(key),
        key,
        key.stride(0),
        value,
        value.stride(0),
        key_cache,
        value_cache,
        key_cache.stride(0),
        key_cache.shape[1],
        key.shape[1] * key.shape[2],
        slot_mapping,
        slot_mapping.element_size(),
    )


def rotary_embedding(
    runtime: Runtime, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, Nq, D], key [T, Nk, D], cos and sin [T, rotary_dim // 2]; rotates pairs (i, i + rotary_dim / 2).

    In place: returns `query` and `key`.
    """
    if query.dtype not in SUFFIX:
        return torch_rope.rotary_embedding(query, key, cos, sin)
    _check_dtype(query=query, key=key, cos=cos, sin=sin)
    for name, x in (("query", query), ("key", key)):
        if not _heads_adjoin(x):
            raise ValueError(f"{name} has strides {x.stride()}: the heads of a token must lie side by side")
    runtime.call(
        f"rotary_embedding_{SUFFIX[query.dtype]}",
        len(query),
        query,
        query.stride(0),
        query.shape[1],
        key,
        key.stride(0),
        key.shape[1],
        query.shape[2],
        cos,
        cos.stride(0),
        sin,
        sin.stride(0),
        cos.shape[1],
    )
    return query, key


def _heads_adjoin(x: torch.Tensor) -> bool:
    """x [T, N, D]."""
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


def _check_dtype(**tensors: torch.Tensor) -> None:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= SUFFIX.keys():
        found = ", ".join(f"{name} is {tensor.dtype}" for name, tensor in tensors.items())
        raise NotImplementedError(f"{found}: native attention has float32 and bfloat16, the same for all")


def _check_cache(name: str, x: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    _check_dtype(**{name: x}, key_cache=key_cache, value_cache=value_cache)
    for which, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        _, _, heads, dim = cache.shape
        if cache.stride()[1:] != (heads * dim, dim, 1) or cache.stride() != key_cache.stride():
            raise ValueError(f"{which} has strides {cache.stride()}: a block's keys, or values, must lie side by side")
