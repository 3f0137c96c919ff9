"""The texts of a new plugin; `$name` and its like are filled in by `skeletons.py`."""

from __future__ import annotations

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$dist"
version = "0.1.0"
description = "A $role for workerkit."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["workerkit"]

[project.optional-dependencies]
test = ["pytest"]

[project.entry-points.workerkit]
$name = "$module"

[tool.setuptools]
packages = ["$module"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]
"""

README = """\
# $dist

`$name`, a `$role` for workerkit.

    pip install -e .[test]
    pytest
    workerkit plugins               # lists $name
    workerkit components $role      # with its options

A config selects it:

```yaml
$yaml```
"""

TEST = '''\
"""The plugin registers its part, a config can select it, and it does what it says."""

$imports

import $module

CONFIG = $config


def registry() -> Registry:
    host = PluginHost()
    host.load("builtin", builtin)
    report = host.load("$name", $module)
    assert "$role: $name" in report.registered, report.traceback
    return host.registry


def test_a_config_selects_it() -> None:
    assembly = assemble(CONFIG, registry=registry())
    node = assembly.plan.nodes["$key"]
    assert (node.name, node.factory) == ("$name", $module.$cls)
$test'''

REGISTER = '''

@hookimpl
def worker_components(registry: Registry) -> None:
    """Called by workerkit when the plugin is loaded."""
    registry.add($add)
'''

SAMPLER_STAGE = '''\
"""$name: tokens that are never sampled."""

from __future__ import annotations

import attrs
import torch

from workerkit.framework import roles
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.sampling import SamplerStage, SamplingContext
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.registry import Registry

WORKERKIT_API = $api


@attrs.frozen(kw_only=True)
class ${cls}Config:
    """Options of $name."""

    token_ids: tuple[int, ...] = attrs.field(default=(), metadata={"doc": "tokens that are never sampled"})


class $cls(SamplerStage):
    """Bans tokens in every request."""

    def __init__(self, config: ${cls}Config) -> None:
        self._token_ids = list(config.token_ids)

    def applies_to(self, params: SamplingParams) -> bool:
        """Which requests use it. One that reads `params.extra_args` names its keys in a class variable `parameters`."""
        return bool(self._token_ids)

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """float32 [N, V], the rows of requests that use it -> [N, V]."""
        logits[:, self._token_ids] = -torch.inf
        return logits
'''

SAMPLER_STAGE_TEST = """

def test_it_bans_its_tokens_only() -> None:
    part = $module.$cls($module.${cls}Config(token_ids=(1,)))
    assert part.applies_to(SamplingParams())
    rows = torch.arange(2)
    context = SamplingContext(
        slots=rows, positions=rows, prompt_lens=rows + 1, host_slots=np.arange(2), text=lambda: torch.zeros(2, 2)
    )
    logits = part.apply(torch.ones(2, 3), context)
    assert logits.tolist() == [[1.0, -torch.inf, 1.0]] * 2
"""

OBSERVERS = '''\
"""$name: counts the tokens of a worker."""

from __future__ import annotations

from workerkit.framework import roles
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.request import ModelRunnerOutput
from workerkit.framework.registry import Registry

WORKERKIT_API = $api


class $cls(Observer):
    """Counts tokens. The other hooks that an observer may have are in `workerkit.framework.hooks.StepSpec`."""

    def __init__(self) -> None:
        self.num_tokens = 0

    @hookimpl
    def output_ready(self, output: ModelRunnerOutput) -> None:
        """The tokens of a step are on the host."""
        self.num_tokens += sum(map(len, output.sampled_token_ids))
'''

OBSERVERS_TEST = """

def test_it_counts_tokens() -> None:
    part, hooks = $module.$cls(), WorkerHooks()
    hooks.join(0, "$key", part)
    hooks.output_ready(ModelRunnerOutput(req_ids=("a", "b"), sampled_token_ids=((5,), (6, 7))))
    assert part.num_tokens == 3
    assert hooks.failures == ()
"""

WORKER_EXTENSIONS = '''\
"""$name: a method for the worker, called by name."""

from __future__ import annotations

from workerkit.framework import roles
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.device import DeviceRuntime
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.worker_extension import WorkerExtension
from workerkit.framework.registry import Registry

WORKERKIT_API = $api


class $cls(WorkerExtension):
    """Looks at weights. Every public method can be called: `worker.call("sum_of_weight", "norm.weight")`."""

    def __init__(self, device: DeviceRuntime, loaded: Later[LoadedModel]) -> None:
        self._device = device
        self._loaded = loaded  # built with the worker, before there is a model

    def sum_of_weight(self, name: str) -> float:
        """In order with the steps of the worker, which may still be under way."""
        weight = dict(self._loaded().network.weights())[name]
        return self._device.submit(lambda: float(weight.sum())).wait()
'''

WORKER_EXTENSIONS_TEST = """

