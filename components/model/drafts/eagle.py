"""EAGLE (Li et al., 2024) and EAGLE-3 (Li et al., 2025): decoder layers that go on from the target's hidden states.

Weight names and formulas as in the authors' code, vLLM's `llama_eagle` and `llama_eagle3`, and speculators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workerkit.components.layers.attention import Attention
from workerkit.components.layers.linear import Linear
from workerkit.components.layers.mixer import LayerContext
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.rope import RotaryEmbedding
from workerkit.components.layers.weights import Destination
from workerkit.components.model.decoder import DecoderLayer, check_numbers, make_attention_layers
from workerkit.components.model.drafts.head import DraftModule, field, flag, integer
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.draft import HiddenDraft
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import Attend, ModelConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SPECULATORS = {
    "fusion_fc.": "fc.",
    "pre_lm_head_layernorm.": "hidden_states_layernorm.",
    "transformer.": "layers.0.",
}


class Eagle(DraftModule, HiddenDraft):
    """g_p = layers(fc[e(x_{p+1}); f_p]); f_p is the target's hidden state after its final norm, and g_p its successor.

    The first layer has no input norm, and no norm follows the last. `add_para_norm` (HASS): both inputs are normed.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, kernels, dtype, device)
        check_numbers(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._attention_layers = make_attention_layers(config, "")
        self.fc = Linear("fc", 2 * hidden, hidden, True, kernels, dtype, device)
        self.embedding_layernorm: RMSNorm | None = None
        self.hidden_states_layernorm: RMSNorm | None = None
        if flag(config, "add_para_norm"):
            self.embedding_layernorm = RMSNorm(hidden, eps, kernels, dtype, device)
            self.hidden_states_layernorm = RMSNorm(hidden, eps, kernels, dtype, device)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(
                config,
                Attention(config, layer, kernels, dtype, device),
                kernels,
                dtype,
                device,
                has_input_norm=layer.index > 0,
            )
            for layer in self._attention_layers
        )
        self.rotary = RotaryEmbedding(config.rope, kernels, dtype, device)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._attention_layers

    @property
    def features(self) -> Sequence[str]:
        return ()

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rope_lens: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.embedding_layernorm is not None and self.hidden_states_layernorm is not None:
            embeds, hidden = self.embedding_layernorm(embeds), self.hidden_states_layernorm(hidden)
        residual = self.fc(torch.cat((embeds, hidden), dim=-1))
        cos, sin = self.rotary(positions, rope_lens)
        context = LayerContext(cos=cos, sin=sin, attend=attend)
        first, *others = self.layers
        assert isinstance(first, DecoderLayer)
        # Attention has read its input when the stream, the same tensor, is added to.
        x, residual = first.after_norm(residual, residual, context)
        for layer in others:
            x, residual = layer(x, residual, context)
        state = x + residual
        return state, state

    def required_tensors(self) -> dict[str, Destination]:
        tensors = super().required_tensors() | {"fc.weight": self.fc.destinations()["fc.weight"]}
        for name in ("embedding_layernorm", "hidden_states_layernorm"):
            if (norm := getattr(self, name)) is not None:
                tensors[f"{name}.weight"] = norm.destination()
        return tensors | layer_tensors(self.layers)

    def zeroed_tensors(self) -> dict[str, Destination]:
        return {"fc.bias": self.fc.destinations()["fc.bias"]}

    def canonical_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        for theirs, ours in _SPECULATORS.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        return super().canonical_name(name)


