"""Throw-away plugins: a sampler stage that fails requests, and methods for the worker, ours and vLLM's way."""

import contextlib
import sys

import torch

from workerkit.framework import roles
from workerkit.framework.errors import RequestError
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.runner import ModelRunner
from workerkit.framework.interfaces.sampling import SamplerStage
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.worker_extension import WorkerExtension

WORKERKIT_API = 1


class Poison(SamplerStage):
    """`extra_args={"poison": n}`: after n tokens its logits are not a number. It refuses what is no number."""

    parameters = ("poison",)

    def __init__(self):
        self._after = {}  # by slot

    def applies_to(self, params):
        wanted = params.extra_args.get("poison")
        if not isinstance(wanted, int | None):
            raise RequestError(f"extra_args: poison is {wanted!r}; right: a number of tokens")
        return wanted is not None

    def add(self, slot, request):
        self._after[slot] = request.sampling.extra_args["poison"]

    def clear(self, slot):
        self._after.pop(slot, None)

    def apply(self, logits, context):
        after = torch.tensor([self._after[slot] for slot in context.host_slots.tolist()])
        logits[context.positions + 1 >= context.prompt_lens + after] = torch.nan
        return logits


class Tools(WorkerExtension):
    """Methods with arguments, with an error, and with a look at the model and the runner."""

    def __init__(self, loaded: Later[LoadedModel], runner: Later[ModelRunner]):
        self._loaded = loaded
        self._runner = runner

    def num_weights(self, factor=1):
        return factor * sum(weight.numel() for _, weight in self._loaded().network.weights())

    def num_requests(self):
        return self._runner().num_requests

    def fail(self):
        raise LookupError("as told")


class Hides(WorkerExtension):
    """Has the name of a method that only vLLM's worker has."""

    def get_model(self):
        raise NotImplementedError


class Foreign:
    """For vLLM's --worker-extension-cls: mixed into the worker's class."""

    def rank_and(self, value):
        return self.rank, value


class ForeignTools:
    """Has the name of one of Tools."""

    def num_weights(self):
        raise NotImplementedError


@hookimpl
def worker_components(registry):
    registry.add(roles.SAMPLER_STAGE, "poison", Poison)
    registry.add(roles.WORKER_EXTENSIONS, "tools", Tools)
    registry.add(roles.WORKER_EXTENSIONS, "hides", Hides)


@contextlib.contextmanager
def installed(folder):
    """As if a package with this plugin had been installed; `folder` is its site-packages."""
    info = folder / "vllm_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[workerkit]\nvllm_plugin = {__name__}\n")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
