"""The decoder that most text models are: pre-norms, attention, gated MLP; every difference a number in ModelConfig."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from workerkit.components.layers.attention import Attention
from workerkit.components.layers.embedding import Embedding
from workerkit.components.layers.linear import Linear
from workerkit.components.layers.mixer import LayerContext, Mixer, RecurrentMixer
from workerkit.components.layers.mlp import ACTIVATIONS, GatedMLP
from workerkit.components.layers.moe import SparseMLP
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.rope import RotaryEmbedding
from workerkit.components.layers.weights import Destination
from workerkit.components.model.checkpoint import CheckpointNetwork
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import ModelConfig, ModelInputs, ModelOutput
from workerkit.framework.interfaces.recurrent import RecurrentLayer

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
DRAFT = "mtp."  # a draft network that some checkpoints bring along


class DecoderLayer(torch.nn.Module):
    """One block. The residual stream is carried beside the branch that is still to be added to it.

    mixer: what mixes the tokens. mlp: what comes behind it, a gated MLP if None.
    has_input_norm: False for the first layer of some drafts, which has no such norm: only `after_norm` serves it.
    """

    def __init__(
        self,
        config: ModelConfig,
        mixer: Mixer,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_input_norm: bool = True,
        mlp: GatedMLP | SparseMLP | None = None,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(hidden, config.rms_norm_eps, kernels, dtype, device, config.norm_offset)

        self.mixer = mixer
        self.input_layernorm = norm() if has_input_norm else None
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if config.sandwich_norms else None
        self.post_feedforward_layernorm = norm() if config.sandwich_norms else None
        inner, bias, act = config.intermediate_size, config.mlp_bias, config.hidden_act
        self.mlp = mlp or GatedMLP(hidden, inner, bias, kernels, dtype, device, act)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(What the layer before adds to the stream, the stream), [T, H] each -> the same for the layer behind."""
        assert self.input_layernorm is not None, "without that norm, after_norm is to be called"
        x, residual = self.input_layernorm.add(x, residual)
        return self.after_norm(x, residual, context)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(What the mixer reads [T, input size], the stream [T, H]) -> as `forward`; works in place on the stream."""
        mixed = self.mixer(x, context)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x, residual = self.post_attention_layernorm.add(mixed, residual)
            return self.mlp(x), residual
        x, residual = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(mixed), residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below `model.layers.N.` -> where the tensor goes."""
        tensors = self.mixer.destinations() | self.mlp.destinations()
        norms = {
            "input_layernorm": self.input_layernorm,
            "post_attention_layernorm": self.post_attention_layernorm,
            "pre_feedforward_layernorm": self.pre_feedforward_layernorm,
            "post_feedforward_layernorm": self.post_feedforward_layernorm,
        }
        return tensors | {f"{name}.weight": norm.destination() for name, norm in norms.items() if norm is not None}


def make_attention_layers(config: ModelConfig, prefix: str) -> tuple[AttentionLayer, ...]:
    """One for each layer of the config that is not recurrent, in order; names are `{prefix}layers.N.self_attn`."""
    windows = config.sliding_windows or (None,) * config.num_hidden_layers
    numbers = [number for number in range(config.num_hidden_layers) if number not in config.recurrent_layers]
    return tuple(
        AttentionLayer(
            name=f"{prefix}layers.{number}.self_attn",
            index=index,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale or config.head_dim**-0.5,
            sliding_window=windows[number],
            has_sinks=config.attention_sinks,
            softcap=config.attn_logit_softcapping,
            latent_dim=None if config.mla is None else config.mla.kv_lora_rank,
        )
        for index, number in enumerate(numbers)
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
        self.dtype, self.device = dtype, device
        self._attention_layers = make_attention_layers(config, "model.")
        kind = "head" if config.tie_word_embeddings else "embedding"
        self.embed_tokens = Embedding(EMBEDDING, config.vocab_size, config.hidden_size, kernels, dtype, device, kind)
        attention = iter(self._attention_layers)
        self.layers = torch.nn.ModuleList(
            self.make_layer(number, None if number in config.recurrent_layers else next(attention))
            for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels, dtype, device, config.norm_offset)
        self.rotary = RotaryEmbedding(config.rope, kernels, dtype, device)
        self.local_rotary: RotaryEmbedding | None = None
        if config.local_rope is not None:
            self.local_rotary = RotaryEmbedding(config.local_rope, kernels, dtype, device)
        self._is_local = [window is not None for window in config.sliding_windows or [None] * len(self.layers)]
        self.lm_head: Linear = self.embed_tokens  # until a checkpoint has another one

    def make_layer(self, number: int, layer: AttentionLayer | None) -> torch.nn.Module:
        """Layer `number` of the config, and its attention; None for a recurrent one. A `DecoderLayer`, or what can be
        called like one and has `destinations`."""
        mixer = self.make_mixer(number, layer)
        return DecoderLayer(self.config, mixer, self.kernels, self.dtype, self.device, mlp=self.make_mlp(number))

    def make_mixer(self, number: int, layer: AttentionLayer | None) -> Mixer:
        """What mixes the tokens in layer `number`."""
        assert layer is not None, f"{self.config.architecture} has no recurrent layers"
        return Attention(self.config, layer, self.kernels, self.dtype, self.device)

    def make_mlp(self, number: int) -> GatedMLP | SparseMLP | None:
        """What layer `number` has behind its mixer; None: a gated MLP by the config's numbers."""
        return None

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._attention_layers

    @property
    def recurrent_layers(self) -> tuple[RecurrentLayer, ...]:
        mixers = (getattr(layer, "mixer", None) for layer in self.layers)
        return tuple(mixer.layer for mixer in mixers if isinstance(mixer, RecurrentMixer))

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
        context = local = self._context(self.rotary, inputs)
        if self.local_rotary is not None:
            local = self._context(self.local_rotary, inputs)
        x: torch.Tensor | None = None
        for number, layer in enumerate(self.layers):
            x, residual = layer(x, residual, local if self._is_local[number] else context)
            if number < len(inputs.deepstack):
                x = x + inputs.deepstack[number]
            if f"layers.{number}" in inputs.taps:
                taps[f"layers.{number}"] = self.kernels.add(x, residual)
        hidden, _ = self.norm.add(x, residual)
        return ModelOutput(hidden=hidden, taps=taps)

    def _context(self, rotary: RotaryEmbedding, inputs: ModelInputs) -> LayerContext:
        positions = inputs.positions if inputs.rope_positions is None else inputs.rope_positions
        cos, sin = rotary(positions, inputs.rope_lens)
        return LayerContext(cos=cos, sin=sin, attend=inputs.attend, recurrent=inputs.recurrent)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = self.lm_head.logits(hidden), self.config.final_logit_softcapping
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def required_tensors(self) -> dict[str, Destination]:
        tensors = {**self.embed_tokens.destinations(), "model.norm.weight": self.norm.destination()}
        for index, layer in enumerate(self.layers):
            assert callable(layer.destinations)
            tensors |= {f"model.layers.{index}.{name}": place for name, place in layer.destinations().items()}
        return tensors

    def optional_tensors(self) -> dict[str, Destination]:
        config, kernels, dtype, device = self.config, self.kernels, self.dtype, self.device
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
