"""What a whole plan must fulfil, beyond the fit of each part to its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from workerkit.framework.interfaces.device import DeviceContext, DeviceRuntime
from workerkit.framework.interfaces.engine import Scheduler
from workerkit.framework.interfaces.graph import GraphManager
from workerkit.framework.interfaces.sampling import SlotPart
from workerkit.framework.interfaces.speculation import DraftWeights, Speculator
from workerkit.framework.interfaces.worker import Worker
from workerkit.framework.interfaces.worker_extension import WorkerExtension, offered_methods
from workerkit.framework.plan import Node

T = TypeVar("T")


def parts(nodes: Mapping[str, Node], interface: type[T]) -> Iterator[tuple[str, type[T], Node]]:
    """(name for messages, class, node) of each that is of that kind."""
    for key, node in nodes.items():
        if isinstance(node.factory, type) and issubclass(node.factory, interface):
            yield f"components.{key} {node.name!r}", node.factory, node


def one_draft_is_enough(nodes: Mapping[str, Node]) -> list[str]:
    """There is one draft: proposers that work with its network cannot share a worker."""
    users = [name for name, _, node in parts(nodes, Speculator) if DraftWeights.__name__ in node.edges()]
    if len(users) < 2:
        return []
    return [f"{' and '.join(users)} each need a draft network, and components.draft brings one: name one of them"]


def graphs_are_captured_by_the_device(nodes: Mapping[str, Node]) -> list[str]:
    """Captured graphs are the device's."""
    needing = [name for name, part, _ in parts(nodes, GraphManager) if part.needs_device_graphs]
    without = [name for name, part, _ in parts(nodes, DeviceRuntime) if not part.captures_graphs]
    return [
        f"{graph} captures graphs of the device, and {device} has none: right would be `graph: none`"
        for graph in needing
        for device in without
    ]


def host_tokens_are_known(nodes: Mapping[str, Node]) -> list[str]:
    """A part that reads sampled tokens on the host cannot work where steps are planned before these are known."""
    ahead = [name for name, part, node in parts(nodes, Scheduler) if part.plans_ahead(node.config)]
    readers = [name for name, part, _ in parts(nodes, SlotPart) if part.reads_host_tokens]
    return [
        f"{reader} reads sampled tokens on the host, and {scheduler} plans steps before they are known: "
        "right would be a scheduler without asynchronous scheduling"
        for reader in readers
        for scheduler in ahead
    ]


def extension_methods_are_distinct(nodes: Mapping[str, Node]) -> list[str]:
    """A name means one method: no two extensions share one, and none takes a name of the worker's own."""
    offering: dict[str, list[str]] = {}
    for name, part, _ in parts(nodes, WorkerExtension):
        for method in offered_methods(part):
            offering.setdefault(method, []).append(name)
    shared = [
        f"{' and '.join(names)} each offer the method {method!r}: rename it in one of them, or leave one out"
        for method, names in offering.items()
        if len(names) > 1
    ]
    taken = [
        f"{name} offers the method {method!r}, which every worker has itself: it needs another name"
        for method, names in offering.items()
        if method in dir(Worker)
        for name in names
    ]
    return shared + taken


def extensions_open_no_device(nodes: Mapping[str, Node]) -> list[str]:
    """Extensions are built with the worker, and it is the worker that opens the device and loads the model."""
    opening = {DeviceContext.__name__}
    while more := {key for key, node in nodes.items() if node.edges(lazy=False) & opening} - opening:
        opening |= more
    return [
        f"{name} needs {', '.join(early)} at once, which opens the device before the worker does: ask for Later[…]"
        for name, _, node in parts(nodes, WorkerExtension)
        if (early := sorted(node.edges(lazy=False) & opening))
    ]