class Eagle3Layer(DecoderLayer):
    """The first layer: attention reads the token's embedding and the hidden state side by side, 2 H wide."""

    def __init__(
        self, config: ModelConfig, layer: AttentionLayer, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        mixer = Attention(config, layer, kernels, dtype, device, input_size=2 * config.hidden_size)
        super().__init__(config, mixer, kernels, dtype, device)
        self.norm_before_residual = flag(config, "norm_before_residual")
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels, dtype, device)

    def enter(
        self, embeds: torch.Tensor, hidden: torch.Tensor, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and hidden states [T, H] -> what `DecoderLayer.forward` returns."""
        assert self.input_layernorm is not None
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        residual = normed if self.norm_before_residual else hidden.clone()  # it is worked on in place
        return self.after_norm(x, residual, context)

    def destinations(self) -> dict[str, Destination]:
        return super().destinations() | {"hidden_norm.weight": self.hidden_norm.destination()}


class Eagle3(DraftModule, HiddenDraft):
    """u_p = fc[streams entering some of the target's layers at p], or its own state of the step before.

    Logits are of norm(r_p), where r_p is the stream behind the layers; r_p goes on, or with `norm_output` norm(r_p).
    Raises ModelError for layer ids that are none of the target's, if its number of layers is known.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, kernels, dtype, device)
        check_numbers(config)
        if not flag(config, "use_aux_hidden_state", True):
            raise ModelError(f"{config.architecture}: use_aux_hidden_state false is not supported")
        # A layer id names the stream that enters it, a tap point the one that leaves it.
        self._features = tuple("embed" if i == 0 else f"layers.{i - 1}" for i in _layer_ids(config))
        self._attention_layers = make_attention_layers(config, "")
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width, count = integer(config, "target_hidden_size", hidden), len(self._features)
        self.fc = Linear("fc", count * width, hidden, False, kernels, dtype, device)
        self.input_norm: RMSNorm | None = None  # of the streams side by side
        self.fc_norm: torch.nn.ModuleList | None = None  # of each stream
        if flag(config, "norm_before_fc"):
            self.input_norm = RMSNorm(count * width, eps, kernels, dtype, device)
        if flag(config, "fc_norm"):
            if self.input_norm is not None:
                raise ModelError(f"{config.architecture}: norm_before_fc and fc_norm exclude each other")
            self.fc_norm = torch.nn.ModuleList(RMSNorm(width, eps, kernels, dtype, device) for _ in self._features)
        first, *others = self._attention_layers
        self.layers = torch.nn.ModuleList(
            [
                Eagle3Layer(config, first, kernels, dtype, device),
                *(
                    DecoderLayer(config, Attention(config, layer, kernels, dtype, device), kernels, dtype, device)
                    for layer in others
                ),
            ]
        )
        self.norm = RMSNorm(hidden, eps, kernels, dtype, device)
        self.norm_output = flag(config, "norm_output")
        self.rotary = RotaryEmbedding(config.rope, kernels, dtype, device)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._attention_layers

    @property
    def features(self) -> Sequence[str]:
        return self._features

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self._features), dim=-1)
            # a slice of a wider row is not contiguous, which kernels may ask of their input
            features = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        combined: torch.Tensor = self.fc(features)
        return combined

    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rope_lens: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(positions, rope_lens)
        context = LayerContext(cos=cos, sin=sin, attend=attend)
        first, *others = self.layers
        assert isinstance(first, Eagle3Layer)
        x, residual = first.enter(embeds, hidden, context)
        for layer in others:
            x, residual = layer(x, residual, context)
        normed, stream = self.norm.add(x, residual)
        return normed, normed if self.norm_output else stream

    def required_tensors(self) -> dict[str, Destination]:
        tensors = super().required_tensors() | self.fc.destinations() | {"norm.weight": self.norm.destination()}
        if self.input_norm is not None:
            tensors["input_norm.weight"] = self.input_norm.destination()
        for index, norm in enumerate(self.fc_norm or ()):
            assert isinstance(norm, RMSNorm)
            tensors[f"fc_norm.{index}.weight"] = norm.destination()
        return tensors | layer_tensors(self.layers)

    def canonical_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        return super().canonical_name(name)


def layer_tensors(layers: torch.nn.ModuleList) -> dict[str, Destination]:
    """Checkpoint name from `layers.` on -> where the tensor goes."""
    tensors: dict[str, Destination] = {}
    for index, layer in enumerate(layers):
        assert isinstance(layer, DecoderLayer)
        tensors |= {f"layers.{index}.{name}": place for name, place in layer.destinations().items()}
    return tensors


def _layer_ids(config: ModelConfig) -> list[int]:
    ids = field(config, LAYER_IDS)
    count = config.raw.get("num_target_layers")
    if ids is None:
        if count is None:
            raise ModelError(f"{config.architecture}: neither {LAYER_IDS} nor num_target_layers is given")
        ids = [2, count // 2, count - 3]
    known = isinstance(ids, list | tuple) and ids and all(type(i) is int for i in ids)
    if not known or min(ids) < 0 or (count is not None and max(ids) >= count):
        layers = "layers" if count is None else f"{count} layers"
        raise ModelError(
            f"{config.architecture}: {LAYER_IDS} must name some of the target's {layers}, from 0 on, by the stream "
            f"that enters them, not {ids!r}"
        )
    return list(ids)
