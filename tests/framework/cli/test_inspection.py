"""`workerkit check`, `config`, `components`, `plugins`, `models`, and the command group itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import types

import attrs
import jsonschema
import pytest

from workerkit.framework import config as configs
from workerkit.framework import roles
from workerkit.framework.cli import schema
from workerkit.framework.cli.main import main
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.plan import make_plan
from workerkit.framework.plugins import PluginHost, Plugins


@pytest.fixture
def document(tmp_path):
    """Writes a config and returns its path."""

    def write(text, name="f.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def loaded(*plugins):
    """Plugins of an otherwise empty registry."""
    host = PluginHost()
    for name, plugin in plugins:
        host.load(name, plugin, "1.2", f"module_of_{name} (dist)")
    return Plugins(host.registry, tuple(host.reports))


def plugin(register, version=1):
    """A plugin that runs `register(registry)`."""
    module = types.ModuleType("made_up")
    module.WORKERKIT_API = version
    module.worker_components = hookimpl(lambda registry: register(registry))
    return module


# ---- check


def test_check_says_ok(real_cli, document, capsys):
    assert real_cli("check", document("model: {source: no/such/model}")) == 0
    assert capsys.readouterr().out == "ok\n"


def test_b79_check_lists_every_problem_and_fails(real_cli, document, capsys):
    """B79: unknown keys at every level, with the nearest valid one, and an exit code."""
    path = document(
        """
        modle: x
        limits: {max-num-reqs: 4}
        cache: {max_model_len: 5, block_size: "16"}
        components:
          samplr: torch
          sampler: {top_k: -1}
          attention: cpuu
        """
    )
    assert real_cli("check", path) == 1
    out, err = capsys.readouterr()
    assert err == ""
    problems = [line.removeprefix("  - ") for line in out.splitlines()]
    assert problems[:4] == [
        "modle: no such section; did you mean 'model'?",
        "limits: unknown key 'max-num-reqs'; did you mean 'max_num_reqs'?",
        "cache.block_size: expected int, got '16' (str)",
        "cache: unknown key 'max_model_len'; known: block_size, memory_bytes, memory_fraction, num_blocks, "
        "quantization, state_interval",
    ]
    assert "components.samplr: no such role; did you mean 'sampler'?" in problems
    assert "components.attention.use: no attention 'cpuu'; did you mean 'cpu'?" in problems
    assert any(p.startswith("components.sampler.top_k: ") for p in problems)
    assert len(problems) == 7


def test_check_takes_settings_and_names_every_bad_one(real_cli, document, capsys):
    path = document("limits: {max_num_reqs: 0}")
    assert real_cli("check", path, "--set", "limits.max_num_reqs=3") == 0
    assert real_cli("check", path, "--set", "nonsense", "--set", "a=[1") == 1
    out = capsys.readouterr().out
    assert "--set nonsense: expected PATH=VALUE" in out
    assert "--set a, line 1" in out


def test_check_of_broken_yaml_gives_line_and_column(real_cli, document, capsys):
    assert real_cli("check", document("limits:\n  max_num_reqs: 1\n  max_num_reqs: 2\n")) == 1
    assert capsys.readouterr().out == "  - f.yaml, line 3, column 3: key 'max_num_reqs' is given twice\n"


def test_check_takes_two_seconds_at_most_and_builds_nothing(document):
    """In a process of its own: nearly all of it is the import of torch, which is measured alongside for comparison."""
    path = document("model: {source: no/such/model}")
    code = (
        "import sys, time; t = time.process_time(); import torch; t = time.process_time() - t\n"
        "torch.nn.Module.__init__ = None\n"  # whoever builds a network fails
        "from workerkit.framework.cli.main import main; code = main(['check', sys.argv[1]])\n"
        "print(t, time.process_time() - t); sys.exit(code)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    said, times = done.stdout.splitlines()
    torch_seconds, own_seconds = map(float, times.split())
    assert said == "ok"
    assert own_seconds < 1.0, f"check took {own_seconds:.2f} s of processor time beside torch's {torch_seconds:.2f} s"
    assert wall < 2.0 + 2 * torch_seconds  # 2 s on a machine that has nothing else to do


# ---- config


CONFIGS = [
    "{}",
    "model: smollm2",
    "components: {runner: v1}",
    "components: {kernels: [reference]}",
    "components: {kernels: auto, attention: auto}",
    "components: {sampler: {temperature: 0.5, stages: [temperature]}, observers: [metrics]}",
    "model: {source: x, max_model_len: 128}\nlimits: {max_num_reqs: 4}\ncache: {num_blocks: 40}",
]


def built(plan):
    """All that decides what is built: parts with their options and wires, and sections."""
    return {key: (n.name, n.factory, n.config, n.wires) for key, n in plan.nodes.items()}, plan.sections


@pytest.mark.parametrize("text", CONFIGS)
def test_the_resolved_config_is_complete_and_reads_back_as_the_same_plan(real_cli, installed, document, capsys, text):
    path = document(text)
    assert real_cli("config", path) == 0
    shown = capsys.readouterr().out
    again = document(shown, "resolved.yaml")
    assert real_cli("check", again) == 0
    first, second = (make_plan(installed.registry, configs.read_file(p)) for p in (path, again))
    assert first.document == second.document
    assert built(first) == built(second)
    components = configs.parse_yaml(shown, "shown")["components"]
    for role in roles.ROLES:
        if role.name in first.nodes:
            entry = installed.registry.entry(role.name, first.nodes[role.name].name)
            assert set(components[role.name]) >= {"use", *(o.name for o in schema.options_of(entry.config))}


def test_config_takes_settings_and_asks_for_a_file(real_cli, document, capsys):
    assert real_cli("config", document("limits: {seed: 1}"), "--set", "limits.seed=0", "--set", "model=m") == 0
    shown = configs.parse_yaml(capsys.readouterr().out, "shown")
    assert (shown["limits"]["seed"], shown["model"]["source"]) == (0, "m")
    assert real_cli("config") == 1
    assert "name a FILE" in capsys.readouterr().err


# ---- JSON Schema


@pytest.fixture
def validator(real_cli, capsys):
    assert real_cli("config", "--schema") == 0
    made = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


@pytest.mark.parametrize("text", CONFIGS)
def test_good_configs_fit_the_schema_resolved_or_not(validator, installed, text):
    document = configs.parse_yaml(text, "f")
    validator.validate(document)
    resolved = make_plan(installed.registry, document).document
    validator.validate(json.loads(json.dumps(resolved)))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("modle: x", []),
        ("limits: {max_num_reqs: '4'}", ["limits", "max_num_reqs"]),
        ("limits: {max_num_reqs: 0}", ["limits", "max_num_reqs"]),
        ("limits: {max_num_req: 4}", ["limits"]),
        ("cache: {memory_fraction: 1.5}", ["cache", "memory_fraction"]),
        ("cache: {num_blocks: true}", ["cache", "num_blocks"]),
        ("model: {dtype: float8}", ["model"]),
        ("components: {samplr: torch}", ["components"]),
        ("components: {sampler: torc}", ["components", "sampler"]),
        ("components: {sampler: {top_k: x}}", ["components", "sampler"]),
        ("components: {sampler: {stages: [nothing]}}", ["components", "sampler"]),
        ("components: {observers: metrics}", ["components", "observers"]),
        ("plugins: {nobody: {}}", ["plugins"]),
    ],
)
def test_bad_configs_do_not_fit_the_schema(validator, text, where):
    errors = [*validator.iter_errors(configs.parse_yaml(text, "f"))]
    assert [list(error.absolute_path) for error in errors] == [where]


def test_the_schema_documents_options_for_editors(validator):
    limits = validator.schema["properties"]["limits"]["properties"]
    assert limits["max_num_reqs"] == {
        "type": "integer",
        "minimum": 1,
        "default": 32,
        "description": "requests that run at the same time (R)",
    }
    sampler = validator.schema["$defs"]["sampler"]["oneOf"]
    (torch_part,) = [part for part in sampler if part.get("properties", {}).get("use", {}).get("const") == "torch"]
    assert torch_part["properties"]["top_k"]["type"] == "integer"
    assert torch_part["additionalProperties"] is False


def test_the_schema_has_a_plugins_section_and_survives_a_module_that_is_not_there():
    @attrs.frozen(kw_only=True)
    class Mine:
        level: int = 1

    def register(registry):
        registry.add_section("mine", Mine)
        registry.add(roles.GRAPH, "gone", "no_such_module:Gone")

    made = schema.config_schema(loaded(("p", plugin(register))).registry)
    jsonschema.validate({"plugins": {"mine": {"level": 2}}, "components": {"graph": {"use": "gone", "x": 1}}}, made)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"plugins": {"mine": {"level": "2"}}}, made)


# ---- components


def test_components_lists_every_role_and_implementation_with_options(real_cli, installed, capsys):
    assert real_cli("components") == 0
    out = capsys.readouterr().out
    for role, offers in installed.registry.offers.items():
        assert f"{role}: {installed.registry.roles[role].doc}" in out
        for name in offers:
            assert f"\n  {name}  [builtin]" in out
    assert "CANNOT BE IMPORTED" not in out
    assert "version 0: provisional" in out


def test_components_of_one_role_shows_types_defaults_and_docs(real_cli, capsys):
    assert real_cli("components", "model_store") == 0
    out = capsys.readouterr().out
    assert out.startswith("model_store: ")
    assert "loader" not in out.split("\n")[0]
    words = " ".join(out.split())
    assert "cache_dir: str | null = null folder of fetched models" in words
    assert "offline: bool = false never download" in words


def test_components_names_what_cannot_be_imported_and_what_is_missing(capsys):
    def register(registry):
        registry.add(roles.GRAPH, "gone", "no_such_module:Gone")
        registry.add(roles.GRAPH, "extra", "no_such_module:Extra", requires=("no_such_package", "npu"))
        registry.add(roles.OBSERVERS, "fine", Watcher, requires=("no_such_package", "npu"))

    found = loaded(("mine", plugin(register)))
    assert main(["components"], found) == 0
    out = capsys.readouterr().out
    assert "  gone  [mine]  CANNOT BE IMPORTED (no_such_module:Gone)\n      ModuleNotFoundError: " in out
    assert "  extra  [mine]  not installed: 'extra' needs the package no_such_package: pip install" in out
    assert "  fine  [mine]  Watches.\n      missing: 'fine' needs the package no_such_package" in out


def test_an_unknown_role_names_the_nearest(real_cli, capsys):
    assert real_cli("components", "samplr") == 1
    assert capsys.readouterr().err == "workerkit: no role 'samplr'; did you mean 'sampler'?\n"


class Watcher(Observer):
    """Watches."""


# ---- plugins, models


def fail(registry):
    raise RuntimeError("it is broken")


def test_plugins_shows_what_was_registered_and_tracebacks(capsys):
    good = plugin(lambda registry: registry.add(roles.OBSERVERS, "watcher", Watcher))
    found = loaded(("good", good), ("bad", plugin(fail)), ("old", plugin(fail, version=0)))
    assert main(["plugins"], found) == 0
    out = capsys.readouterr().out
    assert "good 1.2  module_of_good (dist)  ok\n  observers: watcher\n" in out
    assert "bad 1.2  module_of_bad (dist)  BROKEN\n  RuntimeError: it is broken\n    Traceback" in out
    assert 'raise RuntimeError("it is broken")' in out
    assert "interface version 0" in out
    assert main(["plugins", "--strict"], found) == 1
    assert main(["plugins", "--strict"], loaded(("good", good))) == 0


def test_models_lists_the_named_ones_and_fetch_prints_a_path(installed, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORKERKIT_CACHE", str(tmp_path))
    assert main(["models"], installed) == 0
    line = capsys.readouterr().out.splitlines()[0].split()
    assert line[:5] == ["smollm2", "not", "cached", "98", "MB"]
    assert main(["models", "--fetch", "smollm"], installed) == 1
    assert capsys.readouterr().err == "workerkit: no model is named 'smollm'; did you mean 'smollm2'?\n"


# ---- the command group


def test_a_plugins_command_joins_the_group_and_gets_registry_and_arguments(capsys):
    def add_to(group):
        parser = group.add_parser("hello")
        parser.add_argument("name")
        parser.set_defaults(run=lambda args: print(args.name, len(args.plugins.registry.roles)) or 7)

    found = loaded(("p", plugin(lambda registry: registry.add_command("hello", add_to))))
    assert main(["hello", "you"], found) == 7
    assert capsys.readouterr().out == f"you {len(found.registry.roles)}\n"


@pytest.mark.parametrize("name", ["check", "broken"])
def test_a_command_that_cannot_be_added_takes_no_other_away(capsys, name):
    def add_to(group):
        group.add_parser("check")  # taken
        raise RuntimeError("nor this")

    found = loaded(("p", plugin(lambda registry: registry.add_command(name, add_to))))
    assert main(["plugins"], found) == 0
    assert f"the command {name!r} of a plugin cannot be added" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["check"], ["check", "f", "--nope"], ["generate", "--top-k", "x"]]
)
def test_wrong_arguments_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments, loaded())
    assert "usage: workerkit" in capsys.readouterr().err


def test_ctrl_c_is_130_and_a_line(capsys):
    def stop(args):
        raise KeyboardInterrupt

    def add_to(group):
        group.add_parser("stop").set_defaults(run=stop)

    assert main(["stop"], loaded(("p", plugin(lambda registry: registry.add_command("stop", add_to))))) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_verbose_shows_what_auto_chose(scripted, capsys, engines):
    registry = scripted.registry
    registry.add(
        roles.CHAT_TEMPLATE,
        "found",
        registry.offers["chat_template"]["jinja"].factory,
        suits=lambda chosen: "it is here",
    )
    arguments = ["generate", "x", "--set", "components.chat_template=auto"]
    assert main(arguments, scripted) == 0
    assert "it is here" not in capsys.readouterr().err
    assert main(["--verbose", *arguments], scripted) == 0
    assert "components.chat_template: found (auto: it is here)" in capsys.readouterr().err


def test_output_into_a_closed_pipe_is_no_traceback():
    script = "from workerkit.framework.cli.main import main; import sys; sys.exit(main(['components']))"
    reader = subprocess.Popen(
        [sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
    )
    assert reader.stdout is not None
    assert reader.stderr is not None
    reader.stdout.close()
    error = reader.stderr.read().decode()
    reader.stderr.close()
    assert reader.wait() == 141
    assert "Traceback" not in error
