"""Adapters that vLLM's requests bring along: loaded when they are first needed, and again when they were dropped."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.worker import Worker


class Adapters:
    """`limit` are kept, of which the longest unused goes first. There may be more as long as requests need them: vLLM
    counts those of the requests that it schedules, and the worker still holds others, which wait for their last token
    or were preempted."""

    def __init__(self, worker: Worker, limit: int) -> None:
        self._worker = worker
        self._limit = limit
        self._sources: dict[str, str] = {}  # of all that were ever named
        self._ids: OrderedDict[str, int] = OrderedDict()  # those loaded, the longest unused first
        self._pinned: set[str] = set()
        self._wanted: set[str] = set()  # by requests of the step that is being read, of which the worker knows nothing

    def begin(self) -> None:
        """A step is being read."""
        self._wanted.clear()

    def name(self, request: Any) -> str | None:
        """Of a vLLM LoRARequest. Its number keeps two of one name apart. Raises RequestError."""
        if request is None:
            return None
        if request.load_inplace:
            raise RequestError(f"adapter {request.lora_name!r}: load_inplace is not served; remove the old one before")
        name = f"{request.lora_name}#{request.lora_int_id}"
        self._sources[name] = request.lora_path
        return name

    def use(self, name: str | None) -> None:
        """Load it if need be. Raises what is wrong with it."""
        if name is None:
            return
        if name not in self._ids:
            while len(self._ids) >= self._limit and self._drop_one():
                pass
            self._worker.load_adapter(name, self._sources[name])
            self._ids[name] = int(name.rpartition("#")[2])
        self._ids.move_to_end(name)
        self._wanted.add(name)

    def _drop_one(self) -> bool:
        for name in self._ids:
            if name in self._pinned or name in self._wanted:
                continue
            try:
                self._worker.remove_adapter(name)
            except RequestError:  # in use
                continue
            del self._ids[name]
            return True
        return False

    # What vLLM's engine calls

    def add(self, request: Any) -> bool:
        """Load an adapter ahead of its first request."""
        self.use(self.name(request))
        return True

    def remove(self, number: int) -> bool:
        """Whether there was one of that number."""
        for name in [name for name, own in self._ids.items() if own == number]:
            self._worker.remove_adapter(name)
            del self._ids[name]
            self._pinned.discard(name)
            return True
        return False

    def pin(self, number: int) -> bool:
        """Never drop it for another one."""
        found = [name for name, own in self._ids.items() if own == number]
        self._pinned.update(found)
        return bool(found)

    @property
    def numbers(self) -> set[int]:
        """Of all that are loaded."""
        return set(self._ids.values())
