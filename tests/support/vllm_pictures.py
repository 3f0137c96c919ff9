"""A tiny model that sees pictures, in front of which vLLM's own processing of pictures runs.

vLLM's code for such models imports torchvision, which is not in the environments of `make test-vllm`. Where it is not,
modules in which any name means nothing stand in for it, and pictures are processed by transformers' code around Pillow.
"""

import importlib.util
import io
import json
import os
from pathlib import Path

import numpy as np
import torch
from picture_model import END, IMAGE, START, make_model, next_logits, picture, save
from PIL import Image

_MODULES = ("__init__", "io", "transforms/__init__", "transforms/functional", "transforms/v2/__init__")
_MODULES += ("transforms/v2/functional",)
_STAND_IN = """
from unittest.mock import MagicMock
__version__ = "0"
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""


def processing(monkeypatch, folder):
    """Let vLLM process pictures, in this process and in those that it starts; `folder` may be written to."""
    if importlib.util.find_spec("torchvision"):
        return
    for name in _MODULES:
        path = folder / "torchvision" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_STAND_IN)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))

    from transformers import AutoTokenizer, Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    def from_pretrained(cls, path, *args, tokenizer=None, **kwargs):
        return cls(image_processor(path), tokenizer or AutoTokenizer.from_pretrained(path), Qwen3VLVideoProcessor())

    monkeypatch.setattr(Qwen3VLProcessor, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(Qwen3VLProcessor, "check_argument_for_proper_class", lambda self, name, value: type(value))


def image_processor(folder):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(folder)


class Seeing:
    """A model of Hugging Face's, and its folder."""

    def __init__(self, family, folder):
        self.hf, self.folder = make_model(family), folder
        save(self.hf, folder)
        path = Path(folder) / "tokenizer_config.json"
        names = {"image_token": "<image>", "video_token": "\u2581w125"}
        names |= {"vision_start_token": "<start>", "vision_end_token": "<end>"}
        path.write_text(json.dumps({**json.loads(path.read_text()), "extra_special_tokens": names}))

    def greedy(self, prompt, pictures, count):
        """(the prompt with as many placeholders as the pictures take, the tokens that follow)."""
        made = [image_processor(self.folder)(one, return_tensors="np") for one in pictures]
        grids = [tuple(one["image_grid_thw"][0].tolist()) for one in made]
        counts = iter(int(np.prod(grid)) // 4 for grid in grids)
        ids = [token for id_ in prompt for token in ([IMAGE] * next(counts) if id_ == IMAGE else [id_])]
        tokens, pixels = [], [one["pixel_values"] for one in made]
        for _ in range(count):
            tokens.append(int(next_logits(self.hf, [*ids, *tokens], [], pixels, grids)[-1].argmax()))
        return ids, tokens


def prompt_of(before, *between):
    """Text, and a picture before each further text."""
    return [*before, *(token for text in between for token in (START, IMAGE, END, *text))]


def pil(width, height, seed=0):
    return Image.open(io.BytesIO(picture(width, height, seed)))


def feature(offset=1, grid=(1, 4, 2), name="p", modality="image", dtype=torch.float32, **other):
    """A vLLM MultiModalFeatureSpec of random pixels, 4 numbers a patch; `other`: data in their place, or None."""
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    place = {"offset": offset, "length": int(np.prod(grid)) // 4, "is_embed": other.pop("is_embed", None)}
    generator = torch.Generator().manual_seed(len(name))
    data = {"pixel_values": torch.randn(int(np.prod(grid)), 4, generator=generator).to(dtype)}
    data |= {"image_grid_thw": torch.tensor(grid), **other}
    elements = {
        key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
        for key, value in data.items()
        if value is not None
    }
    item = MultiModalKwargsItem(elements) if elements else None
    return MultiModalFeatureSpec(
        data=item, modality=modality, identifier=name, mm_position=PlaceholderRange(**place), mm_hash=name
    )
