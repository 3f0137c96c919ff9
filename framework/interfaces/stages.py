"""What a constructor may ask for besides parts: a part that does not exist yet, and the door to the KV stage."""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

from workerkit.framework.interfaces.kv_cache import KVLayout

T = TypeVar("T")


class Later(Generic[T]):
    """A part (or stage value) that is built when it is first called for, and the same one each time after."""

    def __init__(self, get: Callable[[], T]) -> None:
        self._get = get

    @cached_property
    def _part(self) -> T:
        return self._get()

    def __call__(self) -> T:
        return self._part


class KVStage(abc.ABC):
    """Only a worker may ask for it: it decides when the KV cache, and all that lives on it, comes to life."""

    @abc.abstractmethod
    def enter(self, layout: KVLayout) -> None:
        """Publish the layout. From now on parts that need it can be built. Raises StageError the second time."""

    @abc.abstractmethod
    def trial(self, layout: KVLayout, interface: type[T]) -> T:
        """Build the same parts over a throw-away layout and return one of them; they die with the result."""
