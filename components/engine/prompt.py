"""What a prompt is made of, once text is tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs

from workerkit.components.engine.admission import check_token_ids
from workerkit.framework.errors import RequestError, did_you_mean
from workerkit.framework.interfaces.engine import CacheIdentity, MultimodalSpan, Prompt, PromptInputs
from workerkit.framework.interfaces.image import ImageProcessor
from workerkit.framework.interfaces.request import ImageInput
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.text import Tokenizer
from workerkit.framework.interfaces.worker import Worker


@attrs.frozen(kw_only=True, eq=False)
class EncodedPrompt:
    """Checked against the model."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()
    lora: str | None = None
    lora_identity: str | None = None

    def identity(self, given: CacheIdentity | None) -> CacheIdentity:
        """What is cached of it depends on its adapter's weights and its pictures, whatever else was said."""
        identity = given or CacheIdentity()
        if self.lora is not None:
            identity = attrs.evolve(identity, lora=self.lora_identity)
        if self.images:
            spans = [MultimodalSpan(start=i.start, length=i.num_tokens, digest=i.digest) for i in self.images]
            identity = attrs.evolve(identity, multimodal=tuple(spans))
        return identity


class PromptEncoder:
    """Text, pictures and names as the scheduler and the worker want them."""

    def __init__(self, worker: Worker, tokenizer: Later[Tokenizer], processor: Later[ImageProcessor]) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._processor = processor

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Raises RequestError for ids outside the vocabulary, adapters that are not loaded, and pictures that cannot be
        read or have no place in the prompt."""
        inputs = prompt if isinstance(prompt, PromptInputs) else PromptInputs(prompt=prompt)
        text, lora = inputs.prompt, inputs.lora
        adapters = {} if lora is None else self._worker.adapters
        if lora is not None and lora not in adapters:
            raise RequestError(f"adapter {lora!r} is not loaded; {did_you_mean(lora, adapters)}")
        ids = self._tokenizer().encode(text) if isinstance(text, str) else text
        token_ids = check_token_ids(ids, self._worker.shape.vocab_size)
        images: list[ImageInput] = []
        if inputs.images:
            if not self._worker.accepts_images:
                raise RequestError("the model sees no pictures")
            token_ids, images = self._place(token_ids, inputs.images)
        return EncodedPrompt(
            token_ids=token_ids,
            images=tuple(images),
            lora=lora,
            lora_identity=None if lora is None else adapters[lora],
        )

    def _place(self, token_ids: list[int], files: Sequence[bytes]) -> tuple[list[int], list[ImageInput]]:
        """Each placeholder becomes as many as its picture takes; a run of so many is left as it is."""
        processor = self._processor()
        placeholder = processor.placeholder_id
        runs = [(is_place, list(run)) for is_place, run in groupby(token_ids, placeholder.__eq__)]
        if (places := sum(is_place for is_place, _ in runs)) != len(files):
            raise RequestError(
                f"{len(files)} pictures for {places} places: token {placeholder} says where one goes in the prompt; a "
                "chat template puts it there"
            )
        placed: list[int] = []
        images: list[ImageInput] = []
        for is_place, run in runs:
            if is_place:
                image = processor.process(files[len(images)])
                if len(run) not in (1, image.num_tokens):
                    raise RequestError(
                        f"picture {len(images)} takes {image.num_tokens} tokens, and the prompt has {len(run)} "
                        "placeholders in a row: right is that number, or one"
                    )
                images.append(
                    ImageInput(
                        start=len(placed),
                        num_tokens=image.num_tokens,
                        digest=image.digest,
                        pixels=image.pixels,
                        grid=image.grid,
                    )
                )
                run = [placeholder] * image.num_tokens
            placed += run
        return placed, images


def without_pictures(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[bytes, ...]]:
    """Messages for a chat template, and the picture files of their parts {"type": "image", "image": bytes}, in order.

    Raises RequestError for a picture that is given otherwise: files and addresses are the caller's to read.
    """
    plain: list[dict[str, Any]] = []
    pictures: list[bytes] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = []
            for part in content:
                if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                    if not isinstance(data := part.get("image"), bytes):
                        raise RequestError(
                            f"messages[{number}]: a picture is {{'type': 'image', 'image': the file's bytes}}"
                        )
                    pictures.append(data)
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        plain.append(dict(message) if isinstance(message, Mapping) else message)
    return plain, tuple(pictures)
