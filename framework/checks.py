"""What a whole plan must fulfil, beyond the fit of each part to its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from workerkit.framework.interfaces.device import DeviceRuntime
from workerkit.framework.interfaces.engine import Scheduler
from workerkit.framework.interfaces.graph import GraphManager
from workerkit.framework.interfaces.sampling import SlotPart
from workerkit.framework.interfaces.speculation import DraftWeights, Speculator
from workerkit.framework.plan import Node

T = TypeVar("T")


def _parts(nodes: Mapping[str, Node], interface: type[T]) -> Iterator[tuple[str, type[T], Node]]:
    for key, node in nodes.items():
        if isinstance(node.factory, type) and issubclass(node.factory, interface):
            yield f"components.{key} {node.name!r}", node.factory, node


def one_draft_is_enough(nodes: Mapping[str, Node]) -> list[str]:
    """There is one draft: proposers that work with its network cannot share a worker."""
    users = [name for name, _, node in _parts(nodes, Speculator) if DraftWeights.__name__ in node.edges()]
    if len(users) < 2:
        return []
    return [f"{' and '.join(users)} each need a draft network, and components.draft brings one: name one of them"]


def graphs_are_captured_by_the_device(nodes: Mapping[str, Node]) -> list[str]:
    """Captured graphs are the device's."""
    needing = [name for name, part, _ in _parts(nodes, GraphManager) if part.needs_device_graphs]
    without = [name for name, part, _ in _parts(nodes, DeviceRuntime) if not part.captures_graphs]
    return [
        f"{graph} captures graphs of the device, and {device} has none: right would be `graph: none`"
        for graph in needing
        for device in without
    ]


def host_tokens_are_known(nodes: Mapping[str, Node]) -> list[str]:
    """A part that reads sampled tokens on the host cannot work where steps are planned before these are known."""
    ahead = [name for name, part, node in _parts(nodes, Scheduler) if part.plans_ahead(node.config)]
    readers = [name for name, part, _ in _parts(nodes, SlotPart) if part.reads_host_tokens]
    return [
        f"{reader} reads sampled tokens on the host, and {scheduler} plans steps before they are known: "
        "right would be a scheduler without asynchronous scheduling"
        for reader in readers
        for scheduler in ahead
    ]
