"""Picture files become the patches that transformers' processor makes; what is no picture, or asks for another
processor, is refused."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from workerkit.components.image_processor.patches import (
    PatchImageProcessor,
    PatchImageProcessorConfig,
    smart_resize,
    to_patches,
)
from workerkit.framework.errors import ModelError, RequestError, UnsupportedError
from workerkit.framework.interfaces.families import VisionConfig
from workerkit.framework.interfaces.sections import ModelSection

VISION = VisionConfig(
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    out_hidden_size=8,
    patch_size=4,
    num_position_embeddings=16,
    image_token_id=7,
)
FIELDS = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


class Files:
    def __init__(self, folder):
        self.folder = folder

    def resolve(self, source):
        return self.folder


class Loader:
    def __init__(self, vision):
        self.vision = vision
        self.architecture = "SomeModel"

    def read_config(self):
        return self


@pytest.fixture
def make(tmp_path):
    def make(vision=VISION, fields=FIELDS, **options):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
        return PatchImageProcessor(
            PatchImageProcessorConfig(**options), ModelSection(), Files(tmp_path), Loader(vision)
        )

    return make


def picture(width, height, mode="RGB", format="PNG", seed=0, **how):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(pixels, "RGBA").convert(mode)
    file = io.BytesIO()
    image.save(file, format, **how)
    return file.getvalue()


def of_transformers(data, fields):
    from transformers import Qwen2VLImageProcessorPil
    from transformers.image_utils import load_image

    names = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    processor = Qwen2VLImageProcessorPil(**{name: fields[name] for name in names})
    found = processor(load_image(Image.open(io.BytesIO(data))), return_tensors="np")
    return found["pixel_values"], tuple(found["image_grid_thw"][0].tolist())


@pytest.mark.parametrize(
    "data",
    [
        picture(40, 24),
        picture(9, 90),
        picture(300, 200, format="JPEG"),
        picture(64, 64, "RGBA"),
        picture(50, 31, "L"),
        picture(33, 47, "P", "GIF"),
        picture(20, 60, format="WEBP"),
    ],
)
def test_pixels_and_grid_are_those_of_transformers(make, data):
    image = make().process(data)
    pixels, grid = of_transformers(data, FIELDS)
    assert image.grid == grid
    np.testing.assert_allclose(image.pixels, pixels, atol=1e-5)
    assert image.num_tokens == grid[1] * grid[2] // 4


def test_the_way_up_is_the_camera_s(make):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    Image.new("RGB", (64, 32)).save(file, "JPEG", exif=exif)
    assert make().process(file.getvalue()).grid == (1, 16, 8)


def test_digests_tell_pictures_apart(make):
    processor = make()
    one, same, other = processor.process(picture(40, 24)), processor.process(picture(40, 24)), picture(40, 24, seed=1)
    assert one.digest == same.digest != processor.process(other).digest


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 4), st.integers(1, 50), st.integers(0, 400))
def test_sizes_are_those_of_transformers(height, width, factor, least, more):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs

    side = 4 * factor
    limits = least * side**2, (least + more) * side**2
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(ValueError, match="200 times"):
            smart_resize(height, width, side, *limits)
    else:
        assert smart_resize(height, width, side, *limits) == theirs(height, width, side, *limits)


def test_patches_come_square_by_square():
    rows, columns = np.mgrid[0:4, 0:8]
    numbers = (10 * rows + columns)[None].astype(np.float32)
    patches = to_patches(numbers, patch=1, merge=2, frames=1)[:, 0].tolist()
    assert patches[:8] == [0, 1, 10, 11, 2, 3, 12, 13]
    assert patches[16:20] == [20, 21, 30, 31]


def test_what_is_no_picture_is_refused(make):
    processor = make(max_file_pixels=10_000)
    huge = picture(101, 100)
    cases = {
        b"": "cannot be read",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 40: "cannot be read",
        picture(30, 30)[:200]: "cannot be read",
        picture(30, 30, format="TIFF"): r"cannot be read \(PNG, JPEG, WEBP, BMP, GIF are\)",
        huge: "101 x 100 pixels; components.image_processor.max_file_pixels is 10000",
        picture(402, 2): "more than 200 times as long",
    }
    for data, message in cases.items():
        with pytest.raises(RequestError, match=message):
            processor.process(data)


def test_another_processor_is_refused_by_name(make):
    wrong = {"do_resize": False, "image_processor_type": "CLIPImageProcessor", "resample": 2, "image_mean": [0.5]}
    with pytest.raises(ModelError) as caught:
        make(fields=FIELDS | wrong | {"merge_size": "2"}).process(picture(30, 30))
    for name in (*(name for name in wrong if name != "image_mean"), "mean", "merge_size"):
        assert f"{name}: " in str(caught.value), name
    with pytest.raises(ModelError, match="patch_size is 8, the model's is 4"):
        make(fields=FIELDS | {"patch_size": 8}).process(picture(30, 30))
    with pytest.raises(UnsupportedError, match="SomeModel sees no pictures"):
        _ = make(vision=None).placeholder_id


def test_an_option_makes_large_pictures_smaller(make):
    data = picture(60, 60)
    assert make().process(data).num_tokens > make(max_pixels=1024).process(data).num_tokens == 16
