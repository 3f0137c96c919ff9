"""A checked plan becomes a dependency-injector container, and the container a worker."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import attrs
from dependency_injector import containers, providers

from workerkit.framework import config as configs
from workerkit.framework.errors import StageError
from workerkit.framework.hooks import WorkerHooks
from workerkit.framework.interfaces.engine import Engine
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.stages import KVStage, Later
from workerkit.framework.interfaces.worker import Worker
from workerkit.framework.plan import Node, Plan, Wire, make_plan
from workerkit.framework.registry import Registry, Role

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Cell:
    """A published stage value."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: list[Any] = []
        self._lock = threading.Lock()

    def get(self) -> Any:
        if not self._values:
            raise StageError(f"{self._name} does not exist yet: the worker has not reached that stage")
        return self._values[0]

    def put(self, value: Any) -> None:
        with self._lock:
            if self._values:
                raise StageError(f"{self._name} is already there: that stage can be entered once")
            self._values.append(value)


class _KVStage(KVStage):
    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def enter(self, layout: KVLayout) -> None:
        self._assembly._cells[KVLayout.__name__].put(layout)

    def trial(self, layout: KVLayout, interface: type[T]) -> T:
        derived = self._assembly._derive({}, observed=False)
        derived._cells[KVLayout.__name__].put(layout)
        return derived._of(interface)


class Assembly:
    """The parts of one worker. They are built when first asked for, each once; nothing is shared between assemblies but
    what `with_override` passes on."""

    def __init__(self, plan: Plan, shared: Mapping[str, providers.Provider[Any]], observed: bool) -> None:
        self.plan = plan
        self._hooks = WorkerHooks()
        self._observed = observed
        self._built: list[str] = []
        self._cells = {name: _Cell(name) for name in plan.published}
        self._container = containers.DynamicContainer()
        self._sources: dict[str, providers.Provider[Any]] = dict(shared)
        for name, cell in self._cells.items():
            self._container.set_provider(name, providers.Callable(cell.get))
        # Wires point at providers, so those are made first and filled afterwards: leaves, then what needs them.
        for key in self._order():
            node = plan.nodes[key]
            if key not in self._sources:
                self._sources[key] = self._source(node)
            self._container.set_provider(key, providers.ThreadSafeSingleton(self._join, node, self._sources[key]))

    def _order(self) -> list[str]:
        eager = {key: node.edges(lazy=False) - set(self.plan.published) for key, node in self.plan.nodes.items()}
        return [*TopologicalSorter(eager).static_order()]

    def _source(self, node: Node) -> providers.Provider[Any]:
        arguments = {name: self._provider(wire) for name, wire in node.wires.items()}
        if node.config is not None:
            arguments["config"] = providers.Object(node.config)
        return providers.ThreadSafeSingleton(_build, node, **arguments)

    def _provider(self, wire: Wire) -> Any:
        if wire.special is StepHooks:
            return providers.Object(self._hooks)
        if wire.special is KVStage:
            return providers.Object(_KVStage(self))
        if wire.bundle is not None:
            return providers.Factory(wire.bundle_class, **{n: self._provider(w) for n, w in wire.bundle.items()})
        if wire.names is not None:
            return providers.Callable(_named, wire.names, *[self._container.providers[key] for key in wire.keys])
        if wire.many:
            return providers.Callable(_tuple, *[self._container.providers[key] for key in wire.keys])
        if wire.keys and wire.later:
            key = wire.keys[0]
            return providers.Object(Later(lambda: self._container.providers[key]()))
        if wire.keys:
            return self._container.providers[wire.keys[0]]
        return providers.Object(wire.value)

    def _join(self, node: Node, part: Any) -> Any:
        self._built.append(node.key)
        if self._observed and node.role is not None:
            self._hooks.join(node.order, node.key, part)
        return part

    def get(self, role: Role[T]) -> T:
        """The part that fills a role, built now if it was not. Raises StageError when its stage has not come."""
        return self._built_as(role.interface, role.name)

    def get_all(self, role: Role[T]) -> tuple[T, ...]:
        """The parts of a role that takes many."""
        keys = [key for key, node in self.plan.nodes.items() if node.role is role]
        return tuple(self._container.providers[key]() for key in keys)

    def value(self, kind: type[T]) -> T:
        """A stage value, like LoadedModel. Raises StageError when its stage has not come."""
        return self._built_as(kind, kind.__name__)

    def _of(self, interface: type[T]) -> T:
        key = next(k for k, n in self.plan.nodes.items() if n.role and n.role.interface is interface)
        return self._built_as(interface, key)

    def _built_as(self, kind: type[T], key: str) -> T:
        return self._container.providers[key]()  # type: ignore[no-any-return]  # the container is untyped

    @property
    def worker(self) -> Worker:
        """The worker, not yet started."""
        return self._of(Worker)

    @property
    def engine(self) -> Engine:
        """The standalone engine around the worker, not yet started."""
        return self._of(Engine)

    def with_override(self, role: Role[T], part: T) -> Assembly:
        """An assembly with `part` in the role's place. It shares every instance that neither depends on the part nor
        keeps state of a worker (the loaded model, say) and has its own of all others; this assembly stays as it is.
        Also a context manager, which shuts the other worker down at the end.

        Raises TypeError for a part of the wrong kind.
        """
        keys = [key for key, node in self.plan.nodes.items() if node.role is role]
        if role.many:
            raise TypeError(f"{role.name} is a list of parts; override it in the config")
        if not isinstance(part, role.interface):
            raise TypeError(f"{role.name} is filled by a {role.interface.__name__}, not by a {type(part).__name__}")
        return self._derive(
            {
                key: Node(
                    key=key, factory=lambda: part, role=role, name=type(part).__name__, order=self.plan.nodes[key].order
                )
                for key in keys
            },
            observed=True,
        )

    def _derive(self, replaced: Mapping[str, Node], observed: bool) -> Assembly:
        plan = attrs.evolve(self.plan, nodes={**self.plan.nodes, **replaced})
        own = plan.dependents({*replaced, *plan.published, *(k for k, n in plan.nodes.items() if _is_per_worker(n))})
        shared = {key: source for key, source in self._sources.items() if key not in own}
        return Assembly(plan, shared, observed)

    def __enter__(self) -> Assembly:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Shut the worker down if it was ever built."""
        for interface in (Engine, Worker):
            for key in self._built:
                if (role := self.plan.nodes[key].role) and role.interface is interface:
                    self._container.providers[key]().shutdown()

    @property
    def hooks(self) -> WorkerHooks:
        """The worker's own plugin manager."""
        return self._hooks


