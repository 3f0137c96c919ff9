"""A recorder of assemblies: every construction and every call of an interface method, in order, with its values."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from workerkit.framework.assembly import Assembly, assemble
from workerkit.framework.interfaces.model import LoadedModel, Network
from workerkit.framework.plan import Node
from workerkit.framework.registry import Registry


@attrs.define
class Call:
    """One construction (`method` is empty) or one call of an interface method.

    `args` are by parameter name and, like `result`, copies: persistent buffers may be overwritten, the record is not.
    """

    key: str
    method: str
    args: Mapping[str, Any] = attrs.field(factory=dict)
    result: Any = None

    @property
    def name(self) -> str:
        """`sampler.draw`, or `build:sampler` for the construction."""
        return f"{self.key}.{self.method}" if self.method else f"build:{self.key}"


class Recorder:
    """Assembles workers whose parts write down what happens to them.

    A part keeps its class's behaviour: it gets a subclass whose interface methods write a Call first. Key is the part's
    place in the config (`sampler`, `sampler.stages[0]`); stage values are built under their class's name, and the
    network's methods are recorded as `network`.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def assemble(
        self,
        source: str | os.PathLike[str] | Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        registry: Registry | None = None,
    ) -> Assembly:
        """Like `workerkit.framework.assembly.assemble`."""
        plan = assemble(source, overrides, registry).plan
        nodes = {
            key: attrs.evolve(node, factory=functools.partial(self._build, node)) for key, node in plan.nodes.items()
        }
        return Assembly(attrs.evolve(plan, nodes=nodes), {}, observed=True)

    def names(self, *wanted: str) -> list[str]:
        """Names of the calls so far, in order; `wanted` filters by name or by key."""
        return [call.name for call in self.calls if not wanted or call.name in wanted or call.key in wanted]

    def of(self, name: str) -> list[Call]:
        """The calls of one name."""
        return [call for call in self.calls if call.name == name]

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()

    def _build(self, node: Node, **arguments: Any) -> Any:
        self.calls.append(Call(node.key, ""))
        part = node.factory(**arguments)
        if node.role is not None:
            self._watch(part, node.role.interface, node.key)
        elif isinstance(part, LoadedModel):
            self._watch(part.network, Network, "network")
        return part

    def _watch(self, part: Any, interface: type, key: str) -> None:
        cls = type(part)
        sides = [base for base in cls.__mro__ if issubclass(base, interface) and inspect.isabstract(base)]
        names = {
            name
            for side in (interface, *sides)
            for name in dir(side)
            if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(cls, name))
        }
        methods = {name: self._recorded(key, name, getattr(cls, name)) for name in names}
        part.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **methods})

    def _recorded(self, key: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def recorded(part: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(part, *args, **kwargs).arguments
            call = Call(key, name, {k: copied(v) for k, v in list(bound.items())[1:]})
            self.calls.append(call)
            result = method(part, *args, **kwargs)
            call.result = copied(result)
            return result

        return recorded


def copied(value: Any) -> Any:
    """The value with every tensor and array in it copied."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple | list):
        return type(value)(copied(item) for item in value)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if attrs.has(type(value)):
        fields = [a for a in attrs.fields(type(value)) if a.init]
        return attrs.evolve(value, **{a.alias: copied(getattr(value, a.name)) for a in fields})
    return value
