"""Multi-head attention of a decoder's layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.components.layers.mixer import LayerContext, Mixer
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.weights import Destination
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import ModelConfig


class Attention(Mixer):
    """Rotary attention whose query heads share key heads in groups, with norms of queries and keys by `qk_norm`.

    input_size: width of what it reads, hidden_size if None; what it returns is hidden_size wide in any case.
    """

    query_parts = 1  # numbers that q_proj makes for each of a query

    def __init__(
        self,
        config: ModelConfig,
        layer: AttentionLayer,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        *,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.kernels = kernels
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, key_size = layer.num_heads * head_dim, layer.num_kv_heads * head_dim
        self.split = [self.query_parts * query_size, key_size, key_size]
        qkv = {"q_proj": self.split[0], "k_proj": key_size, "v_proj": key_size}

        def norm() -> RMSNorm | None:
            eps, offset = config.rms_norm_eps, config.norm_offset
            return RMSNorm(head_dim, eps, kernels, dtype, device, offset) if config.qk_norm else None

        self.qkv_proj = MergedLinear(input_size or hidden, qkv, config.qkv_bias, kernels, dtype, device, "attention")
        self.q_norm = norm()
        self.k_norm = norm()
        self.o_proj = Linear("o_proj", query_size, hidden, config.o_bias, kernels, dtype, device, "attention")

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        query, key, value = self.project(x)
        result: torch.Tensor = self.o_proj(self.attend(query, key, value, context))
        return result

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: LayerContext
    ) -> torch.Tensor:
        """[T, heads * head_dim], or [T, heads, head_dim], each -> [T, num_heads * head_dim]: norms, rotation and
        attention."""
        num_tokens = len(query)
        query, key, value = (part.view(num_tokens, -1, self.layer.head_dim) for part in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.kernels.rotary_embedding(query, key, context.cos, context.sin)
        return context.attend(self.layer, query, key, value).reshape(num_tokens, -1)

    def projections(self) -> Sequence[MergedLinear]:
        """What makes queries, keys and values."""
        return (self.qkv_proj,)

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """[T, input_size] -> queries, keys and values, [T, heads * head_dim] each."""
        return torch.split(self.qkv_proj(x), self.split, dim=-1)

    def destinations(self) -> dict[str, Destination]:
        tensors: dict[str, Destination] = {}
        for linear in (*self.projections(), self.o_proj):
            tensors |= linear.destinations()
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                tensors[f"{name}.weight"] = norm.destination()
        return {f"self_attn.{name}": place for name, place in tensors.items()}
