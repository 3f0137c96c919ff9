"""The decoder that most text models are: pre-norms, attention, gated MLP; every difference a number in ModelConfig."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.rope import RotaryEmbedding
from workerkit.components.model.checkpoint import CheckpointNetwork, matrix
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import Attend, ModelConfig, ModelInputs, ModelOutput

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DRAFT = "mtp."  # a draft network that some checkpoints bring along


class DecoderLayer(torch.nn.Module):
    """One block. The residual stream is carried beside the branch that is still to be added to it.

    input_size: width of what attention reads, hidden_size if None; what it returns is hidden_size wide in any case.
    has_input_norm: False for the first layer of some drafts, which has no such norm: only `after_norm` serves it.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: AttentionLayer,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        *,
        input_size: int | None = None,
        has_input_norm: bool = True,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.kernels = kernels
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, key_size = layer.num_heads * head_dim, layer.num_kv_heads * head_dim
        self.split = (query_size, key_size, key_size)
        qkv = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
        gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.input_layernorm: RMSNorm | None = None
        if has_input_norm:
            self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps, kernels, dtype, device)
        self.qkv_proj = MergedLinear(input_size or hidden, qkv, config.qkv_bias, kernels, dtype, device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, kernels, dtype, device)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, kernels, dtype, device)
        self.o_proj = Linear("o_proj", query_size, hidden, config.o_bias, kernels, dtype, device)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps, kernels, dtype, device)
        self.gate_up_proj = MergedLinear(hidden, gate_up, config.mlp_bias, kernels, dtype, device)
        self.down_proj = Linear("down_proj", config.intermediate_size, hidden, config.mlp_bias, kernels, dtype, device)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(What the layer before adds to the stream, the stream), [T, H] each -> the same for the layer behind."""
        assert self.input_layernorm is not None, "without that norm, after_norm is to be called"
        x, residual = self.input_layernorm.add(x, residual)
        return self.after_norm(x, residual, cos, sin, attend)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(What attention reads [T, input_size], the stream [T, H]) -> as `forward`; works in place on the stream."""
        num_tokens = x.shape[0]
        query, key, value = (
            part.view(num_tokens, -1, self.layer.head_dim) for part in self.qkv_proj(x).split(self.split, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.kernels.rotary_embedding(query, key, cos, sin)
        attended = attend(self.layer, query, key, value)
        x, residual = self.post_attention_layernorm.add(self.o_proj(attended.reshape(num_tokens, -1)), residual)
        return self.down_proj(self.kernels.silu_and_mul(self.gate_up_proj(x))), residual

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Checkpoint name below `model.layers.N.` -> tensor to fill."""
        tensors: dict[str, torch.Tensor] = {"post_attention_layernorm.weight": self.post_attention_layernorm.weight}
        if self.input_layernorm is not None:
            tensors["input_layernorm.weight"] = self.input_layernorm.weight
        for room, linears in (
            ("self_attn", (self.qkv_proj, self.o_proj)),
            ("mlp", (self.gate_up_proj, self.down_proj)),
        ):
            for linear in linears:
                tensors |= {f"{room}.{name}": tensor for name, tensor in linear.checkpoint_tensors().items()}
        if self.q_norm is not None and self.k_norm is not None:
            tensors["self_attn.q_norm.weight"] = self.q_norm.weight
            tensors["self_attn.k_norm.weight"] = self.k_norm.weight
        return tensors


def make_attention_layers(config: ModelConfig, prefix: str) -> tuple[AttentionLayer, ...]:
    """One for each layer of the config, in order; names are `{prefix}layers.N.self_attn`."""
    return tuple(
        AttentionLayer(
            name=f"{prefix}layers.{index}.self_attn",
            index=index,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=window,
        )
        for index, window in enumerate(config.sliding_windows or (None,) * config.num_hidden_layers)
    )


class Decoder(CheckpointNetwork):
    """Llama, Qwen2, Qwen3, Mistral and whatever else ModelConfig's numbers can describe.

    Raises ModelError when the numbers contradict each other or ask for an activation that is not there.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        check_numbers(config)
        self.config = config
        self.kernels = kernels
        self._attention_layers = make_attention_layers(config, "model.")
        self.embed_tokens = matrix(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, layer, kernels, dtype, device) for layer in self._attention_layers
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels, dtype, device)
        self.rotary = RotaryEmbedding(config.rope, dtype, device)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else matrix(config.vocab_size, config.hidden_size, dtype, device)
        )
        self.head_product: Callable[[torch.Tensor], torch.Tensor]  # bound, like those of the layers, by load_weights

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._attention_layers

    @property
    def tap_points(self) -> tuple[str, ...]:
        return ("embed", *(f"layers.{index}" for index in range(self.config.num_hidden_layers)))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(input_ids, self.embed_tokens)

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        # Norms may work in place on the stream: what came from the caller, or goes out as a tap, is a copy.
        residual = self.embed(inputs.input_ids) if inputs.inputs_embeds is None else inputs.inputs_embeds.clone()
        taps: dict[str, torch.Tensor] = {}
        if "embed" in inputs.taps:
            taps["embed"] = residual.clone()
        cos, sin = self.rotary(inputs.positions, inputs.rope_lens)
        x: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, cos, sin, inputs.attend)
            if f"layers.{index}" in inputs.taps:
                taps[f"layers.{index}"] = x + residual
        hidden, _ = self.norm.add(x, residual)
        return ModelOutput(hidden=hidden, taps=taps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head_product(hidden).float()

    def required_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {EMBEDDING: self.embed_tokens, "model.norm.weight": self.norm.weight}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            tensors |= {f"model.layers.{index}.{name}": view for name, view in layer.checkpoint_tensors().items()}
        return tensors

    def optional_shapes(self) -> dict[str, Sequence[tuple[int, ...]]]:
        return {HEAD: [tuple(self.embed_tokens.shape)]}

    def canonical_name(self, name: str) -> str | None:
        return None if name.startswith(DRAFT) else super().canonical_name(name)

    def take(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        self._fill_head(found.get(HEAD))
        return []

    def bind(self) -> None:
        super().bind()
        self.head_product = self.kernels.linear(self.lm_head, None)

    def release(self) -> None:
        super().release()
        del self.head_product

    def _fill_head(self, head: torch.Tensor | None) -> None:
        """What the file holds decides; a tie flag that says otherwise is only worth a warning."""
        tied = self.config.tie_word_embeddings
        if head is None:
            if not tied:
                logger.warning("no %s in the checkpoint: tied to %s, though its config says untied", HEAD, EMBEDDING)
            self.lm_head = self.embed_tokens
            return
        head = head.to(self.embed_tokens)
        if tied and torch.equal(head, self.embed_tokens):
            self.lm_head = self.embed_tokens
            return
        if tied:
            logger.warning("%s differs from %s: used, though the config says tied", HEAD, EMBEDDING)
        if self.lm_head is self.embed_tokens:
            self.lm_head = torch.nn.Parameter(torch.empty_like(head), requires_grad=False)
        self.lm_head.copy_(head)


def check_numbers(config: ModelConfig) -> None:
    """Raise ModelError where the numbers contradict each other, or ask for what is not there."""
    problems = []
    if config.hidden_act != "silu":
        problems.append(f"hidden_act {config.hidden_act!r} is not supported, only 'silu'")
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            f"num_attention_heads {config.num_attention_heads} is no multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.sliding_windows and len(config.sliding_windows) != config.num_hidden_layers:
        problems.append(
            f"sliding_windows has {len(config.sliding_windows)} entries for {config.num_hidden_layers} layers"
        )
    if config.rope.rotary_dim > config.head_dim or config.rope.rotary_dim % 2:
        problems.append(f"rotary_dim {config.rope.rotary_dim} is odd or larger than head_dim {config.head_dim}")
    if problems:
        raise ModelError(f"{config.architecture}: " + "; ".join(problems))
