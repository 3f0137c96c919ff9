"""When vLLM runs on our platform: a workerkit config was given, in whatever way; and never unnoticed on another."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from workerkit.plugins import vllm as plugin

OURS = "workerkit.plugins.vllm.platform.WorkerkitPlatform"
SPELLINGS = [
    ["--additional-config", '{"workerkit": "a.yaml"}'],
    ["--additional_config", '{"other": 1, "workerkit": {"cache": {}}}'],
    ['--additional-config={"workerkit": "a.yaml"}'],
    ["--additional-config.workerkit", "a.yaml"],
    ["--additional_config.workerkit=a.yaml"],
    ["--additional-config.workerkit.components.runner", "v2"],
]
OTHERS = [
    [],
    ["--additional-config", '{"other": "workerkit"}'],
    ["--additional-config.other", "1"],
    ["--model", '{"workerkit": 1}'],
]
BROKEN = [["--additional-config"], ["--additional-config", "{'workerkit'"], ["--additional-config=3"]]


@pytest.mark.parametrize("arguments", SPELLINGS + OTHERS, ids=" ".join)
def test_a_config_on_the_command_line_is_seen_as_vllm_sees_it(monkeypatch, arguments):
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(arguments)
    wanted = "workerkit" in (parsed.additional_config or {})
    assert wanted == (arguments in SPELLINGS)
    monkeypatch.delenv(plugin.VARIABLE)
    monkeypatch.setattr(sys, "argv", ["vllm", *arguments])
    assert plugin.is_wanted() == wanted


@pytest.mark.parametrize("arguments", BROKEN, ids=" ".join)
def test_what_is_wrong_there_vllm_says_itself(monkeypatch, arguments):
    monkeypatch.delenv(plugin.VARIABLE)
    monkeypatch.setattr(sys, "argv", ["vllm", *arguments])
    assert not plugin.is_wanted()


def test_the_variable_activates_it_unless_it_is_empty(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm"])
    monkeypatch.setenv(plugin.VARIABLE, "a.yaml")
    assert plugin.is_wanted()
    monkeypatch.setenv(plugin.VARIABLE, "")
    assert not plugin.is_wanted()


def run(script, **environment):
    """What a new process with that environment prints, read as JSON."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", plugin.VARIABLE))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_installing_it_changes_nothing():
    found = run("""
import json, sys
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
kind = type(current_platform).__name__
load_general_plugins()
print(json.dumps([kind, sorted(name for name in sys.modules if name.startswith("workerkit"))]))
""")
    assert found == ["CpuPlatform", ["workerkit", "workerkit.plugins", "workerkit.plugins.vllm"]]


CHOICES = """
import json, os, sys
from vllm.platforms import resolve_current_platform_cls_qualname as choose
found = [choose()]
del os.environ["VLLM_TARGET_DEVICE"]
sys.path.insert(0, FOLDER)
try:
    choose()
except RuntimeError as error:
    found.append(str(error))
os.environ["VLLM_PLUGINS"] = "workerkit"
found.append(choose())
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
from vllm import EngineArgs
try:
    EngineArgs(model="none")
except Exception as error:
    found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


def test_b76_b77_another_platform(tmp_path):
    """With a second one active vLLM names both; its own in place of ours ends the start, and says why."""
    (tmp_path / "rival.py").write_text("def platform():\n    return 'rival.Platform'\n")
    info = tmp_path / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nrival = rival:platform\n")
    script = CHOICES.replace("FOLDER", repr(str(tmp_path)))
    forced, both, chosen, start = run(script, WORKERKIT_CONFIG="a.yaml", VLLM_TARGET_DEVICE="cpu")
    assert (forced, chosen) == ("vllm.platforms.cpu.CpuPlatform", OURS)
    assert "Only one platform plugin" in both
    assert "'workerkit'" in both
    assert "'rival'" in both
    assert start.startswith("UnsupportedError: a workerkit config was given")
    assert f"runs on {forced}: VLLM_TARGET_DEVICE must not be set to cpu" in start


@pytest.mark.parametrize(
    ("group", "answer"),
    [("vllm.platform_plugins", OURS), ("vllm.general_plugins", None)],
)
def test_the_entry_points_may_be_called_again(group, answer):
    [entry] = entry_points(group=group, name="workerkit")
    for _ in range(2):
        assert entry.load()() == answer
