"""The documents are true: their Python runs, their YAML is a worker, their commands parse, their links lead somewhere.

Conventions of the pages. Python blocks of a page run in order, in one namespace, in a folder with a `worker.yaml`
(here: a tiny random model with a byte-level tokenizer), and where a page mentions `photo.png`, with that and a model in
`qwen3-vl` that sees it. A block that starts with `# name.py` is saved under that name instead. YAML blocks are whole
configs; one marked `yaml refused` is wrong, and the `text` block after it is what `workerkit check` prints.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest
import tokenizers
from picture_model import make_model, picture, save

from workerkit.framework import config as configs
from workerkit.framework.cli.main import _parser, main
from workerkit.framework.errors import ConfigError
from workerkit.framework.plan import make_plan
from workerkit.framework.plugins import load_plugins
from workerkit.framework.roles import ROLES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
DOCUMENTS = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]
WORKER = """
model: {source: tiny, max_model_len: 256}
limits: {max_num_reqs: 8, max_num_batched_tokens: 32}
cache: {block_size: 4, num_blocks: 200}
components:
  loader: {use: random, vocab_size: 258}
  observers: [metrics, {use: tap, layers: [layers.0]}]
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path, *kinds):
    """(kind, text) of the fenced blocks of these kinds, in order; line numbers are those of the page."""
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if found[1] in kinds:
            yield found[1], "\n" * text[: found.start(2)].count("\n") + found[2]


@pytest.fixture(scope="module")
def registry():
    return load_plugins().registry


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader of the documents sits."""
    byte_tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(byte_tokens)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    (tmp_path / "tiny").mkdir()
    tokenizer.save(str(tmp_path / "tiny/tokenizer.json"))
    (tmp_path / "tiny/tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "tiny/chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "worker.yaml").write_text(WORKER)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) == str(tmp_path / f"{module}.py"):
            del sys.modules[module]


def run_python(path, folder):
    """Runs the page's Python blocks; returns their namespace."""
    namespace = {"__name__": "documented"}
    if any("photo.png" in text for _, text in blocks(path, "python")):
        save(make_model("Qwen3VL"), folder / "qwen3-vl")
        (folder / "photo.png").write_bytes(picture(24, 16))
    for _, text in blocks(path, "python"):
        if saved := re.match(r"\s*# (\w+\.py)\n", text):
            (folder / saved[1]).write_text(text.lstrip("\n"), encoding="utf-8")
        else:
            exec(compile(text, name_of(path), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_python_of_a_page_runs_and_its_yaml_is_a_worker(path, folder, registry):
    registry = run_python(path, folder).get("registry", registry)
    problems = None
    for kind, text in blocks(path, "yaml", "yaml refused", "text"):
        if kind == "text":
            if problems is not None:
                assert text.strip("\n").splitlines() == [f"  - {problem}" for problem in problems]
            problems = None
            continue
        (folder / "block.yaml").write_text(text, encoding="utf-8")
        if kind == "yaml":
            make_plan(registry, configs.read_file(folder / "block.yaml"))
        else:
            with pytest.raises(ConfigError) as error:
                make_plan(registry, configs.read_file(folder / "block.yaml"))
            problems = error.value.problems
    assert problems is None, "a refused block must be followed by what `check` prints"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_command_lines_parse(path):
    parser = _parser(load_plugins())
    for _, text in blocks(path, "sh"):
        for line in text.strip().splitlines():
            words = shlex.split(line.partition(" >")[0], comments=True)
            if words[:1] == ["workerkit"]:
                parser.parse_args(words[1:])
            elif words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def test_the_readme_names_the_commands_that_exist(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`workerkit ([a-z][a-z-]*)", prose))
    for command in sorted(named):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0, command
        assert f"workerkit {command}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    offered = set(re.findall(r"^    ([a-z][a-z-]*)(?: |$)", capsys.readouterr().out, re.MULTILINE))
    in_table = re.findall(r"^\| `workerkit ([a-z-]+)` \|", text, re.MULTILINE)
    assert sorted(in_table) == sorted(offered - load_plugins().registry.commands.keys())


def test_the_readme_begins_with_the_two_commands_and_has_one_place_for_measurements():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line]
    assert lines[0] == "# workerkit"
    assert [line.split("#")[0].split() for line in lines[2:4]] == [["make", "demo"], ["make", "test"]]
    assert [line for line in lines if "measured -->" in line] == ["<!-- measured -->", "<!-- /measured -->"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files(path):
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), target


def test_the_table_of_roles_is_what_is_registered(registry):
    rows = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        if found := re.fullmatch(r"\| (\w+) \| `(\w+)` \| (.*) \|", line):
            rows[found[1]] = (found[2], dict(re.findall(r"(\w+) → `(\w+)`", found[3])))
    installed = {}
    for role in ROLES:
        names = [name for name, offer in registry.offers[role.name].items() if offer.plugin == "builtin"]
        classes = {name: registry.entry(role.name, name).factory.__name__ for name in names}
        installed[role.name] = (role.interface.__name__, classes)
    assert rows == installed


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:framework|components|kernels|plugins|configs|tests|docs)/[\w./-]+)`", text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_picture_shows_the_wiring_of_cpu_v2(registry, monkeypatch):
    """When it does not: python tests/docs/draw_wiring.py, on a machine that has native kernels."""
    monkeypatch.setattr("workerkit.kernels.cpu.native.build.unavailable", lambda: None)
    plan = make_plan(registry, configs.read_file(ROOT / "configs/cpu-v2.yaml"))
    svg = (ROOT / "docs/wiring-cpu-v2.svg").read_text()
    assert set(re.findall(r'data-key="([^"]+)"', svg)) == {*plan.nodes, *plan.published}
    lines = {(source, key) for key, node in plan.nodes.items() for source in node.edges()}
    assert set(re.findall(r'data-from="([^"]+)" data-to="([^"]+)"', svg)) == lines
