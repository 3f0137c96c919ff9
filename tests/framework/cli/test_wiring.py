"""`workerkit wiring`: the text, and the page with its picture."""

from __future__ import annotations

import re
import webbrowser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from workerkit.framework import roles
from workerkit.framework.cli.layout import layout
from workerkit.framework.plan import make_plan

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "w.yaml").write_text("components: {runner: v1, kernels: [reference], observers: [metrics]}")
    return tmp_path / "w.yaml"


def test_the_text_says_who_gets_whom_and_why(real_cli, path, capsys):
    assert real_cli("wiring", path, "--set", "components.attention=reference") == 0
    out = capsys.readouterr().out
    assert re.search(r"^runner: v1 \(NPUModelRunner\)  named by the config$", out, re.M)
    assert re.search(r"^block_table: multi_group \(MultiGroupBlockTable\)  goes with runner: v1$", out, re.M)
    assert re.search(r"^attention: reference \(ReferenceAttention\)  named by the config$", out, re.M)
    assert re.search(
        r"^sampler.stages\[0\]: allowed_token_ids \(AllowedTokenIds\)  default of sampler: torch$", out, re.M
    )
    assert re.search(r"^    libraries +<- \[kernels.libraries\[0\]\]$", out, re.M)
    assert re.search(r"^    parts +<- a RunnerParts of\n      .device +<- device$", out, re.M)
    assert re.search(r"^      .observers +<- \[observers\[0\]\]$", out, re.M)
    assert re.search(r"^      .hooks +<- the worker's StepHooks$", out, re.M)
    assert re.search(r"^DeviceContext: made by open_device\n    device +<- device$", out, re.M)
    assert re.search(r"^    rms_norm +reference$", out, re.M)


def test_kernels_that_cannot_be_bound_are_said_and_hide_nothing(real_cli, installed, path, capsys):
    def unusable() -> roles.KERNELS.interface:
        raise OSError("no compiler")

    installed.registry.add(roles.KERNELS, "unusable", unusable)
    assert real_cli("wiring", path, "--set", "components.kernels={use: unusable}") == 0
    out = capsys.readouterr().out
    assert "cannot be bound here: OSError: no compiler" in out
    assert "engine: standalone" in out


def test_a_config_that_is_wrong_has_no_wiring(real_cli, path, capsys):
    assert real_cli("wiring", path, "--set", "components.runner=v3") == 1
    assert "no runner 'v3'" in capsys.readouterr().err


def picture(text):
    """(key -> (x, y, width, height), [(from, to)]) of a page's SVG."""
    svg = ElementTree.fromstring(re.search(r"<svg.*?</svg>", text, re.S).group())
    boxes = {}
    for group in svg.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        boxes[group.get("data-key")] = tuple(float(rect.get(a)) for a in ("x", "y", "width", "height"))
    lines = [(line.get("data-from"), line.get("data-to")) for line in svg.iter(f"{SVG}path")]
    return svg, boxes, lines


def test_the_page_draws_every_part_and_every_wire(real_cli, installed, path, tmp_path, capsys):
    out = tmp_path / "w.html"
    assert real_cli("wiring", path, "--html", out) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = out.read_text(encoding="utf-8")
    plan = make_plan(
        installed.registry,
        {"components": {"runner": "v1", "kernels": ["reference"], "observers": ["metrics"]}},
    )
    svg, boxes, lines = picture(text)
    assert set(boxes) == {*plan.nodes, *plan.published}
    assert sorted(lines) == sorted((source, key) for key, node in plan.nodes.items() for source in node.edges())
    size = [float(svg.get(a)) for a in ("width", "height")]
    for x, y, width, height in boxes.values():
        assert x >= 0
        assert y >= 0
        assert x + width <= size[0]
        assert y + height <= size[1]
    for a, (ax, ay, width, height) in boxes.items():
        for b, (bx, by, _, _) in boxes.items():
            assert a == b or abs(ax - bx) >= width or abs(ay - by) >= height, f"{a} lies over {b}"
    for source, target in lines:  # without a circle, each part stands to the right of what it gets
        assert boxes[source][0] < boxes[target][0]
    assert "max_num_reqs" not in text  # a section is no part
    assert "temperature = 1.0" in text  # an option, in the tooltip of the sampler


def test_the_page_needs_no_network_and_escapes(real_cli, tmp_path, capsys):
    path = tmp_path / "a<b>&.yaml"
    path.write_text("components: {model_store: {cache_dir: '<script>x</script>'}}")
    out = tmp_path / "w.html"
    assert real_cli("wiring", path, "--html", out) == 0
    text = out.read_text(encoding="utf-8")
    assert "a&lt;b&gt;&amp;.yaml" in text
    assert "<script>x" not in text
    assert not re.search(r"""(src|href)=|@import|url\(|https?://(?!www\.w3\.org/2000/svg")""", text)


def test_open_shows_the_page_and_needs_one(real_cli, path, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert real_cli("wiring", path, "--open") == 1
    assert real_cli("wiring", path, "--html", tmp_path / "w.html", "--open") == 0
    assert opened == [(tmp_path / "w.html").as_uri()]
    assert real_cli("wiring", path, "--html", tmp_path / "no" / "w.html") == 1
    assert "cannot write" in capsys.readouterr().err


def test_layers_follow_the_longest_path_and_rows_keep_their_distance():
    needs = {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"a", "c"}, "e": set(), "f": {"e"}}
    drawn = layout(needs, {node: set() for node in needs}, node_gap=10, line_gap=4)
    assert [drawn.layer[node] for node in "abcdef"] == [0, 1, 2, 3, 0, 1]
    assert drawn.route("a", "d") == [("a", 0), ("a", 1), ("a", 2), ("d", 3)]
    for column in range(4):
        rows = sorted((y, spot[0]) for spot, y in drawn.y.items() if spot[1] == column)
        for (above, first), (below, second) in pairwise(rows):
            both = drawn.layer[first] == drawn.layer[second] == column
            assert below - above >= (10 if both else 4) - 1e-6


def test_a_circle_through_a_late_wish_is_drawn_all_the_same():
    drawn = layout({"a": set(), "b": {"a"}}, {"a": {"b"}, "b": set()}, node_gap=10, line_gap=4)
    assert drawn.layer == {"a": 0, "b": 1}
    assert drawn.route("b", "a") == [("b", 1), ("a", 0)]
