"""DFlash and DSpark (DeepSpec): drafts that fill in a whole block of positions at once.

The target's hidden states, fused by `fc` and normed, are the context: their keys and values in every layer follow from
them directly, so they are computed once a token. The block itself is the newest token and masks behind it; its queries
see the context and the whole block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from workerkit.components.layers.attention import Attention
from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.components.layers.mixer import LayerContext
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.rope import RotaryEmbedding
from workerkit.components.layers.weights import Destination
from workerkit.components.model.decoder import DecoderLayer, make_attention_layers
from workerkit.components.model.drafts.block_config import MASK_FIELDS, check_config, mask_token_id, target_layer_ids
from workerkit.components.model.drafts.eagle import layer_tensors
from workerkit.components.model.drafts.head import DraftModule, flag, integer
from workerkit.components.model.drafts.markov import MarkovHead
from workerkit.framework.interfaces.draft import BlockDraft
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import Attend, ModelConfig

if TYPE_CHECKING:
    from workerkit.framework.interfaces.draft import WriteKV

MASK, CONFIDENCE, CONFIDENCE_BIAS = "mask_embedding", "confidence_head.proj.weight", "confidence_head.proj.bias"


class BlockAttention(Attention):
    """Keys and values have a matrix of their own: of the context they alone are wanted."""

    def __init__(
        self, config: ModelConfig, layer: AttentionLayer, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, layer, kernels, dtype, device)
        del self.qkv_proj
        hidden, bias = config.hidden_size, config.qkv_bias
        query_size, key_size, value_size = self.split
        self.q_proj = Linear("q_proj", hidden, query_size, bias, kernels, dtype, device, "attention")
        key_value = {"k_proj": key_size, "v_proj": value_size}
        self.kv_proj = MergedLinear(hidden, key_value, bias, kernels, dtype, device, "attention")

    def projections(self) -> Sequence[MergedLinear]:
        return self.q_proj, self.kv_proj

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.q_proj(x), *self.kv_proj(x).chunk(2, dim=-1)


class DFlashDraftModel(DraftModule, BlockDraft):
    """The backbone: masks stand at the positions that they predict, B - 1 drafts.

    Embeddings, head, mask embedding and draft vocabulary are its own where the checkpoint has them. Raises ModelError
    for what it cannot serve: layers with sliding windows, causal blocks.
    """

    from_anchor = False

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        check_config(config)
        bias, qk_norm = flag(config, "attention_bias"), flag(config, "qk_norm", default=True)
        config = attrs.evolve(config, qk_norm=qk_norm, qkv_bias=bias, o_bias=bias, sliding_windows=())
        super().__init__(config, kernels, dtype, device)
        self._block_size = integer(config, "block_size")
        self._from_anchor = flag(config, "sample_from_anchor", default=self.from_anchor)
        self._features = tuple("embed" if index < 0 else f"layers.{index}" for index in target_layer_ids(config))
        self._mask_token_id = mask_token_id(config)
        self._attention_layers = make_attention_layers(config, "")
        hidden, eps = config.hidden_size, config.rms_norm_eps
        features_size = len(self._features) * integer(config, "target_hidden_size", hidden)
        self.fc = Linear("fc", features_size, hidden, False, kernels, dtype, device)
        self.hidden_norm = RMSNorm(hidden, eps, kernels, dtype, device)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, BlockAttention(config, layer, kernels, dtype, device), kernels, dtype, device)
            for layer in self._attention_layers
        )
        self.norm = RMSNorm(hidden, eps, kernels, dtype, device)
        self.rotary = RotaryEmbedding(config.rope, kernels, dtype, device)
        self.mask_embedding: torch.nn.Parameter | None = None

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._attention_layers

    @property
    def features(self) -> Sequence[str]:
        return self._features

    @property
    def mask_token_id(self) -> int | None:
        return None if self.mask_embedding is not None else self._mask_token_id

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def samples_from_anchor(self) -> bool:
        return self._from_anchor

    def write_context(
        self, features: torch.Tensor, positions: torch.Tensor, rope_lens: torch.Tensor, write: WriteKV
    ) -> None:
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(positions, rope_lens)
        shape = (len(context), 2, self.config.num_key_value_heads, self.config.head_dim)
        for layer in self.layers:
            mixer = layer.mixer
            assert isinstance(mixer, BlockAttention)
            key, value = mixer.kv_proj(context).view(shape).unbind(1)
            if mixer.k_norm is not None:
                key = mixer.k_norm(key)
            key, _ = self.kernels.rotary_embedding(key, key[:, :0], cos, sin)
            write(mixer.layer, key, value)

    def block_embeds(self, embeds: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        own = self.mask_embedding if mask is None else mask
        assert own is not None, "load_weights has seen to it that there is one or the other"
        masks = own.to(embeds.dtype).expand(len(embeds), self.block_size - 1, -1)
        return torch.cat((embeds[:, None], masks), dim=1)

    def run_block(
        self, embeds: torch.Tensor, positions: torch.Tensor, rope_lens: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        cos, sin = self.rotary(positions, rope_lens)
        context = LayerContext(cos=cos, sin=sin, attend=attend)
        x, residual = None, embeds.clone()  # norms may work in place on the stream
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        hidden, _ = self.norm.add(x, residual)
        return hidden

    def required_tensors(self) -> dict[str, Destination]:
        tensors = super().required_tensors() | self.fc.destinations()
        tensors |= {
            "hidden_norm.weight": self.hidden_norm.destination(),
            "norm.weight": self.norm.destination(),
        }
        return tensors | layer_tensors(self.layers)

    def optional_shapes(self) -> dict[str, Sequence[tuple[int, ...]]]:
        return {**super().optional_shapes(), MASK: [(self.config.hidden_size,)]}

    def take(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        problems = super().take(found)
        self.mask_embedding = self._filled(self.mask_embedding, found.get(MASK))
        if self.mask_embedding is None and self._mask_token_id is None:
            problems.append(f"missing tensor {MASK}, as the config has none of {', '.join(MASK_FIELDS)}")
        return problems

    def _filled(self, old: torch.nn.Parameter | None, new: torch.Tensor | None) -> torch.nn.Parameter | None:
        """An optional tensor: memory is taken the first time, and filled again later."""
        if new is None:
            return old
        if old is None:
            empty = torch.empty(new.shape, dtype=self.dtype, device=self.device)
            old = torch.nn.Parameter(empty, requires_grad=False)
        old.copy_(new)
        return old


class DSparkDraftModel(DFlashDraftModel):
    """DFlash that predicts the token after each position, B drafts, and corrects them one after another."""

    from_anchor = True

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, kernels, dtype, device)
        self.markov_head: MarkovHead | None = None
        if config.raw.get("markov_rank"):  # null and 0: none
            kind = str(config.raw.get("markov_head_type") or "vanilla")
            rank = integer(config, "markov_rank")
            sizes = (config.vocab_size, self.draft_vocab_size, rank, config.hidden_size)
            self.markov_head = MarkovHead(kind, *sizes, kernels, dtype, device)
        self.confidence_weight: torch.nn.Parameter | None = None  # [1, H] or [1, H + r]: the shape tells which
        self.confidence_bias: torch.nn.Parameter | None = None

    def correct(
        self, logits: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.markov_head is None:
            return logits, None
        bias, state = self.markov_head(previous, hidden, state)
        return logits + bias, state

    def confidence(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        if self.confidence_weight is None:
            return None
        if self.confidence_weight.shape[1] > hidden.shape[1]:
            assert self.markov_head is not None, "optional_shapes accepts the wider shape only with a Markov head"
            hidden = torch.cat((hidden, self.markov_head.embed(previous)), dim=-1)
        scores = hidden.float() @ self.confidence_weight[0].float()
        if self.confidence_bias is not None:
            scores = scores + self.confidence_bias.float()
        return scores.sigmoid()

    def required_tensors(self) -> dict[str, Destination]:
        tensors = super().required_tensors()
        if self.markov_head is not None:
            tensors |= {f"markov_head.{name}": place for name, place in self.markov_head.destinations().items()}
        return tensors

    def optional_shapes(self) -> dict[str, Sequence[tuple[int, ...]]]:
        hidden = self.config.hidden_size
        widths = [hidden] if self.markov_head is None else [hidden, hidden + self.markov_head.rank]
        return {**super().optional_shapes(), CONFIDENCE: [(1, width) for width in widths], CONFIDENCE_BIAS: [(1,)]}

    def take(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        self.confidence_weight = self._filled(self.confidence_weight, found.get(CONFIDENCE))
        self.confidence_bias = self._filled(self.confidence_bias, found.get(CONFIDENCE_BIAS))
        return super().take(found)
