"""Pictures as their files hold them, and as a vision tower reads them."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import numpy as np


@attrs.frozen(kw_only=True, eq=False)
class ProcessedImage:
    """One picture, cut into patches."""

    pixels: np.ndarray  # [patches, patch_dim] float32, in the order that `vision.py` asks for
    grid: tuple[int, int, int]  # patches along time, height and width
    num_tokens: int  # placeholders that it takes in a prompt
    digest: str  # of all of the above


class ImageProcessor(abc.ABC):
    """Host-side work on pictures, as the model's own processor config says."""

    @property
    @abc.abstractmethod
    def placeholder_id(self) -> int:
        """The token that stands for a picture in a prompt. Raises UnsupportedError for a model that sees none."""

    @abc.abstractmethod
    def process(self, data: bytes) -> ProcessedImage:
        """A picture file. Raises RequestError for what is none, or is too large, or of a kind that is not read."""
