"""The vision tower of Qwen3-VL and Qwen3.5. Formulas as in Hugging Face transformers (`Qwen3VLVisionModel`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn import functional

from workerkit.components.layers.linear import Linear
from workerkit.components.layers.norm import LayerNorm
from workerkit.components.layers.weights import Destination, Weight, destination
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.families import VisionConfig
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.vision import Grid, VisionAttend, VisionInputs, VisionOutput, VisionTower

_EPS = 1e-6  # of all norms, in no config


class PatchEmbedding(torch.nn.Module):
    """A convolution whose windows do not overlap: a linear layer on the numbers of a patch."""

    def __init__(self, config: VisionConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._shape = (
            *(config.hidden_size, config.in_channels, config.temporal_patch_size),
            *(config.patch_size, config.patch_size),
        )
        self.proj = Linear("proj", config.patch_dim, config.hidden_size, True, kernels, dtype, device)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, patch_dim] -> [N, hidden_size]."""
        result: torch.Tensor = self.proj(pixels)
        return result

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below `patch_embed.` -> where the tensor goes; the weight there is the convolution's."""
        places = self.proj.destinations()
        matrix = places["proj.weight"]

        def fill(weight: Weight) -> None:
            assert isinstance(weight, torch.Tensor), "packed weights have two dimensions"
            matrix.fill(weight.flatten(1))

        return {**places, "proj.weight": Destination(self._shape, fill)}


