"""The decoder that most text models are: pre-norms, attention, gated MLP; every difference a number in ModelConfig."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from workerkit.components.layers.embedding import Embedding
from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.components.layers.mlp import ACTIVATIONS, GatedMLP
from workerkit.components.layers.moe import SparseMLP
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.rope import RotaryEmbedding
from workerkit.components.layers.weights import Destination
from workerkit.components.model.checkpoint import CheckpointNetwork
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import Attend, ModelConfig, ModelInputs, ModelOutput

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
DRAFT = "mtp."  # a draft network that some checkpoints bring along


class DecoderLayer(torch.nn.Module):
    """One block. The residual stream is carried beside the branch that is still to be added to it.

    input_size: width of what attention reads, hidden_size if None; what it returns is hidden_size wide in any case.
    has_input_norm: False for the first layer of some drafts, which has no such norm: only `after_norm` serves it.
    mlp: what comes behind attention, a gated MLP if None.
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
        mlp: GatedMLP | SparseMLP | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.kernels = kernels
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, key_size = layer.num_heads * head_dim, layer.num_kv_heads * head_dim
        self.split = [query_size, key_size, key_size]
        qkv = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, kernels, dtype, device, config.norm_offset)

        self.input_layernorm = norm(hidden) if has_input_norm else None
        self.qkv_proj = MergedLinear(input_size or hidden, qkv, config.qkv_bias, kernels, dtype, device, "attention")
        self.q_norm = norm(head_dim) if config.qk_norm else None
        self.k_norm = norm(head_dim) if config.qk_norm else None
        self.o_proj = Linear("o_proj", query_size, hidden, config.o_bias, kernels, dtype, device, "attention")
        self.post_attention_layernorm = norm(hidden)
        self.pre_feedforward_layernorm = norm(hidden) if config.sandwich_norms else None
        self.post_feedforward_layernorm = norm(hidden) if config.sandwich_norms else None
        inner, bias, act = config.intermediate_size, config.mlp_bias, config.hidden_act
        self.mlp = mlp or GatedMLP(hidden, inner, bias, kernels, dtype, device, act)

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
        query, key, value = (part.view(num_tokens, -1, self.layer.head_dim) for part in self.project(x))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.kernels.rotary_embedding(query, key, cos, sin)
        attended = self.o_proj(attend(self.layer, query, key, value).reshape(num_tokens, -1))
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x, residual = self.post_attention_layernorm.add(attended, residual)
            return self.mlp(x), residual
        x, residual = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(attended), residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual

    def projections(self) -> Sequence[MergedLinear]:
        """What makes queries, keys and values."""
        return (self.qkv_proj,)

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """[T, input_size] -> queries, keys and values, [T, heads * head_dim] each."""
        return torch.split(self.qkv_proj(x), self.split, dim=-1)

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below `model.layers.N.` -> where the tensor goes."""
        tensors = {"post_attention_layernorm.weight": self.post_attention_layernorm.destination()}
        for linear in (*self.projections(), self.o_proj):
            tensors |= {f"self_attn.{name}": place for name, place in linear.destinations().items()}
        tensors |= self.mlp.destinations()
        optional = {
            "input_layernorm": self.input_layernorm,
            "self_attn.q_norm": self.q_norm,
            "self_attn.k_norm": self.k_norm,
            "pre_feedforward_layernorm": self.pre_feedforward_layernorm,
            "post_feedforward_layernorm": self.post_feedforward_layernorm,
        }
        return tensors | {f"{name}.weight": norm.destination() for name, norm in optional.items() if norm is not None}


def make_attention_layers(config: ModelConfig, prefix: str) -> tuple[AttentionLayer, ...]:
    """One for each layer of the config, in order; names are `{prefix}layers.N.self_attn`."""
    return tuple(
        AttentionLayer(
            name=f"{prefix}layers.{index}.self_attn",
            index=index,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale or config.head_dim**-0.5,
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
        kind = "head" if config.tie_word_embeddings else "embedding"
        self.embed_tokens = Embedding(EMBEDDING, config.vocab_size, config.hidden_size, kernels, dtype, device, kind)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, layer, kernels, dtype, device, mlp=self.make_mlp(layer.index, dtype, device))
            for layer in self._attention_layers
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels, dtype, device, config.norm_offset)
        self.rotary = RotaryEmbedding(config.rope, kernels, dtype, device)
        self.local_rotary: RotaryEmbedding | None = None
        if config.local_rope is not None:
            self.local_rotary = RotaryEmbedding(config.local_rope, kernels, dtype, device)
        self.lm_head: Linear = self.embed_tokens  # until a checkpoint has another one

    def make_mlp(self, index: int, dtype: torch.dtype, device: torch.device) -> GatedMLP | SparseMLP | None:
        """What layer `index` has behind its attention; None: a gated MLP by the config's numbers."""
        return None

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._attention_layers

    @property
    def tap_points(self) -> tuple[str, ...]:
        return ("embed", *(f"layers.{index}" for index in range(self.config.num_hidden_layers)))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = self.embed_tokens.rows(input_ids)
        return rows if self.config.embedding_scale == 1.0 else rows * self._embedding_scale(rows)

    def _embedding_scale(self, rows: torch.Tensor) -> torch.Tensor:
        """Rounded to the type of activations, as in Hugging Face."""
        return torch.tensor(self.config.embedding_scale, dtype=rows.dtype, device=rows.device)

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        # Norms may work in place on the stream: what came from the caller, or goes out as a tap, is a copy.
        residual = self.embed(inputs.input_ids) if inputs.inputs_embeds is None else inputs.inputs_embeds.clone()
        taps: dict[str, torch.Tensor] = {}
        if "embed" in inputs.taps:
            taps["embed"] = self.embed(inputs.input_ids) if inputs.inputs_embeds is None else inputs.inputs_embeds
        turns = self.rotary(inputs.positions, inputs.rope_lens)
        local = turns if self.local_rotary is None else self.local_rotary(inputs.positions, inputs.rope_lens)
        x: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            cos, sin = turns if self._attention_layers[index].sliding_window is None else local
            x, residual = layer(x, residual, cos, sin, inputs.attend)
            if f"layers.{index}" in inputs.taps:
                taps[f"layers.{index}"] = self.kernels.add(x, residual)
        hidden, _ = self.norm.add(x, residual)
        return ModelOutput(hidden=hidden, taps=taps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(hidden)

    def required_tensors(self) -> dict[str, Destination]:
        tensors = {**self.embed_tokens.destinations(), "model.norm.weight": self.norm.destination()}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            tensors |= {f"model.layers.{index}.{name}": place for name, place in layer.destinations().items()}
        return tensors

    def optional_tensors(self) -> dict[str, Destination]:
        config, kernels = self.config, self.kernels
        dtype, device = self.embed_tokens.dtype, self.embed_tokens.device
        if config.tie_word_embeddings:  # compared with the embedding, row by row
            self.lm_head = Embedding(HEAD, config.vocab_size, config.hidden_size, kernels, dtype, device, "head")
        else:
            self.lm_head = Linear(HEAD, config.hidden_size, config.vocab_size, False, kernels, dtype, device, "head")
        return self.lm_head.destinations()

    def canonical_name(self, name: str) -> str | None:
        return None if name.startswith(DRAFT) else super().canonical_name(name)

    def take(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        """What the file holds decides on the head; a tie flag that says otherwise is only worth a warning."""
        tied, embedding = self.config.tie_word_embeddings, self.embed_tokens
        if self.lm_head.matrix is None:
            if not tied:
                logger.warning(
                    "no %s.weight in the checkpoint: tied to %s.weight, though its config says untied", HEAD, EMBEDDING
                )
            self.lm_head = embedding
        elif isinstance(self.lm_head, Embedding):
            if _equal_rows(self.lm_head, embedding):
                self.lm_head = embedding
            else:
                logger.warning("%s.weight differs from %s.weight: used, though the config says tied", HEAD, EMBEDDING)
        return []


def _equal_rows(one: Embedding, other: Embedding) -> bool:
    """In parts, so that little memory is needed."""
    ids = torch.arange(sum(one.outputs.values()), device=one.device)
    return all(torch.equal(one.rows(part), other.rows(part)) for part in torch.split(ids, 4096))


def check_numbers(config: ModelConfig) -> None:
    """Raise ModelError where the numbers contradict each other, or ask for what is not there."""
    problems = []
    if config.hidden_act not in ACTIVATIONS:
        problems.append(f"hidden_act {config.hidden_act!r} is not supported; {', '.join(ACTIVATIONS)} are")
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
