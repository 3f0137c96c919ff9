"""Numbers that only some families have."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class MLAConfig:
    """Multi-head latent attention. Of ModelConfig, head_dim is then that of the one key that is kept, kv_lora_rank +
    qk_rope_head_dim, and num_key_value_heads is 1."""

    q_lora_rank: int | None = None  # queries come from a latent of this size; None: from the stream
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True  # dimensions that turn together lie side by side


@attrs.frozen(kw_only=True)
class VisionConfig:
    """The vision tower beside a text model, and how pictures stand in a prompt. See `vision.py` for the patches."""

    depth: int  # blocks
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int  # of the text model
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2  # frames that a patch spans
    merge_size: int = 2  # patches on a side of what becomes one token
    num_position_embeddings: int  # of the learned grid of positions, a square
    deepstack_indexes: tuple[int, ...] = ()  # blocks whose output is added to the stream of the text model, too
    rope_theta: float = 10000.0
    image_token_id: int  # stands in a prompt for each token of a picture
    video_token_id: int | None = None
    vision_start_token_id: int | None = None  # before a picture's tokens
    vision_end_token_id: int | None = None  # behind them

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers of one patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@attrs.frozen(kw_only=True)
class GatedDeltaConfig:
    """The recurrent layers of Gated DeltaNet (Yang et al., 2024)."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads: value heads in a row share a key head
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size


@attrs.frozen(kw_only=True)
class Mamba2Config:
    """The recurrent layers of Mamba-2 (Dao and Gu, 2024)."""

    num_heads: int
    head_dim: int
    num_groups: int = 1  # of heads that share b and c, and of channels that are normed together
    state_size: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def intermediate_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, b and c."""
        return self.intermediate_size + 2 * self.num_groups * self.state_size