def test_a_worker_calls_it() -> None:
    everything = fake_registry()
    PluginHost(everything).load("$name", $module)
    with assemble(fake_config(worker_extensions=["$name"]), registry=everything) as assembly:
        assembly.worker.start()
        assert assembly.worker.extension_methods == ("sum_of_weight",)
        assert assembly.worker.call("sum_of_weight", "salt") == FAKE_SALT
"""

KERNEL_LIBRARY = '''\
"""$name: kernels, to be named in front of others that have the same ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from workerkit.framework import roles
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.kernels import KernelLibrary
from workerkit.framework.registry import Registry

WORKERKIT_API = $api


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H], of x's dtype or float32: computed in float32, rounded to x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class $cls(KernelLibrary):
    """One op; the others come from libraries named after it. `workerkit.framework.interfaces.kernels` lists them."""

    @property
    def name(self) -> str:
        """What `workerkit wiring` calls it."""
        return "$name"

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Op -> function."""
        return {"rms_norm": rms_norm}
'''

KERNEL_LIBRARY_TEST = """

def test_its_op_is_bound() -> None:
    bindings = assemble(CONFIG, registry=registry()).get(KERNELS).bindings
    assert bindings["rms_norm"] == "$name"
    assert bindings["silu_and_mul"] == "reference"


def test_it_agrees_with_the_reference() -> None:
    reference = registry().entry("kernel_library", "reference").factory().ops["rms_norm"]
    x, weight = torch.randn(5, 16), torch.randn(16)
    torch.testing.assert_close($module.rms_norm(x, weight, 1e-5), reference(x, weight, 1e-5))
"""

SPECULATOR = '''\
"""$name: proposes the newest token again."""

from __future__ import annotations

from workerkit.framework import roles
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, Speculator
from workerkit.framework.registry import Registry

WORKERKIT_API = $api


class $cls(Speculator):
    """Repeats the newest token `limits.num_speculative_tokens` times."""

    def __init__(self, shape: WorkerShape) -> None:
        if not shape.num_speculative_tokens:
            raise UnsupportedError("limits.num_speculative_tokens is 0: $name may propose nothing")
        self._num_tokens = shape.num_speculative_tokens

    @property
    def num_speculative_tokens(self) -> int:
        """K."""
        return self._num_tokens

    def propose(self, inputs: DraftInputs) -> Drafts:
        """[num_reqs, K] int64; -1 is no draft. One with state by slot fills it in `add` and empties it in `clear`."""
        return Drafts(token_ids=inputs.next_tokens[:, None].repeat(1, self._num_tokens))
'''

REGISTER_PROPOSER = '''

@hookimpl
def worker_components(registry: Registry) -> None:
    """Called by workerkit when the plugin is loaded. A worker's proposer, or one of those of a composite."""
    registry.add(roles.SPECULATOR, "$name", $cls, defaults={"rejection": "standard"})
    registry.add(roles.PROPOSER, "$name", $cls)
'''

SPECULATOR_TEST = """

def test_it_repeats_the_newest_token() -> None:
    shape = WorkerShape(
        max_model_len=8, max_num_reqs=2, max_num_batched_tokens=8, vocab_size=10, num_speculative_tokens=3
    )
    rows = [
        Row(slot=0, computed=4, tokens=[1], sampled=[7]),
        Row(slot=1, computed=4, tokens=[1, 8, 5], drafts=2, sampled=[8, 9]),
    ]
    drafts = $module.$cls(shape).propose(draft_inputs(rows))
    assert drafts.token_ids.tolist() == [[7, 7, 7], [9, 9, 9]]


class TestConformance(SpeculatorConformance):
    names = ("$name",)

    @pytest.fixture
    def registry(self) -> Registry:
        registry = fake_registry()
        PluginHost(registry).load("$name", $module)
        return registry
"""

DERIVED = '''\
"""$name: a $role that starts from `$base_name`."""

from __future__ import annotations

from $base_module import $base
from workerkit.framework import roles
from workerkit.framework.hooks import hookimpl
from workerkit.framework.registry import Registry

WORKERKIT_API = $api


class $cls($base):
    """Hands everything on to `$base_name`: change what should differ, and delete the rest."""

$methods'''
