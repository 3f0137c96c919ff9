"""The example plugins from outside: their wheels, in a fresh environment, do with both runners what they say.

The environment sees the third-party packages of this one (torch is not installed twice), and workerkit from a wheel of
its own: nothing of the checkout is on its path.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "plugins" / "examples"
ROOMS = ("framework", "components", "kernels", "plugins")

CONFIG = """
model: {source: random, max_model_len: 64}
limits: {max_num_reqs: 2, max_num_batched_tokens: 32}
cache: {block_size: 8, num_blocks: 20}
components:
  runner: %s
  loader: {use: random, vocab_size: 97, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2}
"""
BANNING = """
  sampler:
    stages: [{use: ban_token, token_ids: [%d]}, temperature, top_k_top_p]
"""
# Greedy tokens of one request, printed; the last line says where workerkit comes from.
GENERATE = """
import sys
import workerkit.framework.assembly as assembly
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams

worker = assembly.assemble(sys.argv[1]).worker
worker.start()
prompt, tokens, greedy = (1, 2, 3, 4, 5), [], SamplingParams(temperature=0.0)
new = NewRequest(req_id="r", token_ids=prompt, prompt_len=5, sampling=greedy, block_ids=((1, 2, 3, 4),))
step = SchedulerOutput(new_requests=(new,), num_scheduled_tokens={"r": 5})
for computed in range(5, 21):
    assert worker.execute_model(step) is None
    tokens += worker.sample_tokens().get().sampled_token_ids[0]
    step = SchedulerOutput(
        cached_requests=(CachedRequest(req_id="r", num_computed_tokens=computed),), num_scheduled_tokens={"r": 1}
    )
worker.shutdown()
print(*tokens)
print(assembly.__file__)
"""

SPECULATING = """
  speculator: echo
  tokenizer: fake
  chat_template: fake
"""
# Greedy tokens of one request, and how many drafts were accepted.
DRAFT = """
import sys
import workerkit.framework.assembly as assembly
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.registry import fake_registry

engine = assembly.assemble(sys.argv[1], registry=fake_registry()).engine
engine.start()
[done] = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
print(engine.stats.num_accepted_tokens)
engine.shutdown()
print(*done.token_ids)
print(assembly.__file__)
"""


def run(*command, cwd, **more):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_PLUGINS", "COV_CORE_SOURCE")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        **more,
    )


def must(*command, cwd):
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def wheel_of(folder, out):
    must(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, folder, cwd=folder)
    (wheel,) = out.glob(f"{folder.name.replace('-', '_')}-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Built from copies, so that the checkout stays clean."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    ignore = shutil.ignore_patterns("__pycache__", "examples", "build", "*.egg-info")
    for room in ROOMS:
        shutil.copytree(ROOT / room, sources / "workerkit" / room, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / "workerkit" / name)
    names = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir())
    for name in names:
        shutil.copytree(EXAMPLES / name, sources / name, ignore=ignore)
    return [wheel_of(sources / name, out) for name in ("workerkit", *names)]


class Environment:
    """A fresh environment that borrows this one's third-party packages."""

    def __init__(self, folder):
        self.folder = folder
        venv.create(folder / "env", with_pip=False)
        self.python = next((folder / "env").glob("*/python"), None) or folder / "env" / "Scripts" / "python.exe"
        (self.site,) = (folder / "env").glob("**/site-packages")
        # A path named in a .pth file is searched, but .pth files in it are not read: the checkout stays out of sight.
        borrowed = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        (self.site / "borrowed.pth").write_text("\n".join(borrowed))

    def pip(self, *arguments):
        return must(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.folder)

    def workerkit(self, *arguments):
        code = "import sys; from workerkit.framework.cli.main import main; sys.exit(main())"
        return run(self.python, "-c", code, *arguments, cwd=self.folder)

    def tokens(self, config):
        return self.printed(GENERATE, config)[-1]

    def printed(self, script, config):
        """Numbers of each line, but for the last, which says where workerkit is."""
        (self.folder / "script.py").write_text(script)
        *lines, where = must(self.python, "-I", "script.py", config, cwd=self.folder).splitlines()
        assert pathlib.Path(where).is_relative_to(self.site), "workerkit comes from its wheel"
        return [[int(number) for number in line.split()] for line in lines]

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return name


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("fresh"))
    environment.pip("install", "--no-index", "--no-deps", *wheels)
    return environment


def test_the_plugin_changes_the_tokens_of_both_runners_and_is_missed_when_it_is_gone(environment):
    usual, banned = {}, {}
    for runner in ("v1", "v2"):
        usual[runner] = environment.tokens(environment.write(f"{runner}.yaml", CONFIG % runner))
        victim = usual[runner][3]
        text = CONFIG % runner + BANNING % victim
        banned[runner] = environment.tokens(environment.write(f"{runner}-ban.yaml", text))
        assert victim not in banned[runner]
        first = usual[runner].index(victim)
        assert banned[runner][:first] == usual[runner][:first], "up to the banned token nothing changes"
    assert usual["v1"] == usual["v2"]
    assert banned["v1"] == banned["v2"]
    assert len(set(usual["v1"])) > 1

    listed = environment.workerkit("plugins")
    assert "ban-token" in listed.stdout
    assert "ban_token" in listed.stdout
    assert environment.workerkit("check", "v1-ban.yaml").returncode == 0

    environment.pip("uninstall", "-y", "workerkit-ban-token")
    for runner in ("v1", "v2"):
        result = environment.workerkit("check", f"{runner}-ban.yaml")
        assert result.returncode != 0
        output = result.stdout + result.stderr
        assert "components.sampler.stages[0].use: no sampler_stage 'ban_token'" in output
        assert "Traceback" not in output
        assert environment.workerkit("check", f"{runner}.yaml").returncode == 0
    assert environment.tokens("v1.yaml") == usual["v1"]


def test_the_proposer_drafts_with_both_runners_and_changes_no_token(environment):
    written = []
    for runner in ("v1", "v2"):
        plain = CONFIG.replace("97", "24") % runner  # with so few tokens the model repeats itself
        greedy = environment.tokens(environment.write(f"{runner}-plain.yaml", plain))
        text = plain.replace("tokens: 32}", "tokens: 32, num_speculative_tokens: 3}") + SPECULATING
        [accepted], tokens = environment.printed(DRAFT, environment.write(f"{runner}-echo.yaml", text))
        assert accepted > 0
        assert tokens[: len(greedy)] == greedy
        written.append(tokens)
    assert written[0] == written[1]
    assert "echo-proposer" in environment.workerkit("plugins").stdout
    assert "echo" in environment.workerkit("components", "speculator").stdout


@pytest.mark.parametrize("example", sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir()))
def test_the_plugins_own_tests_pass_where_it_is_installed(example, wheels, tmp_path):
    environment = Environment(tmp_path)
    environment.pip("install", "--no-index", "--no-deps", *wheels)
    shutil.copytree(EXAMPLES / example / "tests", tmp_path / "tests")
    output = must(environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    assert " passed" in output
    assert "failed" not in output
