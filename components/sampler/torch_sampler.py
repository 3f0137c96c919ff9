"""The sampler: registered stages in order, then one token a row.

Randomness depends on the request's seed and the position only, so a request draws the same tokens alone, in any batch,
in any order, after a preemption and on either runner. Which stages a request uses is decided when it is added; a stage
is shown the rows that use it and no others, so a row costs what it asks for. Rows of prefills that go on use none: what
is drawn for them is thrown away.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch
from attrs import validators

from workerkit.components.buffers.history import TokenHistory
from workerkit.components.buffers.upload import upload
from workerkit.components.sampler.check import out_of_vocabulary, unserved
from workerkit.components.sampler.logprobs import TokenLogprobs
from workerkit.framework.errors import IntegrityError, RequestError, UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import (
    DrawKeys,
    LogprobsTensors,
    RandomStream,
    Sampler,
    SamplerOutput,
    SamplerStage,
    SamplingContext,
)
from workerkit.framework.interfaces.sampling_params import SamplingParams


def _like_a_request(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    """A default may be what a request's parameter of the same name may be."""
    if (validator := attrs.fields_dict(SamplingParams)[attribute.name].validator) is not None:
        validator(instance, attribute, value)


def _default(value: float, doc: str) -> Any:
    return attrs.field(default=value, validator=_like_a_request, metadata={"doc": doc})


@attrs.frozen(kw_only=True)
class TorchSamplerConfig:
    """What a request gets that leaves a parameter unset, and which log-probabilities are reported."""

    temperature: float = _default(1.0, "0 is greedy")
    top_k: int = _default(0, "0 is off")
    top_p: float = _default(1.0, "1 is off")
    min_p: float = _default(0.0, "0 is off")
    typical_p: float = _default(1.0, "1 is off")
    top_n_sigma: float = _default(0.0, "0 is off")
    presence_penalty: float = _default(0.0, "-2 to 2; 0 is off")
    frequency_penalty: float = _default(0.0, "-2 to 2; 0 is off")
    repetition_penalty: float = _default(1.0, "1 is off")
    logprobs: Literal["raw", "processed"] = attrs.field(
        default="raw",
        validator=validators.in_(("raw", "processed")),
        metadata={"doc": "log-probabilities of the model's own logits, or of what the stages made of them"},
    )


