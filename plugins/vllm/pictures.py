"""Pictures of vLLM's requests as ours. vLLM has run the model's processor: what comes is patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.request import ImageInput
from workerkit.framework.interfaces.vision import VisionTower

_FIELDS = ("pixel_values", "image_grid_thw")


def pictures(features: Sequence[Any]) -> tuple[ImageInput, ...]:
    """vLLM's MultiModalFeatureSpecs, in the order of their tokens. Raises RequestError for what is no picture."""
    return tuple(map(_picture, features))


def _picture(feature: Any) -> ImageInput:
    if feature.modality != "image":
        raise RequestError(f"this worker sees pictures only, and the request has {feature.modality}")
    place, data = feature.mm_position, feature.data or {}
    if missing := [name for name in _FIELDS if name not in data]:
        given = ", ".join(data) or "nothing"
        raise RequestError(f"a picture comes as {' and '.join(_FIELDS)}; {' and '.join(missing)} is missing: {given}")
    if place.get_num_embeds() != place.length:
        raise RequestError("pictures with text between their tokens are not served")
    pixels, grid = (data[name].data for name in _FIELDS)
    frames, height, width = grid.flatten().tolist()
    return ImageInput(
        start=place.offset,
        num_tokens=place.length,
        # Clients may name pictures themselves, and how they are processed: one name may stand for different sizes.
        digest=f"{feature.identifier} {frames}x{height}x{width}",
        pixels=pixels.float().numpy(),
        grid=(frames, height, width),
    )


def problems(images: Sequence[ImageInput], tower: VisionTower) -> Iterator[str]:
    """Pictures that the tower cannot take: clients may choose how theirs are processed."""
    for image in images:
        wanted = (int(np.prod(image.grid)), tower.config.patch_dim)
        if image.pixels.shape != wanted:
            yield f"a picture of grid {image.grid} has pixels of shape {image.pixels.shape}, right would be {wanted}"
        elif image.num_tokens != (count := tower.num_tokens(image.grid)):
            yield f"a picture of grid {image.grid} takes {image.num_tokens} tokens, right would be {count}"
