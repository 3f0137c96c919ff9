"""Observers see steps and change nothing. A part of any role may observe too: it carries `@hookimpl` methods."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from workerkit.framework.interfaces.batch import InputBatch
    from workerkit.framework.interfaces.model import ModelOutput
    from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput
    from workerkit.framework.interfaces.sampling import SamplerOutput


class Observer(abc.ABC):  # noqa: B024  an observer is known by its @hookimpl methods, all optional
    """A part that only watches: metrics, taps, tracers."""

    @property
    def taps(self) -> Sequence[str]:
        """Tap points of the model that `forward_finished` should carry."""
        return ()


@attrs.frozen
class Phase:
    """A stretch of time in which one thread was busy with one thing of a step."""

    name: str
    step: int  # 1 is the worker's first that scheduled tokens
    begin: int  # ns of time.perf_counter_ns
    end: int
    thread: str


class StepTimings(Observer):
    """An observer that can be asked how long the phases of steps take."""

    @abc.abstractmethod
    def start(self) -> None:
        """Forget what was recorded, and record from now on."""

    @abc.abstractmethod
    def stop(self) -> tuple[Phase, ...]:
        """Record no more. What was recorded, in the order in which it ended."""


class StepHooks(abc.ABC):
    """Calls the hook implementations of a worker's parts, in config order. See `framework/hooks.py` for each hook."""

    @abc.abstractmethod
    def step_started(self, output: SchedulerOutput) -> None: ...

    @abc.abstractmethod
    def batch_prepared(self, batch: InputBatch) -> None: ...

    @abc.abstractmethod
    def forward_finished(self, batch: InputBatch, output: ModelOutput) -> None: ...

    @abc.abstractmethod
    def tokens_sampled(self, batch: InputBatch, output: SamplerOutput) -> None: ...

    @abc.abstractmethod
    def drafts_proposed(self, batch: InputBatch) -> None: ...

    @abc.abstractmethod
    def step_finished(self, batch: InputBatch) -> None: ...

    @abc.abstractmethod
    def output_ready(self, output: ModelRunnerOutput) -> None: ...

    @abc.abstractmethod
    def host_tokens_read(self, part: str) -> None: ...

    @property
    @abc.abstractmethod
    def failures(self) -> tuple[str, ...]:
        """Observers that were switched off after an error, with the error."""
