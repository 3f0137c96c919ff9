"""Pictures in a batch: encoded when their tokens are first computed, kept for as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.extensions import Embeddings, Encoder
from workerkit.framework.interfaces.graph import EncoderGraphManager
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import ImageInput, NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.vision import VisionOutput


@attrs.frozen(kw_only=True)
class VisionEncoderConfig:
    """Options of `encoder: vision`."""

    cache_tokens: int = attrs.field(
        default=8192,
        validator=attrs.validators.ge(0),
        metadata={
            "doc": "tokens of pictures whose embeddings are kept; one that was dropped is encoded again when it is "
            "needed, and what a single step needs is kept during that step in any case"
        },
    )


@attrs.frozen
class _Piece:
    """The part of a picture that a step computes."""

    image: ImageInput
    rows: slice  # of the picture's tokens
    tokens: slice  # of the batch


class VisionEncoder(Encoder):
    """Runs the network's vision tower, through the encoder's graphs. For a model without one it does nothing.

    A picture is known by its digest, so requests with the same one share what was made of it.
    """

    def __init__(
        self,
        config: VisionEncoderConfig,
        shape: WorkerShape,
        context: DeviceContext,
        loaded: LoadedModel,
        graph: EncoderGraphManager,
    ) -> None:
        self._budget = config.cache_tokens
        self._context = context
        self._network = loaded.network
        self._graph = graph
        self._images: list[tuple[ImageInput, ...]] = [()] * shape.max_num_reqs  # by slot
        self._num_seeing = 0  # slots with pictures
        self._cache: OrderedDict[str, VisionOutput] = OrderedDict()  # by digest, the longest unused first
        self.num_held_tokens = 0

    @property
    def accepts_images(self) -> bool:
        return self._network.vision is not None

    def add(self, slot: int, request: NewRequest) -> None:
        self.clear(slot)
        if request.images and not self.accepts_images:
            raise UnsupportedError(f"{self._network.config.architecture} sees no pictures")
        self._images[slot] = request.images
        self._num_seeing += bool(request.images)

    def clear(self, slot: int) -> None:
        self._num_seeing -= bool(self._images[slot])
        self._images[slot] = ()

    def free(self, req_ids: Sequence[str]) -> None:
        """What was encoded stays for others, until its place is needed."""

    def reset(self) -> None:
        self._cache.clear()
        self.num_held_tokens = 0

    def embed(self, batch: InputBatch) -> Embeddings | None:
        if batch.is_dummy or not self._num_seeing:
            return None
        pieces = list(self._pieces(batch))
        if not pieces:
            return None
        self._encode({piece.image.digest: piece.image for piece in pieces})
        inputs = self._network.embed(batch.input_ids).clone()
        outputs = [self._cache[piece.image.digest] for piece in pieces]
        deepstack = tuple(torch.zeros_like(inputs) for _ in outputs[0].deepstack)
        for piece, output in zip(pieces, outputs, strict=True):
            inputs[piece.tokens] = output.embeds[piece.rows]
            for level, values in zip(deepstack, output.deepstack, strict=True):
                level[piece.tokens] = values[piece.rows]
        self._evict()
        return Embeddings(inputs=inputs, deepstack=deepstack)

    def _pieces(self, batch: InputBatch) -> Iterator[_Piece]:
        """Pictures are parts of prompts, of which the host knows exactly what is computed."""
        plan, starts = batch.plan, batch.query_start_loc_np
        for row in np.flatnonzero(plan.is_prefilling).tolist():
            first, count = int(plan.num_computed_tokens[row]), int(plan.num_scheduled_tokens[row])
            for image in self._images[int(plan.slots[row])]:
                begin, end = max(first, image.start), min(first + count, image.start + image.num_tokens)
                if begin < end:
                    offset = int(starts[row]) - first
                    yield _Piece(
                        image,
                        slice(begin - image.start, end - image.start),
                        slice(begin + offset, end + offset),
                    )

    def _encode(self, images: dict[str, ImageInput]) -> None:
        missing = [image for digest, image in images.items() if digest not in self._cache]
        if missing:
            pixels = torch.from_numpy(np.concatenate([image.pixels for image in missing]))
            outputs = self._graph.encode(pixels.to(self._context.device), [image.grid for image in missing])
            for image, output in zip(missing, outputs, strict=True):
                self._cache[image.digest] = output
                self.num_held_tokens += image.num_tokens
        for digest in images:
            self._cache.move_to_end(digest)

    def _evict(self) -> None:
        while self.num_held_tokens > self._budget:
            _, output = self._cache.popitem(last=False)
            self.num_held_tokens -= len(output.embeds)
