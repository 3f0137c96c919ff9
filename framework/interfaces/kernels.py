"""Named tensor functions. A library offers some; `Kernels` binds one implementation to each name at assembly."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from workerkit.framework.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.attention_kernels import (
        DecodeAttention,
        DequantizeBlocks,
        PagedAttention,
        PrefillAttention,
        QuantizeAndCache,
        ReshapeAndCache,
    )
    from workerkit.framework.interfaces.device import DeviceContext
    from workerkit.framework.interfaces.matrix_kernels import (
        Embedding,
        Experts,
        Linear,
        LinearHeads,
        LinearQ4,
        LinearQ8,
        LinearW8,
    )
    from workerkit.framework.interfaces.recurrent_kernels import CausalConv1d, GatedDeltaRule, StateSpace
    from workerkit.framework.interfaces.sampling_kernels import (
        ApplyBadWords,
        ApplyGrammarBitmask,
        ApplyMinP,
        ApplyPenalties,
        ApplyTopKTopP,
        ApplyTopNSigma,
        ApplyTypicalP,
        ComputeTokenLogprobs,
        GreedyTokens,
        MostLikelyTokens,
        ResidualProbs,
        SampleFromProbs,
        SampleTokens,
        UniformFromSeed,
    )

T = TypeVar("T")

OPS = (
    "linear",
    "linear_heads",
    "embedding",
    "linear_q4",
    "linear_q8",
    "linear_w8",
    "linear_w8a8",
    "experts",
    "rms_norm",
    "fused_add_rms_norm",
    "rotary_cos_sin",
    "rotary_embedding",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "swigluoai_and_mul",
    "add",
    "add_lora",
    "reshape_and_cache",
    "quantize_and_cache",
    "dequantize_blocks",
    "paged_attention",
    "decode_attention",
    "prefill_attention",
    "causal_conv1d",
    "state_space",
    "gated_delta_rule",
    "apply_penalties",
    "apply_bad_words",
    "apply_min_p",
    "apply_top_n_sigma",
    "apply_top_k_top_p_npu",
    "apply_typical_p",
    "apply_grammar_bitmask",
    "compute_token_logprobs",
    "most_likely_tokens",
    "uniform_from_seed",
    "greedy_tokens",
    "sample_tokens",
    "sample_from_probs",
    "residual_probs",
)

# Products, norms and attention: fast forms of them choose by the number of rows how to sum up.
BATCH_SENSITIVE = frozenset(
    op
    for op in OPS
    if op.startswith("linear")
    or op in ("embedding", "experts", "gated_delta_rule", "state_space")
    or op.endswith(("_norm", "_attention"))
)


class Program(abc.ABC):
    """Recorded calls of kernels, to be carried out as one."""

    @abc.abstractmethod
    def run(self, num_rows: int) -> None:
        """Carry them out over the first rows of the tensors that they were recorded with. On the stream."""


class KernelLibrary(abc.ABC):
    """Offers implementations of some of OPS."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What configs and `bindings` call it."""

    @property
    @abc.abstractmethod
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Name in OPS -> function with the signature of the same name in `kernels/reference`. Asked for before
        `prepare`; the functions are called after it."""

    @property
    def batch_invariant(self) -> frozenset[str]:
        """Those of its ops in BATCH_SENSITIVE whose result for a row has the same bits whatever the other rows are, and
        for attention whatever chunk of its request a token comes in."""
        return frozenset()

    def prepare(self, context: DeviceContext) -> None:  # noqa: B027  most libraries are plain functions
        """Load, or compile, native code for the device."""

    @property
    def records(self) -> bool:
        """Whether `record` works."""
        return False

    def record(self, function: Callable[[], T], num_rows: int, max_rows: int) -> tuple[Program, T]:
        """See Kernels."""
        raise UnsupportedError(f"kernel library {self.name!r} cannot record its calls")


class Kernels(abc.ABC):
    """Every op of OPS, each from the first library of the configured order that has it."""

    linear: Linear
    linear_heads: LinearHeads
    embedding: Embedding
    linear_q4: LinearQ4
    linear_q8: LinearQ8
    linear_w8: LinearW8
    linear_w8a8: LinearW8
    experts: Experts
    rms_norm: RmsNorm
    fused_add_rms_norm: FusedAddRmsNorm
    rotary_cos_sin: RotaryCosSin
    rotary_embedding: RotaryEmbedding
    silu_and_mul: GatedActivation
    gelu_tanh_and_mul: GatedActivation
    swigluoai_and_mul: GatedActivation
    add: Add
    add_lora: AddLoRA
    reshape_and_cache: ReshapeAndCache
    quantize_and_cache: QuantizeAndCache
    dequantize_blocks: DequantizeBlocks
    paged_attention: PagedAttention
    decode_attention: DecodeAttention
    prefill_attention: PrefillAttention
    causal_conv1d: CausalConv1d
    state_space: StateSpace
    gated_delta_rule: GatedDeltaRule
    apply_penalties: ApplyPenalties
    apply_bad_words: ApplyBadWords
    apply_min_p: ApplyMinP
    apply_top_n_sigma: ApplyTopNSigma
    apply_top_k_top_p_npu: ApplyTopKTopP
    apply_typical_p: ApplyTypicalP
    apply_grammar_bitmask: ApplyGrammarBitmask
    compute_token_logprobs: ComputeTokenLogprobs
    most_likely_tokens: MostLikelyTokens
    uniform_from_seed: UniformFromSeed
    greedy_tokens: GreedyTokens
    sample_tokens: SampleTokens
    sample_from_probs: SampleFromProbs
    residual_probs: ResidualProbs

    @property
    @abc.abstractmethod
    def bindings(self) -> Mapping[str, str]:
        """Op -> name of the library that it comes from."""

    @abc.abstractmethod
    def prepare(self, context: DeviceContext) -> None:
        """Load native code for the device, before weights are read."""

    @abc.abstractmethod
    def rank(self, op: str) -> int:
        """Place of the op's library in the configured order, 0 the first: what comes first is meant to be used."""

    @abc.abstractmethod
    def record(self, function: Callable[[], T], num_rows: int, max_rows: int) -> tuple[Program, T]:
        """Call a function that computes over num_rows rows by kernels alone, noting their calls instead of making them.

        Returns the program, and what the function returned, with max_rows rows where a tensor had num_rows: the program
        fills its first rows. Raises UnsupportedError where no library records, or something else computes in between.
        """


class RmsNorm(Protocol):
    """Root mean square norm. The weight [H] has x's dtype, or is float32 whatever x is; what is returned has x's."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class FusedAddRmsNorm(Protocol):
    """Residual add and norm in one, the weight as for `rms_norm`. The sum may take the memory of the residual."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class RotaryCosSin(Protocol):
    """The angles of a step's positions."""

    """positions [T] int64, inv_freq [half] float32 -> cos and sin of their products, times scaling, [T, half] each."""

    def __call__(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class RotaryEmbedding(Protocol):
    """Rotary position embedding, neox style. It may work in place."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class GatedActivation(Protocol):
    """Gated activation."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Add(Protocol):
    """Sum of two hidden states."""

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...


class AddLoRA(Protocol):
    """output [T, O] += (h masked) b, h = x a^T: a [n * r, I], b [n * r, O] of n adapters, mask [T, n] (1: in use)."""

    def __call__(
        self, output: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor
    ) -> None: ...
