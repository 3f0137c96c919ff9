"""Rotary embeddings: frequencies and scaling of every rope type, and cos and sin of a step's positions.

Formulas as in Hugging Face transformers (`modeling_rope_utils.ROPE_INIT_FUNCTIONS`), after YaRN (Peng et al., 2023),
dynamic NTK scaling, and Llama 3.1's piecewise scaling.
"""

from __future__ import annotations

import math

import torch

from workerkit.framework.errors import ModelError, did_you_mean
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import RopeConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


class RotaryEmbedding(torch.nn.Module):
    """cos and sin for given positions, computed once a step and handed to every layer.

    `dynamic` takes its base from a token's own context length (`rope_lens`), so a result depends neither on the other
    rows nor on chunking, and a short request after a long one uses the plain base again. Keys already in the cache
    keep the rotation that they were written with.

    With `mrope_section` a token may have three positions, of time, height and width. Frequencies take them in turn, as
    in Qwen3-VL: 0, 3, 6, … time, 1, 4, 7, … height, 2, 5, 8, … width, as many of height and width as the section says,
    and all others time. Where the three are the same, as in text, one will do.
    """

    def __init__(self, rope: RopeConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if rope.rope_type not in ROPE_TYPES:
            raise ModelError(f"rope_type {rope.rope_type!r} is not known; {did_you_mean(rope.rope_type, ROPE_TYPES)}")
        self.rope = rope
        self.kernels = kernels
        self.dtype = dtype
        self.attention_scaling = attention_scaling(rope)
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", torch.empty(rope.rotary_dim // 2, device=device), persistent=False)
        if rope.mrope_section:
            self.axes: torch.Tensor
            axes = torch.empty(rope.rotary_dim // 2, dtype=torch.int64, device=device)
            self.register_buffer("axes", axes, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Compute the frequencies anew, when the memory they lay in was given back and restored."""
        self.inv_freq.copy_(inverse_frequencies(self.rope))
        if self.rope.mrope_section:
            self.axes.copy_(mrope_axes(self.rope))

    def forward(self, positions: torch.Tensor, rope_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] or [3, T], rope_lens [T] int64 -> cos, sin [T, rotary_dim / 2] in the model's dtype, scaling
        included."""
        if positions.dim() == 2:
            angles = positions.T.index_select(1, self.axes).float() * self.inv_freq
            scaling = self.attention_scaling
            return (angles.cos() * scaling).to(self.dtype), (angles.sin() * scaling).to(self.dtype)
        if self.rope.rope_type != "dynamic":
            return self.kernels.rotary_cos_sin(positions, self.inv_freq, self.attention_scaling, self.dtype)
        angles = positions[:, None].float() * dynamic_inverse_frequencies(self.rope, rope_lens)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def attention_scaling(rope: RopeConfig) -> float:
    """The factor on cos and sin: 1, but for yarn."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def mrope_axes(rope: RopeConfig) -> torch.Tensor:
    """[rotary_dim / 2] int64: 0, 1 or 2, the position that each frequency takes."""
    axes = torch.zeros(rope.rotary_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * rope.mrope_section[axis] : 3] = axis
    return axes


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much longer vectors are made where the context grew by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """[rotary_dim / 2] float32; for `dynamic` those of a context within the original one."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    wavelengths = rope.theta**exponents
    inv_freq = 1.0 / wavelengths
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "yarn":
        kept = 1.0 - _yarn_ramp(rope)
        return 1.0 / (rope.factor * wavelengths) * (1.0 - kept) + inv_freq * kept
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq)
    return inv_freq


def dynamic_inverse_frequencies(rope: RopeConfig, rope_lens: torch.Tensor) -> torch.Tensor:
    """rope_lens [T] -> [T, rotary_dim / 2] float32: base * (f * L / Lmax - (f - 1)) ^ (d / (d - 2)) for L > Lmax."""
    ratio = rope_lens.clamp(min=rope.original_max_position).double() / rope.original_max_position
    power = rope.rotary_dim / (rope.rotary_dim - 2)
    bases = (rope.theta * (rope.factor * ratio - (rope.factor - 1.0)) ** power).float()
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device=rope_lens.device) / rope.rotary_dim
    return 1.0 / bases[:, None] ** exponents


def _yarn_ramp(rope: RopeConfig) -> torch.Tensor:
    """[rotary_dim / 2]: 0 where a frequency is kept, 1 where it is divided by the factor."""

    def dimension(rotations: float) -> float:
        """The dimension that turns so often within the original context."""
        return (rope.rotary_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    return ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / inv_freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelengths > longest, inv_freq / rope.factor, between)
    return torch.where(wavelengths < shortest, inv_freq, scaled)
