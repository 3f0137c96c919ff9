"""Graphs of a vision tower: pictures are packed into budgets of tokens, for each of which one graph is captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import attrs
import torch
from attrs import validators

from workerkit.components.graph.capture import graph_capture
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext, DeviceGraph, DeviceRuntime
from workerkit.framework.interfaces.graph import EncoderGraphManager
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.vision import Grid, VisionInputs, VisionOutput, VisionTower

_log = logging.getLogger(__name__)


def _at_least_one(
    instance: object, attribute: attrs.Attribute[tuple[int, ...] | None], value: tuple[int, ...] | None
) -> None:
    if value is not None and (not value or min(value) < 1):
        raise ValueError(f"'{attribute.name}' must name budgets >= 1, or be null: {value}")


@attrs.frozen(kw_only=True)
class EncoderAclGraphConfig:
    """Options of `encoder_graph: token_budget`."""

    budgets: tuple[int, ...] | None = attrs.field(
        default=None,
        validator=_at_least_one,
        metadata={"doc": "tokens of pictures that one run holds; null: powers of two from min_budget to max_budget"},
    )
    min_budget: int = attrs.field(default=64, validator=validators.ge(1), metadata={"doc": "smallest budget"})
    max_budget: int = attrs.field(default=2048, validator=validators.ge(1), metadata={"doc": "largest budget"})
    max_pictures: int | None = attrs.field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        metadata={
            "doc": "pictures that one run holds, at most the smallest budget; null: as many of the smallest budget's "
            "size as fit the largest one"
        },
    )


@attrs.frozen(kw_only=True, eq=False)
class _Captured:
    """One budget's graph, and what it reads and writes."""

    graph: DeviceGraph
    pixels: torch.Tensor
    inputs: VisionInputs
    output: VisionOutput


class EncoderAclGraphManager(EncoderGraphManager):
    """Packs pictures into budgets of tokens.

    Each run takes the smallest budget that holds its pictures, padded; a picture larger than all of them runs eagerly.
    On a device without graphs all runs are eager, at their own size, and budgets only bound their memory.

    Raises UnsupportedError for more pictures than the smallest budget has tokens.
    """

    def __init__(
        self, config: EncoderAclGraphConfig, device: DeviceRuntime, context: DeviceContext, loaded: LoadedModel
    ) -> None:
        self._budgets = budgets_of(config)
        self._max_pictures = max_pictures_of(config, self._budgets)
        self._device = device
        self._context = context
        self._tower = loaded.network.vision
        self._architecture = loaded.config.architecture
        self._captured: dict[int, _Captured] = {}  # by budget
        self.hits = self.misses = 0  # pictures that ran in a graph, and eagerly

    def capture(self) -> None:
        if self._tower is None or not self._device.captures_graphs:
            return
        graphs = self._device.graphs()
        stream, pool = graphs.new_stream(), graphs.new_pool()
        for budget in reversed(self._budgets):
            with graph_capture(graphs, stream):
                pixels, inputs = self._made_up(self._tower, budget)
                self._tower.forward(pixels, inputs)  # libraries allocate at their first call
                stream.synchronize()
                graph = graphs.new_graph()
                graph.capture_begin(pool=pool)
                output = self._tower.forward(pixels, inputs)
                graph.capture_end()
            self._captured[budget] = _Captured(graph=graph, pixels=pixels, inputs=inputs, output=output)
        _log.info("captured the vision tower for budgets of %s tokens", ", ".join(map(str, self._budgets)))

    def _made_up(self, tower: VisionTower, budget: int) -> tuple[torch.Tensor, VisionInputs]:
        side = tower.merge_size
        inputs = tower.prepare([(1, side, side)], num_tokens=budget, num_frames=self._max_pictures)
        size = budget * side**2, tower.config.patch_dim
        return torch.zeros(size, dtype=self._context.dtype, device=self._context.device), inputs

    def release(self) -> None:
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()

    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[VisionOutput]:
        tower = self._tower
        if tower is None:
            raise UnsupportedError(f"{self._architecture} sees no pictures")
        parts = torch.split(pixels.to(self._context.dtype), [t * h * w for t, h, w in grids])
        sizes = [tower.num_tokens(grid) for grid in grids]
        frames = [grid[0] for grid in grids]
        outputs: dict[int, VisionOutput] = {}
        for pack in packs(sizes, frames, self._budgets[-1], self._max_pictures):
            joined = torch.cat([parts[index] for index in pack])
            output = self._run(tower, joined, [grids[index] for index in pack], sum(sizes[index] for index in pack))
            start = 0
            for index in pack:
                rows = slice(start, start + sizes[index])
                start += sizes[index]
                outputs[index] = VisionOutput(
                    embeds=output.embeds[rows].clone(),
                    deepstack=tuple(level[rows].clone() for level in output.deepstack),
                )
        return [outputs[index] for index in range(len(grids))]

    def _run(self, tower: VisionTower, pixels: torch.Tensor, grids: Sequence[Grid], num_tokens: int) -> VisionOutput:
        fitting = [budget for budget in self._captured if budget >= num_tokens]
        if not fitting or sum(grid[0] for grid in grids) > self._max_pictures:
            self.misses += len(grids)
            return tower.encode(pixels, grids)
        self.hits += len(grids)
        budget = min(fitting)
        captured = self._captured[budget]
        captured.inputs.copy_(tower.prepare(grids, num_tokens=budget, num_frames=self._max_pictures))
        captured.pixels[len(pixels) :] = 0
        captured.pixels[: len(pixels)] = pixels
        captured.graph.replay()
        return captured.output


def budgets_of(config: EncoderAclGraphConfig) -> tuple[int, ...]:
    """In ascending order, each once."""
    if config.budgets is not None:
        return tuple(sorted(set(config.budgets)))
    if config.min_budget > config.max_budget:
        raise UnsupportedError(
            f"components.encoder_graph: min_budget {config.min_budget} is more than max_budget {config.max_budget}"
        )
    budgets, size = [], config.min_budget
    while size < config.max_budget:
        budgets.append(size)
        size *= 2
    return (*budgets, config.max_budget)


def max_pictures_of(config: EncoderAclGraphConfig, budgets: Sequence[int]) -> int:
    """Pictures in one run. Raises UnsupportedError for more than fit the smallest budget, a token each."""
    if config.max_pictures is None:
        return min(max(1, budgets[-1] // budgets[0]), budgets[0])
    if config.max_pictures > budgets[0]:
        raise UnsupportedError(
            f"components.encoder_graph.max_pictures: {config.max_pictures} pictures do not fit the smallest budget, "
            f"{budgets[0]} tokens"
        )
    return config.max_pictures


def packs(sizes: Sequence[int], frames: Sequence[int], budget: int, max_frames: int) -> Iterator[list[int]]:
    """Pictures by their numbers, from the smallest on, in runs of at most `budget` tokens and `max_frames` frames. One
    that is larger by itself is a run of its own."""
    run: list[int] = []
    tokens = held = 0
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        if run and (tokens + sizes[index] > budget or held + frames[index] > max_frames):
            yield run
            run, tokens, held = [], 0, 0
        run.append(index)
        tokens += sizes[index]
        held += frames[index]
    if run:
        yield run
