"""The picture of `workerkit bench --plot`: throughput, and what a step is made of, for each case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from workerkit.framework.cli.bench_timing import HOST, STREAM

_ROW, _LEFT, _WIDTH, _MARGIN = 22, 130, 640, 16
_COLOURS = {
    "schedule": "#7c3aed",
    "prepare": "#db2777",
    "wait": "#e2e8f0",
    "update": "#a16207",
    "detokenise": "#d97706",
    "other": "#64748b",
    "inputs": "#f472b6",
    "attention": "#059669",
    "forward": "#2563eb",
    "sample": "#0891b2",
    "propose": "#65a30d",
    "commit": "#94a3b8",
}
_STYLE = "text{font:12px system-ui,sans-serif;fill:#0f172a}.title{font-size:15px;font-weight:600}.small{fill:#475569}"


def plot(title: str, cases: Mapping[str, Mapping[str, Any]]) -> str:
    """An SVG document. Each case has two bars, host and device stream, on a scale of its own: its step's wall time."""
    body = [*_legend()]
    top = 96
    for name, case in cases.items():
        body += _case(name, case, top)
        top += 3 * _ROW + 14
    width, height = _LEFT + _WIDTH + 2 * _MARGIN, top + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{_text(_MARGIN, 28, title, 'title')}{''.join(body)}</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _legend() -> Iterator[str]:
    for row, names in enumerate((HOST, STREAM)):
        for column, name in enumerate(names):
            x, y = _LEFT + 105 * column, 44 + 20 * row
            yield f'<rect x="{x}" y="{y}" width="11" height="11" fill="{_COLOURS[name]}"/>'
            yield _text(x + 16, y + 10, name, "small")


def _case(name: str, case: Mapping[str, Any], top: float) -> Iterator[str]:
    rate, parts = case["tokens_per_second"], case["breakdown_ms"]
    wall = parts["step"]["wall"]
    spread = f"({rate['least']:.1f}..{rate['greatest']:.1f})"
    text = f"{rate['median']:.1f} tokens/s {spread}, {wall:.2f} ms a step"
    yield _text(_MARGIN, top + 14, name)
    yield _text(_LEFT, top + 14, text)
    # Host and stream may each be busy a little longer than the wall of a median step.
    scale = _WIDTH / max(wall, sum(parts["host"].values()), sum(parts["stream"].values()))
    for row, side in enumerate(("host", "stream"), 1):
        x, y = float(_LEFT), top + row * _ROW
        yield _text(_MARGIN, y + 13, side, "small")
        for part, milliseconds in parts[side].items():
            width = milliseconds * scale
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 4}" fill="{_COLOURS[part]}">'
                f"<title>{part}: {milliseconds:.3f} ms</title></rect>"
            )
            x += width
