"""Multi-head latent attention (DeepSeek-V2, 2024), with the projections of keys and values absorbed.

What is kept of a token is one key for all heads: its latent c, normed, and a rotated part of its own beside it. A
head's key would be W_k c and its value W_v c; since q · W_k c = W_k^T q · c, queries are taken to the latent space
instead, and what attention returns of the latents is taken to values behind it.
"""

from __future__ import annotations

import torch

from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.components.layers.mixer import LayerContext, Mixer
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.weights import Destination, KernelWeights, Weight, copy
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.matrix_kernels import HeadMatrices
from workerkit.framework.interfaces.model import ModelConfig

_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


class LatentProjection(KernelWeights):
    """`kv_b_proj`, cut into what takes queries to the latent space and what takes latents to values.

    It is kept in the network's dtype, however other matrices are kept: its halves are no rows of one product.
    """

    def __init__(
        self, config: ModelConfig, num_heads: int, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        assert config.mla is not None
        self.mla = config.mla
        self.num_heads = num_heads
        self.kernels = kernels
        self.dtype, self.device = dtype, device
        self.keys: HeadMatrices | None = None
        self.values: HeadMatrices | None = None

    def to_latent(self, query: torch.Tensor) -> torch.Tensor:
        """[T, N, qk_nope_head_dim] -> [T, N, kv_lora_rank]."""
        assert self.keys is not None, "load_weights comes first"
        return self.keys(query)

    def to_values(self, latent: torch.Tensor) -> torch.Tensor:
        """[T, N, kv_lora_rank] -> [T, N, v_head_dim]."""
        assert self.values is not None, "load_weights comes first"
        return self.values(latent)

    def destinations(self) -> dict[str, Destination]:
        """`kv_b_proj.weight` -> where it goes: of each head the rows of its key, then those of its value."""
        mla = self.mla
        rows = self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return {"kv_b_proj.weight": Destination((rows, mla.kv_lora_rank), self._fill)}

    def _fill(self, weight: Weight) -> None:
        mla = self.mla
        whole = copy([weight], torch.empty(weight.shape, dtype=self.dtype, device=self.device))
        heads = whole.view(self.num_heads, -1, mla.kv_lora_rank)
        keys, values = torch.split(heads, [mla.qk_nope_head_dim, mla.v_head_dim], dim=1)
        # Memory of their own, so that the whole can go.
        self.keys = self.kernels.linear_heads(keys.transpose(1, 2).contiguous())
        self.values = self.kernels.linear_heads(values.contiguous())

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            tensor for matrices in (self.keys, self.values) if matrices is not None for tensor in matrices.tensors
        )

    def release(self) -> None:
        self.keys = self.values = None


class LatentAttention(Mixer):
    """Queries come from a latent of their own with `q_lora_rank`, from the stream without it."""

    def __init__(
        self,
        config: ModelConfig,
        layer: AttentionLayer,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert config.mla is not None, "the loader reads it for this architecture"
        self.layer = layer
        self.kernels = kernels
        self.mla = mla = config.mla
        hidden, heads, rank = config.hidden_size, layer.num_heads, mla.q_lora_rank
        query_size = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        query = {"q_proj": query_size} if rank is None else {"q_a_proj": rank}
        outputs = query | {"kv_a_proj_with_mqa": layer.head_dim}
        self.split = [*query.values(), mla.kv_lora_rank, mla.qk_rope_head_dim]
        self.a_proj = MergedLinear(hidden, outputs, False, kernels, dtype, device, "attention")
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if rank is not None:
            self.q_a_layernorm = RMSNorm(rank, _EPS, kernels, dtype, device)
            self.q_b_proj = Linear("q_b_proj", rank, query_size, False, kernels, dtype, device, "attention")
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, _EPS, kernels, dtype, device)
        self.kv_b_proj = LatentProjection(config, heads, kernels, dtype, device)
        self.o_proj = Linear("o_proj", heads * mla.v_head_dim, hidden, False, kernels, dtype, device, "attention")

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        num_tokens, mla = len(x), self.mla
        query, latent, rotated_key = torch.split(self.a_proj(x), self.split, dim=-1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            query = self.q_b_proj(self.q_a_layernorm(query.contiguous()))
        latent = self.kv_a_layernorm(latent.contiguous())
        heads = query.view(num_tokens, self.layer.num_heads, -1)
        plain, rotated = torch.split(heads, [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        rotated, rotated_key = self.kernels.rotary_embedding(
            self._in_halves(rotated), self._in_halves(rotated_key[:, None]), context.cos, context.sin
        )
        query = torch.cat((self.kv_b_proj.to_latent(plain), rotated), dim=-1)
        key = torch.cat((latent[:, None], rotated_key), dim=-1)
        attended = context.attend(self.layer, query, key, key[..., : mla.kv_lora_rank])
        result: torch.Tensor = self.o_proj(self.kv_b_proj.to_values(attended).reshape(num_tokens, -1))
        return result

    def _in_halves(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N, D]: dimensions that turn together lie side by side with `rope_interleave`, half a head apart for the
        kernels. Queries and keys are changed alike, so their products stay as they are."""
        if not self.mla.rope_interleave:
            return x.contiguous()
        return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)

    def destinations(self) -> dict[str, Destination]:
        tensors = self.a_proj.destinations() | self.kv_b_proj.destinations() | self.o_proj.destinations()
        tensors["kv_a_layernorm.weight"] = self.kv_a_layernorm.destination()
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            tensors |= self.q_b_proj.destinations() | {"q_a_layernorm.weight": self.q_a_layernorm.destination()}
        return {f"self_attn.{name}": place for name, place in tensors.items()}