def _is_per_worker(node: Node) -> bool:
    """Whether a node holds its worker's hooks, stages, requests or caches, which no other assembly may share."""

    def asks(wire: Wire) -> bool:
        return wire.special is not None or any(asks(inner) for inner in (wire.bundle or {}).values())

    return (node.role is not None and node.role.per_worker) or any(asks(wire) for wire in node.wires.values())


def _tuple(*parts: Any) -> tuple[Any, ...]:
    return parts


def _named(names: tuple[str, ...], *parts: Any) -> dict[str, Any]:
    return dict(zip(names, parts, strict=True))


def _build(node: Node, **arguments: Any) -> Any:
    try:
        return node.factory(**arguments)
    except Exception as error:
        error.add_note(f"while building components.{node.key} ({node.name or node.factory.__name__})")
        raise


def assemble(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> Assembly:
    """Check a config and wire the worker that it describes. Nothing is built, no model is read, no device is touched.

    `source`: a YAML file or a mapping. `overrides`: dotted paths (`{"components.sampler.top_k": 5}`) or nested
    mappings that win over the file. `registry`: what can be assembled; None takes the installed plugins.
    Raises ConfigError with every problem.
    """
    from workerkit.framework.plugins import load_plugins

    document: Mapping[str, Any] = source if isinstance(source, Mapping) else configs.read_file(Path(source))
    document = configs.with_overrides(document, overrides or {})
    plan = make_plan(registry or load_plugins().registry, document)
    for node in plan.nodes.values():
        if node.why.startswith("auto"):
            _log.info("components.%s: %s (%s)", node.key, node.name, node.why)
    return Assembly(plan, {}, observed=True)
