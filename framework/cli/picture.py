"""The page of `workerkit wiring --html`: one file with an SVG picture and a table, no network needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import attrs

from workerkit.framework import roles
from workerkit.framework.cli import common
from workerkit.framework.cli.layout import Layout, Spot, layout
from workerkit.framework.plan import Node, Plan
from workerkit.framework.registry import Role

WIDTH, HEIGHT, STEP, MARGIN = 168, 40, 250, 24  # of a box, from one layer to the next, around the picture
_GROUPS: tuple[tuple[str, str, tuple[Role[Any], ...]], ...] = (
    ("engine", "#7c3aed", (roles.ENGINE, roles.SCHEDULER, roles.TOKENIZER, roles.CHAT_TEMPLATE, roles.IMAGE_PROCESSOR)),
    ("worker and runner", "#dc2626", (roles.WORKER, roles.WORKER_EXTENSIONS, roles.RUNNER)),
    ("batch", "#db2777", (roles.REQUEST_STATE, roles.INPUT_BATCH, roles.BLOCK_TABLE)),
    ("cache, attention, graphs", "#059669", (roles.KV_CACHE, roles.ATTENTION, roles.GRAPH, roles.ENCODER_GRAPH)),
    (
        "model",
        "#2563eb",
        (
            roles.MODEL,
            roles.MODEL_LIBRARY,
            roles.LOADER,
            roles.MODEL_STORE,
            roles.MODEL_STATE,
            roles.LORA,
            roles.ENCODER,
        ),
    ),
    (
        "sampling and drafts",
        "#d97706",
        (
            roles.SAMPLER,
            roles.SAMPLER_STAGE,
            roles.REJECTION,
            roles.GRAMMAR,
            roles.DRAFT,
            roles.SPECULATOR,
            roles.VERIFY_BUDGET,
        ),
    ),
    ("device and kernels", "#0891b2", (roles.DEVICE, roles.MEMORY_POOL, roles.KERNELS, roles.KERNEL_LIBRARY)),
    (
        "many devices",
        "#65a30d",
        (roles.PARALLEL, roles.EPLB, roles.EPLB_POLICY, roles.PCP, roles.DCP, roles.PIPELINE, roles.KV_CONNECTOR),
    ),
    ("observers", "#a16207", (roles.OBSERVERS,)),
)
_VALUE = ("value of a stage", "#64748b")
_OTHER = ("other", "#475569")
_COLOUR = {role.name: (name, colour) for name, colour, members in _GROUPS for role in members}

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 24px; color: #1e293b; background: #fff }
h1 { font-size: 20px; margin: 0 } p { margin: 4px 0 12px; color: #475569 }
.legend span { display: inline-block; margin-right: 16px; white-space: nowrap }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 5px }
.scroll { overflow-x: auto; border: 1px solid #e2e8f0; border-radius: 8px; margin: 12px 0 24px; background: #f8fafc }
svg { display: block } svg text { pointer-events: none }
.key { font-weight: 600; font-size: 13px; fill: #0f172a } .part { font-size: 11.5px; fill: #475569 }
path { fill: none; stroke-width: 1.4; stroke-opacity: .45 } path.later { stroke-dasharray: 5 4 }
svg.focus path { stroke-opacity: .07 } svg.focus g.node { opacity: .25 }
svg.focus path.on { stroke-opacity: 1; stroke-width: 2.2 } svg.focus g.node.on { opacity: 1 }
table { border-collapse: collapse; margin-bottom: 24px } th { text-align: left; font-weight: 600 }
td, th { padding: 3px 18px 3px 0; border-bottom: 1px solid #e2e8f0; vertical-align: top }
code { font: 12.5px ui-monospace, monospace }
"""

_SCRIPT = """
const svg = document.querySelector('svg');
svg.querySelectorAll('g.node').forEach(node => {
  node.addEventListener('mouseenter', () => {
    const key = node.dataset.key, near = new Set([key]);
    svg.querySelectorAll('path').forEach(line => {
      if (line.dataset.from === key || line.dataset.to === key) {
        line.classList.add('on'); near.add(line.dataset.from); near.add(line.dataset.to);
      }
    });
    svg.querySelectorAll('g.node').forEach(n => n.classList.toggle('on', near.has(n.dataset.key)));
    svg.classList.add('focus');
  });
  node.addEventListener('mouseleave', () => {
    svg.classList.remove('focus'); svg.querySelectorAll('.on').forEach(e => e.classList.remove('on'));
  });
});
"""


def page(plan: Plan, bindings: Mapping[str, str], title: str) -> str:
    """The whole HTML document."""
    used = dict.fromkeys(_group(node) for node in plan.nodes.values())
    legend = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in used)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - wiring</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        "<p>Each part receives those to its left that a line joins it to; dashed: when it first asks. "
        "Point at a part for its options and its neighbours.</p>"
        f'<div class="legend">{legend}</div><div class="scroll">{_svg(plan)}</div>'
        f"{_parts(plan)}{_kernels(bindings)}<script>{_SCRIPT}</script></body></html>\n"
    )


