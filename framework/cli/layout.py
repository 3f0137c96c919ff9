"""A layered drawing of a graph without circles: longest-path layers, then rows that keep lines short and straight."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from statistics import mean

import attrs

SWEEPS = 30
Spot = tuple[str, int]  # a node in its layer, or a point that the node's lines pass in a later layer


@attrs.frozen
class Layout:
    """Where nodes go, in layers from the left and in pixels from the top; and the points that each line passes."""

    layer: Mapping[str, int]
    y: Mapping[Spot, float]
    height: float

    def route(self, source: str, target: str) -> list[Spot]:
        """The points of a line from a node to one that needs it; a line that runs backwards has no points between."""
        first, last = self.layer[source], self.layer[target]
        return [(source, first), *((source, i) for i in range(first + 1, last)), (target, last)]


def layout(needs: Mapping[str, set[str]], lazy: Mapping[str, set[str]], node_gap: float, line_gap: float) -> Layout:
    """`needs`: what each node needs at once, without a circle; `lazy`: what it asks for later, which may close one."""
    layer = _layers(needs, lazy)
    both = {node: needs[node] | lazy[node] for node in needs}
    users: dict[str, list[str]] = {node: [] for node in needs}
    for node, sources in both.items():
        for source in sources:
            users[source].append(node)
    columns: list[list[Spot]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    neighbours: dict[Spot, list[Spot]] = {}
    for node in needs:
        end = max([layer[node] + 1, *(layer[user] for user in users[node])])
        for i in range(layer[node], end):  # one bundle of lines for a node, however many use it
            columns[i].append((node, i))
            neighbours.setdefault((node, i), [])
    for node, own in layer.items():
        for user in users[node]:
            if layer[user] > own:
                _join(neighbours, (node, layer[user] - 1), (user, layer[user]))
        for i in range(own + 1, len(columns)):
            if (node, i) in neighbours:
                _join(neighbours, (node, i - 1), (node, i))
    gap = {spot: node_gap if spot[1] == layer[spot[0]] else line_gap for spot in neighbours}
    y = _rows(columns, neighbours, gap)
    top = min(y.values(), default=0.0)
    return Layout(layer, {spot: value - top for spot, value in y.items()}, max(y.values(), default=0.0) - top)


def _join(neighbours: dict[Spot, list[Spot]], left: Spot, right: Spot) -> None:
    neighbours[left].append(right)
    neighbours[right].append(left)


def _layers(needs: Mapping[str, set[str]], lazy: Mapping[str, set[str]]) -> dict[str, int]:
    graph = {node: needs[node] | lazy[node] for node in needs}
    try:
        order = [*TopologicalSorter(graph).static_order()]
    except CycleError:
        graph = dict(needs)
        order = [*TopologicalSorter(graph).static_order()]
    layer: dict[str, int] = {}
    for node in order:
        layer[node] = max((layer[source] + 1 for source in graph[node]), default=0)
    users = {node: [user for user in graph if node in graph[user]] for node in graph}
    for node in reversed(order):  # as far right as its users allow: lines get short
        layer[node] = min((layer[user] - 1 for user in users[node]), default=layer[node])
    return layer


def _rows(
    columns: list[list[Spot]], neighbours: Mapping[Spot, list[Spot]], gap: Mapping[Spot, float]
) -> dict[Spot, float]:
    y: dict[Spot, float] = {}
    for column in columns:
        _place(column, {spot: float(i) for i, spot in enumerate(column)}, gap, y)
    for sweep in range(SWEEPS):
        side = 1 if sweep % 2 else -1  # alternately what lies left and what lies right, both in the last sweeps
        for column in columns[::-side]:
            wish = {}
            for spot in column:
                near = [y[n] for n in neighbours[spot] if sweep >= SWEEPS - 4 or (n[1] - spot[1]) * side > 0]
                wish[spot] = mean(near) if near else y[spot]
            column.sort(key=lambda spot: wish[spot])
            _place(column, wish, gap, y)
    return y


def _place(column: list[Spot], wish: Mapping[Spot, float], gap: Mapping[Spot, float], y: dict[Spot, float]) -> None:
    """As near to the wished heights as the gaps allow, in this order (pool adjacent violators)."""
    offset, total = {}, 0.0
    for before, spot in zip([None, *column], column, strict=False):
        total += (gap[before] + gap[spot]) / 2 if before is not None else 0.0
        offset[spot] = total
    blocks: list[list[float]] = []  # [sum, count] of wish - offset, means rising
    for spot in column:
        blocks.append([wish[spot] - offset[spot], 1.0])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + count]
    bases = [total / count for total, count in blocks for _ in range(int(count))]
    for spot, base in zip(column, bases, strict=True):
        y[spot] = base + offset[spot]
