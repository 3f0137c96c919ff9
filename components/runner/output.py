"""What a step sends to the host: tokens and log-probabilities, copied while the device goes on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch

from workerkit.framework.interfaces.device import DeviceRuntime, Pending
from workerkit.framework.interfaces.request import Logprobs, ModelRunnerOutput, StepOutput
from workerkit.framework.interfaces.sampling import LogprobsTensors, SamplerOutput


@attrs.frozen(kw_only=True, eq=False)
class StepResult:
    """What a step produced, on the device."""

    sampled: SamplerOutput
    logprobs: LogprobsTensors | None = None
    prompt_logprobs: LogprobsTensors | None = None


class HostCopies:
    """A StepResult on its way to the host. The copies start before anything overwrites what they read."""

    def __init__(self, device: DeviceRuntime, req_ids: tuple[str, ...], result: StepResult) -> None:
        self._req_ids = req_ids
        self._device = device
        self._drafts: Pending[torch.Tensor] | None = None
        self._token_ids = device.copy_to_host(result.sampled.token_ids)
        self._num_sampled = device.copy_to_host(result.sampled.num_sampled)
        self._logprobs = result.logprobs and _LogprobsCopy(device, result.logprobs)
        self._prompt_logprobs = result.prompt_logprobs and _LogprobsCopy(device, result.prompt_logprobs)

    def add_drafts(self, drafts: torch.Tensor | None) -> None:
        """[num_reqs, K], which are proposed when the copies above are under way already; None without speculation."""
        if drafts is not None:
            self._drafts = self._device.copy_to_host(drafts)

    def wait(self) -> ModelRunnerOutput:
        """The step's answer, when all of it has arrived."""
        counts = self._num_sampled.wait().tolist()
        rows = self._token_ids.wait().tolist()
        sampled = tuple(tuple(row[:count]) for row, count in zip(rows, counts, strict=True))
        return ModelRunnerOutput(
            req_ids=self._req_ids,
            sampled_token_ids=sampled,
            draft_token_ids=() if self._drafts is None else cut_drafts(self._drafts.wait().tolist()),
            logprobs=self._logprobs.wait(dict(zip(self._req_ids, counts, strict=True))) if self._logprobs else {},
            prompt_logprobs=self._prompt_logprobs.wait(None) if self._prompt_logprobs else {},
        )


def cut_drafts(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The drafts of each row up to the first -1."""
    return tuple(tuple(itertools.takewhile(lambda token: token >= 0, row)) for row in rows)


class _LogprobsCopy:
    def __init__(self, device: DeviceRuntime, tensors: LogprobsTensors) -> None:
        self._tensors = tensors
        self._copies = [device.copy_to_host(part) for part in (tensors.token_ids, tensors.logprobs, tensors.ranks)]

    def wait(self, counts: dict[str, int] | None) -> dict[str, Logprobs]:
        """By request; `counts` says how many of its positions count, None all of them."""
        token_ids, logprobs, ranks = (copy.wait().numpy() for copy in self._copies)
        chosen, result = 1 + self._tensors.top, {}
        for span in self._tensors.spans:
            count = span.count if counts is None else counts[span.req_id]
            rows = slice(span.start, span.start + count)
            columns = [*range(1 + span.num_top), *range(chosen, chosen + span.num_chosen)]
            if count:
                result[span.req_id] = Logprobs(
                    token_ids=token_ids[rows][:, columns],
                    logprobs=logprobs[rows][:, columns],
                    ranks=ranks[rows],
                    num_top=span.num_top,
                )
        return result


class ReadyOutput(StepOutput):
    """An answer that is on the host already; `output_ready` has fired."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get(self) -> ModelRunnerOutput:
        return self._output
