"""Ops with lengths from the host inside captured graphs: launched anew, beside the replay that waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.device import GraphDevice
from workerkit.framework.interfaces.graph import GraphTasks


@attrs.frozen(eq=False)
class Task:
    """One op of a graph."""

    provider: str
    op: Callable[[Mapping[str, Any]], None]
    handle: Any
    event: Any  # the graph waits for it before the op


class UpdatableTasks(GraphTasks):
    """While a graph is captured, ops become tasks of it."""

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._recorded: list[Task] | None = None
        self._stream = device.new_stream()  # updates run beside replays

    @contextmanager
    def recorded(self) -> Iterator[list[Task]]:
        """The tasks of the graph that is captured inside."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def launch(self, provider: str, op: Callable[[Mapping[str, Any]], None], parameters: Mapping[str, Any]) -> None:
        if self._recorded is None:
            op(parameters)
            return
        device, stream = self._device, self._device.current_stream()
        event = device.new_event()
        event.wait(stream)
        event.reset(stream)
        device.begin_task(stream)
        op(parameters)
        self._recorded.append(Task(provider, op, device.end_task(stream), event))

    def replay(
        self,
        replay: Callable[[], None],
        tasks: Sequence[Task],
        parameters: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        """Replay a graph and hand its tasks their parameters. Raises IntegrityError when these are not as many."""
        if not tasks and not parameters:
            replay()
            return
        given = {provider: len(values) for provider, values in parameters.items() if values}
        if given != Counter(task.provider for task in tasks):
            wanted = dict(Counter(task.provider for task in tasks))
            raise IntegrityError(f"host parameters for {given} ops, the graph holds {wanted}")
        device = self._device
        # Before the replay is issued: no update may overtake the replay before it, and this one waits for them.
        self._stream.wait_stream(device.current_stream())
        replay()
        values = {provider: iter(sequence) for provider, sequence in parameters.items()}
        with device.use(self._stream):
            for task in tasks:
                device.begin_update(self._stream, task.handle)
                task.op(next(values[task.provider]))
                device.end_update(self._stream)
                task.event.record(self._stream)