class Block(torch.nn.Module):
    """Attention within a frame, and an MLP."""

    def __init__(self, config: VisionConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.kernels = kernels

        def linear(name: str, inputs: int, outputs: int, kind: str) -> Linear:
            return Linear(name, inputs, outputs, True, kernels, dtype, device, kind)

        self.norm1 = LayerNorm(hidden, _EPS, dtype, device)
        self.qkv = linear("qkv", hidden, 3 * hidden, "attention")
        self.proj = linear("proj", hidden, hidden, "attention")
        self.norm2 = LayerNorm(hidden, _EPS, dtype, device)
        self.linear_fc1 = linear("linear_fc1", hidden, inner, "mlp")
        self.linear_fc2 = linear("linear_fc2", inner, hidden, "mlp")

    def forward(self, x: torch.Tensor, inputs: VisionInputs, attend: VisionAttend) -> torch.Tensor:
        """[N, hidden_size] -> [N, hidden_size]."""
        query, key, value = self.qkv(self.norm1(x)).view(len(x), 3, self.num_heads, self.head_dim).unbind(1)
        # Rotated in float32, whatever the model's type.
        query, key = self.kernels.rotary_embedding(query.float(), key.float(), inputs.cos, inputs.sin)
        attended = attend(query.to(x.dtype), key.to(x.dtype), value, self.head_dim**-0.5)
        x = x + self.proj(attended.reshape(len(x), -1))
        result: torch.Tensor = x + self.linear_fc2(functional.gelu(self.linear_fc1(self.norm2(x)), approximate="tanh"))
        return result

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below `blocks.N.` -> where the tensor goes."""
        return {
            **self.norm1.destinations("norm1"),
            **self.norm2.destinations("norm2"),
            **_below("attn", self.qkv.destinations() | self.proj.destinations()),
            **_below("mlp", self.linear_fc1.destinations() | self.linear_fc2.destinations()),
        }


class PatchMerger(torch.nn.Module):
    """Makes a token of the patches of a square: normed one by one, or with `norms_square` side by side."""

    def __init__(
        self, config: VisionConfig, norms_square: bool, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.norms_square = norms_square
        self.norm = LayerNorm(self.width if norms_square else config.hidden_size, _EPS, dtype, device)
        self.linear_fc1 = Linear("linear_fc1", self.width, self.width, True, kernels, dtype, device, "mlp")
        self.linear_fc2 = Linear("linear_fc2", self.width, config.out_hidden_size, True, kernels, dtype, device, "mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> [N / merge_size ** 2, out_hidden_size]."""
        x = self.norm(x.view(-1, self.width)) if self.norms_square else self.norm(x).view(-1, self.width)
        result: torch.Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(x)))
        return result

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below the merger -> where the tensor goes."""
        return {
            **self.norm.destinations("norm"),
            **self.linear_fc1.destinations(),
            **self.linear_fc2.destinations(),
        }


class Qwen3VisionTower(torch.nn.Module, VisionTower):
    """Blocks over patches, whose positions are learned (a grid that is stretched over each frame) and rotary as well
    (half of the frequencies turn by the row, half by the column).

    Raises ModelError when the numbers contradict each other.
    """

    def __init__(self, config: VisionConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        _check_numbers(config)
        self.config = config
        self.dtype, self.device = dtype, device
        self.patch_embed = PatchEmbedding(config, kernels, dtype, device)
        table = torch.empty(config.num_position_embeddings, config.hidden_size, dtype=dtype, device=device)
        self.pos_embed = torch.nn.Parameter(table, requires_grad=False)
        self.blocks = torch.nn.ModuleList(Block(config, kernels, dtype, device) for _ in range(config.depth))
        self.merger = PatchMerger(config, False, kernels, dtype, device)
        self.deepstack_mergers = torch.nn.ModuleList(
            PatchMerger(config, True, kernels, dtype, device) for _ in config.deepstack_indexes
        )

    def prepare(
        self, grids: Sequence[Grid], num_tokens: int | None = None, num_frames: int | None = None
    ) -> VisionInputs:
        config, merge = self.config, self.merge_size
        for grid in grids:
            if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
                raise ValueError(f"grid {grid}: height and width must be multiples of {merge}, and nothing 0")
        lengths = tuple(height * width for frames, height, width in grids for _ in range(frames))
        num_patches = sum(lengths)
        size = num_patches if num_tokens is None else num_tokens * merge**2
        frames = len(lengths) if num_frames is None else num_frames
        if num_patches > size or len(lengths) > frames:
            raise ValueError(
                f"pictures of {num_patches // merge**2} tokens in {len(lengths)} frames do not fit into "
                f"{size // merge**2} tokens in {frames} frames"
            )
        padding = (0, size - num_patches)
        row, column, height, width = (functional.pad(part, padding) for part in _places(grids, merge))
        steps = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        inv_freq = 1.0 / config.rope_theta**steps
        angles = torch.cat([row[:, None].float() * inv_freq, column[:, None].float() * inv_freq], -1)
        rows, weights = _between(row, column, height, width, round(config.num_position_embeddings**0.5))
        ends = [0, *itertools.accumulate(lengths)]
        ends += [num_patches] * (frames - len(lengths))
        device = self.device
        return VisionInputs(
            cos=angles.cos().to(device),
            sin=angles.sin().to(device),
            position_rows=rows.to(device),
            position_weights=weights.to(device),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
            lengths=lengths,
            is_static=num_tokens is not None,
        )

    def forward(self, pixels: torch.Tensor, inputs: VisionInputs, attend: VisionAttend | None = None) -> VisionOutput:
        if inputs.is_static:  # whatever lies in padding rows, NaN too, must not get into a product with 0
            index = torch.arange(len(pixels), dtype=torch.int32, device=pixels.device)
            pixels = pixels.masked_fill((index >= inputs.cu_seqlens[-1])[:, None], 0.0)
        if attend is None:
            attend = _MaskedAttend(inputs) if inputs.is_static else _FrameAttend(inputs.lengths)
        x = self.patch_embed(pixels.to(self.dtype)) + self._positions(inputs)
        deepstack = []
        for number, block in enumerate(self.blocks):
            x = block(x, inputs, attend)
            if number in self.config.deepstack_indexes:
                merger = self.deepstack_mergers[self.config.deepstack_indexes.index(number)]
                deepstack.append(merger(x))
        return VisionOutput(embeds=self.merger(x), deepstack=tuple(deepstack))

    def _positions(self, inputs: VisionInputs) -> torch.Tensor:
        """[N, hidden_size]: the learned embeddings of the places that a patch lies between, mixed in float32."""
        taps = zip(inputs.position_rows.unbind(1), inputs.position_weights.unbind(1), strict=True)
        parts = [self.pos_embed[rows] * weights[:, None] for rows, weights in taps]
        return (parts[0] + parts[1] + parts[2] + parts[3]).to(self.dtype)

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below `model.visual.` -> where the tensor goes."""
        places = {
            "pos_embed.weight": destination(self.pos_embed),
            **_below("patch_embed", self.patch_embed.destinations()),
            **_below("merger", self.merger.destinations()),
        }
        for room, modules in (("blocks", self.blocks), ("deepstack_merger_list", self.deepstack_mergers)):
            for number, module in enumerate(modules):
                assert isinstance(module, Block | PatchMerger)
                places |= _below(f"{room}.{number}", module.destinations())
        return places


