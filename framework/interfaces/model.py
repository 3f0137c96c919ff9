"""Models: the architecture's numbers, the network that runs, and the parts that build and fill it."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.families import GatedDeltaConfig, Mamba2Config, MLAConfig, VisionConfig

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.kv_cache import AttentionLayer
    from workerkit.framework.interfaces.lora import AdaptedLinear
    from workerkit.framework.interfaces.recurrent import RecurrentBatch, RecurrentLayer
    from workerkit.framework.interfaces.sections import QuantizationSection
    from workerkit.framework.interfaces.vision import VisionTower


@attrs.frozen(kw_only=True)
class RopeConfig:
    """Rotary embedding, normalised from the old (`rope_scaling`) and the new (`rope_parameters`) spelling."""

    rope_type: str = "default"  # default | linear | dynamic | yarn | llama3
    theta: float = 10000.0
    rotary_dim: int  # rotated head dimensions, <= head_dim
    factor: float = 1.0
    original_max_position: int = 0  # context the scaling starts from; max_position_embeddings when the file has none
    attention_factor: float | None = None  # yarn: explicit factor on cos and sin, taken verbatim
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    mrope_section: tuple[int, ...] = ()  # frequencies that turn by time, height and width; (): positions are plain


@attrs.frozen(kw_only=True)
class MoEConfig:
    """Layers whose MLP is a mixture of experts."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    normalize: bool = True  # weights of a token's experts add up to 1
    routing: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: with a bias that serves the choice alone, in groups
    num_groups: int = 1  # sigmoid: experts lie in so many groups of one size,
    top_k_groups: int = 1  # of which so many are open to a token
    scaling: float = 1.0  # sigmoid: multiplies all weights
    shared_intermediate_size: int = 0  # of the MLP that every token goes through beside its experts; 0: there is none
    mxfp4: bool = False  # the file has them in 4-bit floats, in groups of 32 with a scale
    sparse_layers: tuple[int, ...]  # all others have a plain MLP


@attrs.frozen(kw_only=True)
class ModelConfig:
    """What a checkpoint says of its architecture, in the names of Hugging Face's config.json."""

    architecture: str  # e.g. "LlamaForCausalLM"; the key of the ModelLibrary
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    norm_offset: float = 0.0  # what norms add to their weight: 1 where checkpoints hold it less one
    sandwich_norms: bool = False  # what attention and MLP return has a norm, too, before it is added to the stream
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # multiplies query · key; None: head_dim ** -0.5
    attention_sinks: bool = False  # see AttentionLayer.has_sinks
    attn_logit_softcapping: float | None = None  # see AttentionLayer.softcap
    final_logit_softcapping: float | None = None  # a logit x counts as cap * tanh(x / cap)
    local_rope: RopeConfig | None = None  # of layers with a sliding window; None: as all others
    sliding_windows: tuple[int | None, ...] = ()  # one entry a layer: tokens a query may see, itself included
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None  # attention is multi-head latent attention
    num_nextn_predict_layers: int = 0  # layers behind the last in the checkpoint that draft (MTP)
    recurrent_layers: tuple[int, ...] = ()  # numbers of the layers without attention
    gated_delta: GatedDeltaConfig | None = None  # of recurrent layers that are such
    mamba2: Mamba2Config | None = None  # of recurrent layers that are such
    vision: VisionConfig | None = None  # of models that see pictures
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # what the checkpoint was saved in
    raw: Mapping[str, Any] = attrs.field(factory=dict, repr=False, eq=False)  # the file itself, for families of plugins


@attrs.frozen(kw_only=True, eq=False)
class QuantizedTensor:
    """A weight [O, H] as its file packs it: groups of 32 along a row, each with a scale, and with a minimum or none.

    Two codes of 4 bits share a byte: byte j of a group's 16 has element j in its low half, j + 16 in its high half.
    """

    codes: torch.Tensor  # uint8 [O, H / 2] of 4 bits, or int8 [O, H]
    scales: torch.Tensor  # [O, H / 32] float32
    minima: torch.Tensor | None = None  # likewise, for codes of 4 bits

    @property
    def shape(self) -> tuple[int, int]:
        """(O, H)."""
        rows, groups = self.scales.shape
        return rows, 32 * groups

    def dequantize(self) -> torch.Tensor:
        """[O, H] float32: code * scale + minimum."""
        rows, groups = self.scales.shape
        if self.minima is None:
            return (self.codes.view(rows, groups, 32) * self.scales[..., None]).view(rows, -1)
        pairs = self.codes.view(rows, groups, 16)
        values = self.scales.new_empty(rows, groups, 32)
        values[..., :16] = pairs & 15
        values[..., 16:] = pairs >> 4
        return values.mul_(self.scales[..., None]).add_(self.minima[..., None]).view(rows, -1)

    def split(self, rows: int) -> Iterator[QuantizedTensor]:
        """Views of so many rows at a time: dequantised one after another they need little memory."""
        for start in range(0, len(self.scales), rows):
            part = slice(start, start + rows)
            yield QuantizedTensor(
                codes=self.codes[part],
                scales=self.scales[part],
                minima=None if self.minima is None else self.minima[part],
            )


