"""Methods that plugins add to a worker."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

from workerkit.framework.errors import UnsupportedError, did_you_mean


class WorkerExtension(abc.ABC):  # noqa: B024  an extension is known by its own methods, whatever they are
    """A part whose public methods can be called through the worker, under their own names: see `Worker.call`.

    It is constructed by the container like any part, and together with the worker: whatever does not exist yet by then
    (LoadedModel, ModelRunner, KVCaches, …) is asked for as `Later[…]`. Methods are called between steps, from the
    thread that drives the worker, and there is a KV cache by then. A step may still be under way on the device: work
    on tensors that steps use goes through `DeviceRuntime.submit`, which keeps the order.

    An extension may observe steps too: its `@hookimpl` methods are not offered. No two extensions of a worker may offer
    the same name, nor may one offer a name that Worker has itself.
    """


def offered_methods(extension: type[WorkerExtension]) -> tuple[str, ...]:
    """Names of the methods that a class adds to the worker, those it inherits included; sorted."""
    return tuple(name for name in dir(extension) if not name.startswith("_") and _is_offered(getattr(extension, name)))


def _is_offered(member: object) -> bool:
    # Properties and values are not callable on a class; the hooks' marker leaves its name at what it marks.
    return callable(member) and not isinstance(member, type) and not hasattr(member, "workerkit_impl")


class ExtensionMethods:
    """The methods of a worker's extensions, by name. Raises UnsupportedError for a name that two of them offer: at
    assembly only extensions that are classes can be compared."""

    def __init__(self, extensions: Iterable[WorkerExtension]) -> None:
        self._methods: dict[str, Callable[..., Any]] = {}
        for extension in extensions:
            for name in offered_methods(type(extension)):
                if name in self._methods:
                    raise UnsupportedError(f"two worker extensions offer the method {name!r}; leave one of them out")
                self._methods[name] = getattr(extension, name)

    @property
    def names(self) -> tuple[str, ...]:
        """In config order, each extension's sorted."""
        return tuple(self._methods)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See Worker."""
        if method not in self._methods:
            configure = (
                "components.worker_extensions names no extension that has any; "
                "`workerkit components worker_extensions` lists those that are installed"
            )
            hint = did_you_mean(method, self._methods) if self._methods else configure
            raise UnsupportedError(f"no worker extension has a method {method!r}; {hint}")
        return self._methods[method](*args, **kwargs)