class _FrameAttend:
    """Frames of one size that follow each other are a batch."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        sizes = [length * count for length, count in self._runs]
        parts = []
        for (length, count), *qkv in zip(
            self._runs, *(torch.split(x, sizes) for x in (query, key, value)), strict=True
        ):
            q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            attended = functional.scaled_dot_product_attention(q, k, v, scale=scale)
            parts.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts)


class _MaskedAttend:
    """All at once, under a mask; padding attends to padding, so that its rows are finite."""

    def __init__(self, inputs: VisionInputs) -> None:
        index = torch.arange(len(inputs.cos), dtype=torch.int32, device=inputs.cos.device)
        frames = torch.bucketize(index, inputs.cu_seqlens[1:], right=True)
        self._mask = frames[:, None] == frames

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, scale=scale)
        return attended[0].transpose(0, 1)


def _below(room: str, places: dict[str, Destination]) -> dict[str, Destination]:
    return {f"{room}.{name}": place for name, place in places.items()}


def _places(grids: Sequence[Grid], merge: int) -> tuple[torch.Tensor, ...]:
    """Row and column of each patch in its frame, and height and width of that, [N] int64 each."""
    sizes = torch.tensor(list(grids), dtype=torch.int64).view(-1, 3)
    counts = sizes.prod(1)
    height, width, first = (
        torch.repeat_interleave(x, counts) for x in (sizes[:, 1], sizes[:, 2], counts.cumsum(0) - counts)
    )
    number = (torch.arange(len(first)) - first) % (height * width)  # in its frame
    block, inner = number // merge**2, number % merge**2
    per_row = width // merge
    return block // per_row * merge + inner // merge, block % per_row * merge + inner % merge, height, width


def _between(
    row: torch.Tensor, column: torch.Tensor, height: torch.Tensor, width: torch.Tensor, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bilinear interpolation of a grid [side, side] stretched over a frame, corner on corner: for each patch the four
    entries (of the flat grid) that it lies between, [N, 4] int64, and their weights, [N, 4] float32."""

    def axis(index: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = index.float() * (side - 1) / (size - 1).clamp(min=1)
        low = place.floor()
        part = place - low
        ends = torch.stack([low, low + 1], -1).long().clamp(max=side - 1)
        return ends, torch.stack([1 - part, part], -1)

    rows, row_weights = axis(row, height)
    columns, column_weights = axis(column, width)
    entries = rows[:, :, None] * side + columns[:, None, :]
    return entries.flatten(1), (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)


def _check_numbers(config: VisionConfig) -> None:
    problems = []
    if config.hidden_size % config.num_heads or config.head_dim % 4:
        problems.append(
            f"hidden_size {config.hidden_size} / num_heads {config.num_heads} must be a multiple of 4: "
            "half of a head turns by rows, half by columns"
        )
    side = round(config.num_position_embeddings**0.5)
    if side**2 != config.num_position_embeddings:
        problems.append(f"num_position_embeddings {config.num_position_embeddings} is no square")
    indexes = config.deepstack_indexes
    if len(set(indexes)) < len(indexes) or not set(indexes) <= set(range(config.depth)):
        problems.append(f"deepstack_visual_indexes {list(indexes)} must be different blocks of 0..{config.depth - 1}")
    if problems:
        raise ModelError("vision_config: " + "; ".join(problems))
