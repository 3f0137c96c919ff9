"""Pictures for towers that read patches in squares, as Qwen2-VL and its successors do."""

from __future__ import annotations

import hashlib
import io
import math
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from workerkit.framework.errors import ModelError, RequestError, UnsupportedError
from workerkit.framework.interfaces.families import VisionConfig
from workerkit.framework.interfaces.image import ImageProcessor, ProcessedImage
from workerkit.framework.interfaces.model import ModelLoader
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.store import ModelStore

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # decoders that a stranger's file may reach
_FILE = "preprocessor_config.json"
_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_BICUBIC = 3  # Pillow's number


@attrs.frozen(kw_only=True)
class PatchImageProcessorConfig:
    """Options of `image_processor: patches`."""

    max_file_pixels: int = attrs.field(
        default=64_000_000,
        validator=attrs.validators.ge(1),
        metadata={"doc": "a picture with more is refused before it is decoded"},
    )
    max_pixels: int | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.ge(1)),
        metadata={"doc": "larger pictures are made smaller, so that they take fewer tokens; null: as the model says"},
    )


@attrs.frozen(kw_only=True)
class _Settings:
    """What the model's file says; its defaults are those of transformers."""

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    rescale_factor: float = 1 / 255
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)


class PatchImageProcessor(ImageProcessor):
    """Orients pictures, resizes them to multiples of a token's side, normalises, and cuts.

    As transformers' Qwen2VLImageProcessor with Pillow.
    """

    def __init__(
        self, config: PatchImageProcessorConfig, section: ModelSection, files: ModelStore, loader: ModelLoader
    ) -> None:
        self._config = config
        self._section = section
        self._files = files
        self._loader = loader

    @property
    def placeholder_id(self) -> int:
        return self._vision.image_token_id

    @cached_property
    def _vision(self) -> VisionConfig:
        config = self._loader.read_config()
        if config.vision is None:
            raise UnsupportedError(f"{config.architecture} sees no pictures")
        return config.vision

    @cached_property
    def _settings(self) -> _Settings:
        import json

        path = self._files.resolve(self._section.source) / _FILE
        try:
            raw = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} says how pictures are read, and cannot be read as JSON: {error}") from error
        settings = _read(raw, str(path))
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            mine, right = getattr(settings, name), getattr(self._vision, name)
            if mine != right:
                raise ModelError(f"{path}: {name} is {mine}, the model's is {right}")
        if self._config.max_pixels is not None:
            settings = attrs.evolve(settings, max_pixels=min(settings.max_pixels, self._config.max_pixels))
        return settings

    def process(self, data: bytes) -> ProcessedImage:
        settings = self._settings
        picture = _decode(data, self._config.max_file_pixels)
        side = settings.patch_size * settings.merge_size
        try:
            height, width = smart_resize(picture.height, picture.width, side, settings.min_pixels, settings.max_pixels)
        except ValueError as error:
            raise RequestError(f"the picture cannot be used: {error}") from error
        resized = picture.resize((width, height), resample=_BICUBIC)
        values = np.asarray(resized, dtype=np.float32).transpose(2, 0, 1) * np.float32(settings.rescale_factor)
        mean, std = (np.array(numbers, np.float32)[:, None, None] for numbers in (settings.mean, settings.std))
        pixels = to_patches(
            (values - mean) / std, settings.patch_size, settings.merge_size, settings.temporal_patch_size
        )
        grid = (1, height // settings.patch_size, width // settings.patch_size)
        digest = hashlib.sha256(repr(grid).encode())
        digest.update(pixels.data)
        return ProcessedImage(
            pixels=pixels,
            grid=grid,
            num_tokens=len(pixels) // settings.merge_size**2,
            digest=digest.hexdigest(),
        )


def _decode(data: bytes, max_pixels: int) -> Any:
    """As RGB, the way up that it is meant to be seen."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UnsupportedError("pictures need Pillow: pip install 'workerkit[vision]'") from error
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            if picture.width * picture.height > max_pixels:
                raise RequestError(
                    f"the picture has {picture.width} x {picture.height} pixels; "
                    f"components.image_processor.max_file_pixels is {max_pixels}"
                )
            return ImageOps.exif_transpose(picture).convert("RGB")
    except RequestError:
        raise
    except Exception as error:  # decoders meet strangers' bytes, and fail in many ways
        kinds = ", ".join(FORMATS)
        raise RequestError(f"the picture cannot be read ({kinds} are): {type(error).__name__}: {error}") from error


def smart_resize(height: int, width: int, side: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width): multiples of `side` near to the old ones and their ratio, with so many pixels. As in
    transformers. Raises ValueError for a strip more than 200 times as long as wide."""
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"{width} x {height} is more than 200 times as long as wide")
    near = round(height / side) * side, round(width / side) * side
    if near[0] * near[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return tuple(max(side, math.floor(size / shrink / side) * side) for size in (height, width))  # type: ignore[return-value]  # two of them
    if near[0] * near[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return tuple(math.ceil(size * grow / side) * side for size in (height, width))  # type: ignore[return-value]  # two of them
    return near


def to_patches(values: np.ndarray, patch: int, merge: int, frames: int) -> np.ndarray:
    """[C, height, width] -> [patches, C * frames * patch * patch] float32, a still picture repeated `frames` times."""
    channels, height, width = values.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = values.reshape(channels, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    still = np.broadcast_to(cut[:, :, :, :, :, None], (*cut.shape[:5], frames, patch, patch))
    return np.ascontiguousarray(still.reshape(-1, channels * frames * patch * patch), dtype=np.float32)


def _read(raw: Any, source: str) -> _Settings:
    """Raises ModelError naming every field that asks for something else."""
    if not isinstance(raw, dict):
        raise ModelError(f"{source} must hold a JSON object, not {type(raw).__name__}")
    problems = [
        f"{name}: {raw[name]!r} is not supported, {right!r} is"
        for name, right in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("do_convert_rgb", True))
        if raw.get(name, right) not in (right, None)
    ]
    if raw.get("image_processor_type", _KINDS[0]) not in _KINDS:
        problems.append(
            f"image_processor_type: {raw['image_processor_type']!r} is not supported; {', '.join(_KINDS)} are"
        )
    if raw.get("resample", _BICUBIC) not in (_BICUBIC, None):
        problems.append(f"resample: {raw['resample']!r} is not supported, {_BICUBIC} (bicubic) is")
    size = raw.get("size") or {}
    given = {
        "min_pixels": raw.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": raw.get("max_pixels") or size.get("longest_edge"),
        "mean": raw.get("image_mean"),
        "std": raw.get("image_std"),
        **{name: raw.get(name) for name in ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor")},
    }
    for name, value in given.items():
        numbers = value if name in ("mean", "std") and isinstance(value, list) else [value]
        whole = name not in ("mean", "std", "rescale_factor")
        if value is not None and not all(type(n) is int or (type(n) is float and not whole) for n in numbers):
            problems.append(f"{name}: must be made of numbers, not {value!r}")
        elif value is not None and isinstance(value, list) and len(value) != 3:
            problems.append(f"{name}: must be 3 numbers, not {value!r}")
    if problems:
        raise ModelError("\n  - ".join([f"{source} is not understood:", *problems]))
    kept: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    return _Settings(**kept)
