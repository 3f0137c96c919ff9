"""Logits processors that are called for one request at a time, as a sampler stage.

For a processor written as a plain function of prompt, output and one row of logits. It works on the host, so each step
waits for the tokens of the one before: a stage that works on the whole batch on the device costs far less.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from typing import ClassVar

import torch

from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.sampling import SamplerStage, SamplingContext
from workerkit.framework.interfaces.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

RowProcessor = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
"""Prompt ids, output ids (drafts included), the row's logits [V] float32 -> logits [V]; may work in place."""


class PerRequestStage(SamplerStage):
    """Subclasses say which processor a request gets.

    A processor is handed everything that the request has generated, each time. One that counts its calls instead would
    be wrong: after a preemption a request gets a new one, and rows of drafts are calls of their own. One that raises
    fails its request, and no other.
    """

    reads_text: ClassVar[bool] = True
    reads_host_tokens: ClassVar[bool] = True

    def __init__(self, hooks: StepHooks) -> None:
        self._hooks = hooks
        self._processors: dict[int, RowProcessor] = {}
        self._failed: set[int] = set()  # slots

    @abc.abstractmethod
    def processor(self, params: SamplingParams) -> RowProcessor | None:
        """A new processor for a request with these parameters, or None. Raises RequestError for wrong ones."""

    def applies_to(self, params: SamplingParams) -> bool:
        return self.processor(params) is not None

    def add(self, slot: int, request: NewRequest) -> None:
        self.clear(slot)
        if (processor := self.processor(request.sampling)) is not None:
            self._processors[slot] = processor

    def clear(self, slot: int) -> None:
        self._processors.pop(slot, None)
        self._failed.discard(slot)

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        lengths = torch.stack((context.prompt_lens, context.positions + 1)).tolist()
        text = context.text().tolist()
        self._hooks.host_tokens_read(part=type(self).__name__)
        for row, (slot, prompt_len, length) in enumerate(zip(context.host_slots.tolist(), *lengths, strict=True)):
            ids = text[row]
            logits[row] = self._processed(slot, ids[:prompt_len], ids[prompt_len:length], logits[row])
        return logits

    def _processed(self, slot: int, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if slot not in self._failed:
            try:
                result = self._processors[slot](prompt, output, logits.clone())
                if result.shape == logits.shape:
                    return result
                raise ValueError(f"it returned shape {tuple(result.shape)}; right: {tuple(logits.shape)}")
            except Exception:  # whatever a user's function raises concerns its request alone
                self._failed.add(slot)
                _log.exception("%s: the processor of the request in slot %d failed", type(self).__name__, slot)
        return torch.full_like(logits, float("-inf"))
