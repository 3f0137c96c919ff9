"""Sampler stages that ban or favour tokens by id: allowed ids, logit bias, min_tokens, bad words.

They touch the logits at their ids only, not the whole vocabulary, wherever that is enough.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from workerkit.components.sampler.tables import SlotTable
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerStage, SamplingContext
from workerkit.framework.interfaces.sampling_params import SamplingParams

_BANNED = float("-inf")


class AllowedTokenIds(SamplerStage):
    """Everything but the request's `allowed_token_ids` is banned."""

    parameters: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)

    def __init__(self, shape: WorkerShape, context: DeviceContext) -> None:
        self._ids = SlotTable(shape.max_num_reqs, context.device, torch.int64)

    def applies_to(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def add(self, slot: int, request: NewRequest) -> None:
        self._ids.write(slot, sorted(set(request.sampling.allowed_token_ids or ())))

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        ids = self._ids.gather(context.slots, context.host_slots)
        kept = logits.gather(1, ids)
        return logits.fill_(_BANNED).scatter_(1, ids, kept)


class LogitBias(SamplerStage):
    """Adds `logit_bias` to the logits of its ids."""

    parameters: ClassVar[tuple[str, ...]] = ("logit_bias",)

    def __init__(self, shape: WorkerShape, context: DeviceContext) -> None:
        self._ids = SlotTable(shape.max_num_reqs, context.device, torch.int64)
        self._biases = SlotTable(shape.max_num_reqs, context.device, torch.float32, pad=0.0)

    def applies_to(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def add(self, slot: int, request: NewRequest) -> None:
        self._ids.write(slot, [*request.sampling.logit_bias])
        self._biases.write(slot, [*request.sampling.logit_bias.values()])

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        ids = self._ids.gather(context.slots, context.host_slots)
        return logits.scatter_add_(1, ids, self._biases.gather(context.slots, context.host_slots))


class MinTokens(SamplerStage):
    """Bans every token that ends the request until it has `min_tokens` of them.

    Where nothing else is possible (a grammar that is complete, allowed ids that only end) the ban is lifted: the
    grammar wins over `min_tokens`.
    """

    parameters: ClassVar[tuple[str, ...]] = ("min_tokens",)

    def __init__(self, shape: WorkerShape, context: DeviceContext) -> None:
        self._ids = SlotTable(shape.max_num_reqs, context.device, torch.int64)
        self._min_tokens = torch.zeros(shape.max_num_reqs, dtype=torch.int64, device=context.device)

    def applies_to(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def add(self, slot: int, request: NewRequest) -> None:
        self._ids.write(slot, sorted(request.stop_ids))
        self._min_tokens[slot] = request.sampling.min_tokens if request.stop_ids else 0

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        num_generated = context.positions + 1 - context.prompt_lens  # before the token that is drawn now
        too_few = (num_generated < self._min_tokens[context.slots])[:, None]
        ids = self._ids.gather(context.slots, context.host_slots)
        before = logits.gather(1, ids)
        logits.scatter_(1, ids, before.masked_fill(too_few, _BANNED))
        nothing_left = logits.amax(1, keepdim=True) == _BANNED
        return logits.scatter_(1, ids, before.masked_fill(too_few & ~nothing_left, _BANNED))


class BadWords(SamplerStage):
    """Bans the last token of each of `bad_words_token_ids` where the generated text, drafts included, ends with the
    others; the prompt does not count."""

    parameters: ClassVar[tuple[str, ...]] = ("bad_words", "bad_words_token_ids")
    reads_text: ClassVar[bool] = True

    def __init__(self, shape: WorkerShape, context: DeviceContext, kernels: Kernels) -> None:
        self._kernels = kernels
        # Words one after another: ids, which word an id belongs to, and how many ids of its word come after it.
        self._ids = SlotTable(shape.max_num_reqs, context.device, torch.int64, pad=-1)
        self._numbers = SlotTable(shape.max_num_reqs, context.device, torch.int64, pad=0)
        self._distances = SlotTable(shape.max_num_reqs, context.device, torch.int64, pad=0)
        self._longest_prefix = np.zeros(shape.max_num_reqs, np.int64)

    def applies_to(self, params: SamplingParams) -> bool:
        return bool(params.bad_words_token_ids)

    def add(self, slot: int, request: NewRequest) -> None:
        words = request.sampling.bad_words_token_ids
        self._ids.write(slot, [token for word in words for token in word])
        self._numbers.write(slot, [number for number, word in enumerate(words) for _ in word])
        self._distances.write(slot, [distance for word in words for distance in range(len(word) - 1, -1, -1)])
        self._longest_prefix[slot] = max(map(len, words)) - 1

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        words = (t.gather(context.slots, context.host_slots) for t in (self._ids, self._numbers, self._distances))
        return self._kernels.apply_bad_words(logits, self._recent(context), *words)

    def _recent(self, context: SamplingContext) -> torch.Tensor:
        """The latest generated tokens of each row, [N, P]: as many as the longest word can ask for."""
        positions = context.positions[:, None]
        longest = int(self._longest_prefix[context.host_slots].max())
        if longest == 0:  # single tokens: the text does not matter
            return positions[:, :0]
        columns = positions - torch.arange(longest - 1, -1, -1, device=positions.device)
        recent = context.text().gather(1, columns.clamp(min=0))
        return recent.masked_fill_(columns < context.prompt_lens[:, None], -1)
