"""Vision towers: what turns pictures into rows of embeddings.

Pixels are rows of patches, [patches, C * Tp * P * P] of any floating type: C channels, Tp frames that a patch spans, P
its side. A patch's elements lie as [C, Tp, P, P], rescaled and normalised as the checkpoint's processor says; a still
picture repeats its one frame Tp times. A picture of grid (t, h, w) has t * h * w patches, h and w being multiples of
merge_size m. They come frame by frame; in a frame m x m blocks of patches in raster order; in a block its patches in
raster order. One block is one token: t * h * w / m ** 2 of them, in the same order. Pictures follow each other.

A tower's work is cut in two, so that a graph can hold the second half: `prepare` looks at grids on the host, `forward`
at nothing but tensors, whose shapes follow from a number of tokens and one of frames.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    import torch

    from workerkit.framework.interfaces.families import VisionConfig

Grid = tuple[int, int, int]  # patches along time, height and width


class VisionAttend(Protocol):
    """Attention of each patch to all of its own frame."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query, key, value [N, heads, D] -> [N, heads, D]; `scale` multiplies query · key."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class VisionInputs:
    """What a tower has to know of some pictures beside their pixels.

    N counts padding patches, which come last, and F padding frames, which are empty. On the tower's device.
    """

    cos: torch.Tensor  # [N, D / 2] float32
    sin: torch.Tensor  # likewise
    position_rows: torch.Tensor  # [N, 4] int64: entries of the learned grid of positions that a patch lies between
    position_weights: torch.Tensor  # [N, 4] float32
    cu_seqlens: torch.Tensor  # [F + 1] int32: where frames begin; the last is the number of patches without padding
    lengths: tuple[int, ...]  # patches of each frame, on the host, without padding
    is_static: bool  # padded to a budget: nothing may be looked at on the host but shapes

    def copy_(self, other: VisionInputs) -> None:
        """Take over the tensors of another one of the same shapes, where a captured graph reads them."""
        for name in ("cos", "sin", "position_rows", "position_weights", "cu_seqlens"):
            getattr(self, name).copy_(getattr(other, name))


@attrs.frozen(kw_only=True, eq=False)
class VisionOutput:
    """Embeddings of all pictures, one after the other; rows of padding come last, and are finite."""

    embeds: torch.Tensor  # [tokens, H], in the place of the placeholders' own
    deepstack: tuple[torch.Tensor, ...] = ()  # [tokens, H] each: see ModelInputs


class VisionTower(abc.ABC):
    """Turns patches into embeddings, each picture for itself. It holds weights, and nothing of any request."""

    config: VisionConfig

    @property
    def merge_size(self) -> int:
        """A token is a square of so many patches on a side."""
        return self.config.merge_size

    def num_tokens(self, grid: Grid) -> int:
        """Placeholders that a picture takes in a prompt."""
        frames, height, width = grid
        return frames * height * width // self.merge_size**2

    @abc.abstractmethod
    def prepare(
        self, grids: Sequence[Grid], num_tokens: int | None = None, num_frames: int | None = None
    ) -> VisionInputs:
        """On the host, then copied to the device. With `num_tokens` everything is padded to that budget, and to
        `num_frames` frames (as many as there are if None): for `forward` in a graph.

        Raises ValueError for a grid that is not positive or no multiple of merge_size, and for more than the budget.
        """

    @abc.abstractmethod
    def forward(self, pixels: torch.Tensor, inputs: VisionInputs, attend: VisionAttend | None = None) -> VisionOutput:
        """pixels [N, patch_dim], whose padding rows may hold anything.

        attend: takes the place of the tower's own attention; that of static inputs masks an N x N product, where a
        device may have an op for `cu_seqlens` or `lengths`.
        """

    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> VisionOutput:
        """Pictures of any sizes at once, without padding. Raises ValueError as `prepare` does, and where pixels are
        not as many as grids say."""
        inputs = self.prepare(grids)
        if pixels.shape != (sum(inputs.lengths), self.config.patch_dim):
            right = [sum(inputs.lengths), self.config.patch_dim]
            raise ValueError(f"pixels have shape {list(pixels.shape)}: grids {list(grids)} take {right}")
        return self.forward(pixels, inputs)