class TorchSampler(Sampler):
    """Stages, then argmax for greedy rows and inverse-CDF sampling for the others."""

    def __init__(
        self,
        config: TorchSamplerConfig,
        shape: WorkerShape,
        context: DeviceContext,
        kernels: Kernels,
        stages: tuple[SamplerStage, ...],
    ) -> None:
        self._kernels = kernels
        self._stages = stages
        self._vocab_size = shape.vocab_size
        self._defaults = attrs.asdict(config, filter=lambda field, _: field.name != "logprobs")
        if problems := [*unserved(SamplingParams(**self._defaults), stages)]:
            raise UnsupportedError("components.sampler: " + "; ".join(problems))
        rows = shape.max_num_reqs
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=context.device)
        self._temperatures = torch.zeros(rows, dtype=torch.float32, device=context.device)
        self._prompt_lens = torch.zeros(rows, dtype=torch.int64, device=context.device)
        self._is_random = np.zeros(rows, dtype=bool)
        self._used = np.zeros((len(stages), rows), dtype=bool)
        self._reads_text = np.array([stage.reads_text for stage in stages], dtype=bool)
        self._history = TokenHistory(shape, context.device) if self._reads_text.any() else None
        self._entropy = np.random.default_rng()
        self._logprobs = TokenLogprobs(shape, context, kernels)
        self._raw_logprobs = config.logprobs == "raw"

    def check(self, params: SamplingParams) -> None:
        resolved = self._resolve(params)
        if problems := [*unserved(resolved, self._stages), *out_of_vocabulary(resolved, self._vocab_size)]:
            raise RequestError("; ".join(problems))
        for stage in self._stages:
            stage.applies_to(resolved)

    def _resolve(self, given: SamplingParams) -> SamplingParams:
        return attrs.evolve(given, **{k: v for k, v in self._defaults.items() if getattr(given, k) is None})

    def add(self, slot: int, request: NewRequest) -> None:
        self.clear(slot)
        params = self._resolve(request.sampling)
        request = attrs.evolve(request, sampling=params)
        self._seeds[slot] = int(self._entropy.integers(2**63)) if params.seed is None else params.seed
        self._temperatures[slot] = params.temperature or 0.0
        self._prompt_lens[slot] = request.prompt_len
        self._is_random[slot] = params.temperature != 0
        for number, stage in enumerate(self._stages):
            if stage.applies_to(params):
                self._used[number, slot] = True
                stage.add(slot, request)
        if self._history is not None and self._used[self._reads_text, slot].any():
            self._history.add(slot, request)
        self._logprobs.add(slot, request)

    def clear(self, slot: int) -> None:
        for number in np.flatnonzero(self._used[:, slot]):
            self._stages[number].clear(slot)
        self._used[:, slot] = self._is_random[slot] = False
        if self._history is not None:
            self._history.clear(slot)
        self._logprobs.clear(slot)

    def process(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        used = self._used[:, batch.plan.slots] & ~batch.plan.is_partial
        if batch.is_dummy or not np.count_nonzero(used):
            return logits
        rows_of = _requests(batch)
        for shown, stages in self._groups(used[:, rows_of]):
            rows = np.flatnonzero(shown)
            if len(rows) == len(rows_of):
                logits = self._apply(stages, logits, batch, batch.logits_rows, batch.logits_indices, rows_of)
                continue
            (where,) = upload(logits.device, rows)
            part = logits.index_select(0, where)
            part = self._apply(
                stages, part, batch, batch.logits_rows[where], batch.logits_indices[where], rows_of[rows]
            )
            logits.index_copy_(0, where, part)
        return logits

    def _groups(self, used: np.ndarray) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Runs of stages that the same rows use, so that these are copied once: which rows [num_logits], the stages."""
        numbers = np.flatnonzero(used.any(axis=1))
        for _, run in itertools.groupby(numbers.tolist(), key=lambda number: used[number].tobytes()):
            stages = [*run]
            yield used[stages[0]], stages

    def _apply(
        self,
        stages: Sequence[int],
        logits: torch.Tensor,
        batch: InputBatch,
        requests: torch.Tensor,
        tokens: torch.Tensor,
        host_requests: np.ndarray,
    ) -> torch.Tensor:
        """Stages over logits rows; batch row and token of each, on the device, and the batch row on the host."""
        slots, positions = batch.idx_mapping[requests], batch.positions[tokens]
        context = SamplingContext(
            slots=slots,
            positions=positions,
            prompt_lens=self._prompt_lens[slots],
            host_slots=batch.plan.slots[host_requests],
            text=self._text(stages, batch, host_requests, slots, positions),
        )
        for number in stages:
            logits = self._stages[number].apply(logits, context)
        return logits

    def _text(
        self,
        stages: Sequence[int],
        batch: InputBatch,
        requests: np.ndarray,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> Callable[[], torch.Tensor]:
        """Put together when the first stage asks for it."""
        history = self._history
        if history is None or not self._reads_text[stages].any():
            return _undeclared
        return functools.cache(lambda: history.text(batch, requests, slots, positions))

    def draw(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        # What a dummy batch costs should be what the costliest does: its memory is measured.
        is_random = self._is_random[batch.plan.slots] | batch.is_dummy
        if not np.count_nonzero(is_random):
            return self._kernels.greedy_tokens(logits)
        is_random = is_random[_requests(batch)]
        slots, positions = batch.idx_mapping[batch.logits_rows], batch.positions[batch.logits_indices]
        if is_random.all():
            return self._random(logits, slots, positions)
        (rows,) = upload(logits.device, np.flatnonzero(is_random))
        drawn = self._random(logits.index_select(0, rows), slots[rows], positions[rows])
        return self._kernels.greedy_tokens(logits).index_copy_(0, rows, drawn)

    def _random(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        uniform = self._kernels.uniform_from_seed(self._seeds[slots], positions, RandomStream.SAMPLING)
        return self._kernels.sample_tokens(logits, uniform)

    def keys(self, batch: InputBatch) -> DrawKeys:
        return DrawKeys(seeds=self._seeds[batch.idx_mapping], temperatures=self._temperatures[batch.idx_mapping])

    def raw(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor | None:
        return self._logprobs.select(logits, batch) if self._raw_logprobs else None

    def logprobs(
        self, raw: torch.Tensor | None, logits: torch.Tensor, batch: InputBatch, sampled: SamplerOutput
    ) -> LogprobsTensors | None:
        selected = raw if self._raw_logprobs else self._logprobs.select(logits, batch)
        return None if selected is None else self._logprobs.of_sampled(selected, batch, sampled)

    def prompt_logprobs(
        self, hidden: torch.Tensor, batch: InputBatch, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> LogprobsTensors | None:
        return self._logprobs.of_prompts(hidden, batch, compute_logits)

    def commit(self, batch: InputBatch, sampled: SamplerOutput) -> None:
        if self._history is not None:
            self._history.commit(batch, sampled)


def _requests(batch: InputBatch) -> np.ndarray:
    """[num_logits] int64: batch row of each logits row, on the host."""
    rows = np.arange(batch.num_reqs)
    return rows if batch.num_logits == batch.num_reqs else np.repeat(rows, batch.plan.num_draft_tokens + 1)


def _undeclared() -> torch.Tensor:
    raise IntegrityError("a sampler stage asks for the text, and does not say `reads_text`")
