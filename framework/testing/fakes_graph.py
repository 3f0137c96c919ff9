"""Graphs of a device that does not exist: they record what torch is asked to do, and do it again at replay.

As strict as real ones: results lie where they lay at the capture and are garbage before the first replay, numbers of
the host are remembered, and whatever reads the device on the host, or has a shape that depends on values, is refused
during a capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from workerkit.framework.interfaces.device import GraphDevice

_READS_ON_HOST = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "equal"),
    *("nonzero", "masked_select", "unique", "argwhere"),
}
_HAS_FREE_SHAPE = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}


class CaptureError(RuntimeError):
    """Something that no device can capture."""


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS_ON_HOST:
            raise CaptureError(f"{func.__name__} during a capture")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: FakeGraphDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _HAS_FREE_SHAPE:
            raise CaptureError(f"{func} during a capture")
        if func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise CaptureError("an index of bools, whose result's shape depends on them, during a capture")
        operation = _Operation(func, args, kwargs or {})
        self._device.operations.append(operation)
        return operation.result


class _Operation:
    """One op and the tensors that it filled."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self.result = func(*args, **kwargs)

    def run(self) -> None:
        _fill(self.result, self._func(*self._args, **self._kwargs))

    def spoil(self) -> None:
        """Garbage where the op allocated its result."""
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors([*self._args, *self._kwargs.values()])}
        for tensor in _tensors(self.result):
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in given:
                tensor.fill_(float("nan"))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _fill(old: Any, new: Any) -> None:
    for target, source in zip(_tensors(old), _tensors(new), strict=True):
        if target.data_ptr() != source.data_ptr():  # neither a view nor in place
            target.copy_(source)


class FakeStream:
    """Work is done at once; only a graph that waits for an event goes on later."""

    def __init__(self, device: FakeGraphDevice, name: str) -> None:
        self._device = device
        self.name = name

    def wait_stream(self, stream: FakeStream) -> None:
        """See DeviceStream."""
        self._device.note(f"wait for {stream.name}", self)

    def synchronize(self) -> None:
        """See DeviceStream."""
        self._device.note("synchronize", self)


class FakeEvent:
    """Set by `record`; a graph that waits for it goes on then."""

    def __init__(self, device: FakeGraphDevice) -> None:
        self._device = device
        self.is_set = False

    def wait(self, stream: FakeStream) -> None:
        """Captured: the graph stops here until the event is set."""
        self._device.note("event.wait", stream)
        self._device.operations.append(self)

    def reset(self, stream: FakeStream) -> None:
        """Captured with `wait`."""
        self._device.note("event.reset", stream)

    def record(self, stream: FakeStream) -> None:
        """The graph may go on."""
        self._device.note("event.record", stream)
        self.is_set = True
        self._device.go_on()


class FakeTask:
    """Operations within a graph that may be exchanged."""

    def __init__(self) -> None:
        self.operations: list[Any] = []


class FakeCapturedGraph:
    """What was recorded between `capture_begin` and `capture_end`."""

    def __init__(self, device: FakeGraphDevice) -> None:
        self._device = device
        self._operations: list[Any] = []
        self._modes = ExitStack()

    def capture_begin(self, pool: Any = None) -> None:
        """See DeviceGraph."""
        self._device.note(f"begin capture in {pool}")
        assert not self._device.is_capturing, "one capture at a time"
        self._device.is_capturing = True
        self._device.operations = self._operations
        self._modes.enter_context(_NoHostReads())
        self._modes.enter_context(_Recording(self._device))

    def capture_end(self) -> None:
        """See DeviceGraph."""
        self._modes.close()
        self._device.is_capturing = False
        self._device.note("end capture")
        for operation in self._operations:
            if isinstance(operation, _Operation):
                operation.spoil()

    def replay(self) -> None:
        """See DeviceGraph."""
        self._device.note("replay")
        assert not self._device.is_capturing, "no replay during a capture"
        assert self._operations, "nothing was captured, or it was reset"
        self._device.running = self._steps()
        self._device.go_on()

    def _steps(self) -> Iterator[None]:
        for operation in self._operations:
            if isinstance(operation, FakeEvent):
                while not operation.is_set:
                    yield
                operation.is_set = False
            for one in operation.operations if isinstance(operation, FakeTask) else [operation]:
                if isinstance(one, _Operation):
                    one.run()

    def reset(self) -> None:
        """See DeviceGraph."""
        self._device.note("reset")
        self._operations.clear()


class FakeGraphDevice(GraphDevice):
    """Notes what is asked of it in `calls`: (what, name of the stream)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.is_capturing = False
        self.operations: list[Any] = []  # where operations are recorded now
        self.running: Iterator[None] = iter(())  # the last replay, which may wait for an event
        self._streams = [FakeStream(self, "main")]  # the last one is current
        self._num_streams = 0
        self._num_pools = 0
        self._outside: list[Any] = []  # where operations were recorded before a task began
        self._update = ExitStack()

    def note(self, what: str, stream: FakeStream | None = None) -> None:
        """Write a call down."""
        self.calls.append((what, (stream or self._streams[-1]).name))

    def go_on(self) -> None:
        """The last replay runs as far as it can."""
        next(self.running, None)

    @property
    def is_idle(self) -> bool:
        """Whether the last replay came to its end."""
        return next(self.running, "ended") == "ended"

    def new_stream(self) -> FakeStream:
        self._num_streams += 1
        return FakeStream(self, f"stream {self._num_streams}")

    def current_stream(self) -> FakeStream:
        return self._streams[-1]

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    def new_pool(self) -> Any:
        self._num_pools += 1
        return f"pool {self._num_pools}"

    def new_graph(self) -> FakeCapturedGraph:
        return FakeCapturedGraph(self)

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    def begin_task(self, stream: Any) -> None:
        self.note("begin task", stream)
        self._outside, self.operations = self.operations, []

    def end_task(self, stream: Any) -> FakeTask:
        self.note("end task", stream)
        task = FakeTask()
        task.operations, self.operations = self.operations, self._outside
        self.operations.append(task)
        return task

    def begin_update(self, stream: Any, handle: FakeTask) -> None:
        self.note("begin update", stream)
        handle.operations = self.operations = []
        self._update.enter_context(_Recording(self))

    def end_update(self, stream: Any) -> None:
        self._update.close()
        self.note("end update", stream)