def _group(node: Node) -> tuple[str, str]:
    return _VALUE if node.role is None else _COLOUR.get(node.role.name, _OTHER)


def _svg(plan: Plan) -> str:
    nodes = {**plan.nodes, **{n: Node(key=n, factory=t) for n, t in plan.published.items()}}
    needs = {key: node.edges(lazy=False) for key, node in nodes.items()}
    lazy = {key: node.edges() - needs[key] for key, node in nodes.items()}
    drawn = layout(needs, lazy, node_gap=HEIGHT + 14, line_gap=14)
    width = 2 * MARGIN + STEP * max(drawn.layer.values()) + WIDTH
    height = 2 * MARGIN + drawn.height + HEIGHT
    lines = (
        _line(drawn, source, key, _group(nodes[source])[1], later=source in lazy[key])
        for key in nodes
        for source in sorted(needs[key] | lazy[key])
    )
    boxes = (_box(node, *_corner(drawn, (key, drawn.layer[key]))) for key, node in nodes.items())
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(lines)}{"".join(boxes)}</svg>'


def _corner(drawn: Layout, spot: Spot) -> tuple[float, float]:
    return MARGIN + STEP * spot[1], MARGIN + drawn.y[spot]


def _line(drawn: Layout, source: str, target: str, colour: str, later: bool) -> str:
    spots = drawn.route(source, target)
    x, y = _corner(drawn, spots[0])
    x, y = x + WIDTH, y + HEIGHT / 2
    path = [f"M{x:.1f},{y:.1f}"]
    for spot in spots[1:]:
        left, top = _corner(drawn, spot)
        top += HEIGHT / 2
        bend = abs(left - x) / 2
        path.append(f"C{x + bend:.1f},{y:.1f} {left - bend:.1f},{top:.1f} {left:.1f},{top:.1f}")
        x, y = left, top
        if spot != spots[-1]:  # straight past the boxes of a layer between
            x += WIDTH
            path.append(f"H{x:.1f}")
    attributes = f'class="{"later" if later else "now"}" data-from="{escape(source)}" data-to="{escape(target)}"'
    return f'<path {attributes} stroke="{colour}" d="{"".join(path)}"/>'


def _box(node: Node, x: float, y: float) -> str:
    colour = _group(node)[1]
    dash = ' stroke-dasharray="4 3"' if node.role is None else ""
    part = node.name or "stage value"
    return (
        f'<g class="node" data-key="{escape(node.key)}"><title>{escape(_tooltip(node))}</title>'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{WIDTH}" height="{HEIGHT}" rx="7" fill="#fff" stroke="{colour}"{dash} '
        f'stroke-width="1.5"/><rect x="{x:.1f}" y="{y:.1f}" width="6" height="{HEIGHT}" rx="3" fill="{colour}"/>'
        f'<text class="key" x="{x + 14:.1f}" y="{y + 17:.1f}">{escape(_short(node.key, 22))}</text>'
        f'<text class="part" x="{x + 14:.1f}" y="{y + 32:.1f}">{escape(_short(part, 26))}</text></g>'
    )


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _tooltip(node: Node) -> str:
    made_by = f"{node.factory.__module__}.{getattr(node.factory, '__qualname__', '')}"
    lines = [f"{node.key}: {node.name}" if node.name else node.key, made_by]
    if node.role is not None:
        lines += [node.role.doc, node.why or "named by the config"]
    return "\n".join([*lines, *(f"{name} = {value}" for name, value in _options(node))])


def _options(node: Node) -> Iterator[tuple[str, str]]:
    if node.config is not None:
        for name, value in attrs.asdict(node.config).items():
            yield name, common.plain(value)


def _parts(plan: Plan) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(node.key)}</code></td><td>{escape(node.name)}</td>"
        f"<td><code>{escape(getattr(node.factory, '__qualname__', ''))}</code></td>"
        f"<td>{escape(node.why or 'named by the config')}</td>"
        f"<td><code>{escape(', '.join(f'{k}={v}' for k, v in _options(node)))}</code></td></tr>"
        for node in plan.nodes.values()
        if node.role is not None
    )
    head = "<tr><th>place</th><th>part</th><th>class</th><th>why</th><th>options</th></tr>"
    return f"<h1>Parts</h1><table>{head}{rows}</table>"


def _kernels(bindings: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(op)}</code></td><td>{escape(name)}</td></tr>" for op, name in bindings.items()
    )
    return f"<h1>Kernels</h1><table><tr><th>op</th><th>library</th></tr>{rows}</table>" if rows else ""