class Attend(Protocol):
    """Writes the keys and values of a layer and attends to its cache."""

    def __call__(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, num_heads, D], key [T, num_kv_heads, D], value [T, num_kv_heads, Dv] -> [T, num_heads, Dv].

        sinks [num_heads]: a logit for each head that takes part in the softmax and stands for no value. Given for
        layers with `has_sinks`, and for no others.
        """
        ...


@attrs.frozen(kw_only=True, eq=False, slots=False)
class ModelInputs:
    """One forward pass. T counts padding rows too."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    rope_lens: (
        torch.Tensor
    )  # [T] int64: context length that a length-dependent rope uses, max(prompt_len, position + 1)
    attend: Attend  # writes the keys and values of a layer and attends to its cache
    inputs_embeds: torch.Tensor | None = None  # [T, H]; replaces the embedding of input_ids (encoder, pipeline)
    deepstack: tuple[torch.Tensor, ...] = ()  # [T, H] each: added to the stream behind the first layers
    rope_positions: torch.Tensor | None = None  # [3, T] int64: of time, height and width, for models with M-RoPE
    recurrent: RecurrentBatch | None = None  # for networks with recurrent layers
    taps: tuple[str, ...] = ()  # tap points to return, from Network.tap_points
    # AttentionBackend.host_parameters, for a step that replays a graph
    host_parameters: Mapping[str, Sequence[Mapping[str, Any]]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, eq=False)
class ModelOutput:
    """What a forward returns."""

    hidden: torch.Tensor  # [T, H], after the final norm
    taps: Mapping[str, torch.Tensor] = attrs.field(factory=dict)  # tap point -> [T, H]


class Network(abc.ABC):
    """A model's computation with its weights. It holds no cache and no batch: attention is passed in with each call."""

    config: ModelConfig

    @property
    @abc.abstractmethod
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """One entry for each layer that owns a KV cache, in order."""

    @property
    def recurrent_layers(self) -> tuple[RecurrentLayer, ...]:
        """One entry for each layer that keeps a state instead of keys and values, in order."""
        return ()

    @property
    def vision(self) -> VisionTower | None:
        """What turns pictures into embeddings; None for models of text alone."""
        return None

    @property
    @abc.abstractmethod
    def tap_points(self) -> tuple[str, ...]:
        """Names of the hidden states that can be asked for: `embed`, `layers.0` … (the stream leaving that layer)."""

    @abc.abstractmethod
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] integer ids -> [N, H], what the layers get for them."""

    @abc.abstractmethod
    def forward(self, inputs: ModelInputs) -> ModelOutput:
        """Run the layers."""

    @abc.abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, vocab_size]."""

    def linears(self) -> Mapping[str, tuple[AdaptedLinear, str]]:
        """Checkpoint name of each weight that adapters may correct (`model.layers.0.self_attn.q_proj`) -> its layer,
        and the name of its projection there."""
        return {}

    def canonical_name(self, name: str) -> str | None:
        """What a tensor of a checkpoint is called here, as `linears` does; None: it is of no use."""
        return name

    def quantize(self, section: QuantizationSection) -> None:
        """How `load_weights`, which comes later, is to keep matrices of each kind. Raises UnsupportedError when the
        network keeps them in its dtype, which is what it does without this call."""
        if section.uses - {"none"}:
            raise UnsupportedError(f"model.quantization: {self.config.architecture} keeps its weights as they are")

    @abc.abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]]) -> None:
        """Fill the parameters from (checkpoint name, tensor) pairs; converts to the network's dtype.

        Raises WeightError naming every missing, unexpected and misshapen tensor; nothing is left at its initial value.
        """

    def release(self) -> None:  # noqa: B027  a network of plain tensors keeps them: their memory is taken from them
        """Drop the weights that kernels keep in a form of their own, before all memory goes; `load_weights` makes them
        anew, elsewhere in memory."""

    @abc.abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that it keeps of its weights, in whatever form, each tensor once; names are for messages."""


@attrs.frozen(kw_only=True, eq=False)
class LoadedModel:
    """Stage value: the network with its weights in place."""

    network: Network
    config: ModelConfig
    weight_bytes: int


class ModelLoader(abc.ABC):
    """Reads one kind of checkpoint. `read_config` touches headers only, never weights."""

    @abc.abstractmethod
    def read_config(self) -> ModelConfig:
        """Raises ModelError when the source is missing or not understood."""

    @abc.abstractmethod
    def weights(self, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
        """(Hugging Face name, tensor on the CPU) one by one; checks the files before the first one is handed out."""

    @abc.abstractmethod
    def count(self) -> int:
        """How many tensors `weights` yields, for progress."""

    @abc.abstractmethod
    def at(self, source: str) -> ModelLoader:
        """The same kind of loader for another checkpoint: a draft's."""


class ModelLibrary(abc.ABC):
    """Builds networks, targets and drafts alike, by architecture name."""

    @property
    @abc.abstractmethod
    def architectures(self) -> tuple[str, ...]:
        """Names that `build` knows."""

    @abc.abstractmethod
    def build(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Network:
        """An unfilled network. Raises ModelError naming the nearest known architecture."""


class Model(abc.ABC):
    """Produces the target network: architecture, backend checks, weights, in that order."""

    @abc.abstractmethod
    def load(self) -> LoadedModel:
        """Build and fill the network."""

    @abc.abstractmethod
    def reload_weights(self, loaded: LoadedModel) -> None:
        """Fill an existing network again (after sleep level 2)."""
