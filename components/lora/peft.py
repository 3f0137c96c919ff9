"""LoRA adapters (Hu et al., 2021) from PEFT's files, any mixture of them in one batch."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from workerkit.components.lora.peft_file import AdapterFile, read_adapter
from workerkit.framework.errors import ModelError, RequestError, UnsupportedError, did_you_mean
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.lora import AdaptedLinear, LoRA
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape


@attrs.frozen(kw_only=True)
class PeftLoRAConfig:
    """Options of `lora: peft`."""

    adapters: dict[str, str] = attrs.field(
        factory=dict, metadata={"doc": "name that requests use -> folder with adapter_config.json"}
    )
    max_adapters: int = attrs.field(
        default=8,
        validator=attrs.validators.ge(1),
        metadata={"doc": "that are loaded at a time; each costs every token of a step that uses one some work"},
    )
    max_rank: int = attrs.field(default=64, validator=attrs.validators.ge(1), metadata={"doc": "largest r"})


@attrs.define(eq=False)
class _Active:
    """What all corrected layers look at."""

    mask: torch.Tensor | None = None  # [T, adapters] of the step's tokens; None: no token has an adapter


class _Correction:
    """Of one linear layer."""

    def __init__(self, kernels: Kernels, active: _Active, a: torch.Tensor, b: torch.Tensor) -> None:
        self._add = kernels.add_lora
        self._active = active
        self._a = a
        self._b = b

    def __call__(self, x: torch.Tensor, output: torch.Tensor) -> None:
        if self._active.mask is not None:
            self._add(output, x, self._a, self._b, self._active.mask)


class PeftLoRA(LoRA):
    """The weights of all adapters lie stacked, layer by layer; a mask says whose a token is.

    Steps in which a request has an adapter run eagerly: graphs hold the network as it is. Drafts are made without
    adapters, and verified with them.
    """

    def __init__(
        self, config: PeftLoRAConfig, shape: WorkerShape, context: DeviceContext, loaded: LoadedModel, kernels: Kernels
    ) -> None:
        self._config = config
        self._context = context
        self._kernels = kernels
        self._network = loaded.network
        self._linears = loaded.network.linears()
        if not self._linears:
            raise UnsupportedError(
                f"components.lora: {loaded.config.architecture} has no layer that adapters can correct"
            )
        self._active = _Active()
        self._files: dict[str, AdapterFile] = {}
        self._names_of: dict[str, str] = {}  # request -> its adapter; on the host
        self._names: list[str | None] = [None] * shape.max_num_reqs  # by slot; on the stream
        self._num_adapted = 0  # slots with one
        for name, source in config.adapters.items():
            self.load(name, source)

    @property
    def adapters(self) -> Mapping[str, str]:
        return {name: file.digest for name, file in self._files.items()}

    def load(self, name: str, source: str) -> None:
        if name in self._names_of.values():
            raise RequestError(f"adapter {name!r} is in use")
        if name not in self._files and len(self._files) == self._config.max_adapters:
            raise UnsupportedError(
                f"adapter {name!r}: {len(self._files)} are loaded, which is components.lora.max_adapters"
            )
        file = read_adapter(pathlib.Path(source).expanduser(), self._network.canonical_name)
        self._check(name, file)
        self._files[name] = file
        self._stack()

    def _check(self, name: str, file: AdapterFile) -> None:
        problems = []
        for layer, a in file.a.items():
            if layer not in self._linears:
                problems.append(f"{layer} is no linear layer that adapters can correct")
                continue
            linear, projection = self._linears[layer]
            shape, right = (file.b[layer].shape[0], a.shape[1]), (linear.outputs[projection], linear.in_features)
            if shape != right:
                problems.append(f"{layer} corrects a matrix {list(shape)}, which is {list(right)} in the model")
            if a.shape[0] > self._config.max_rank:
                problems.append(f"{layer} has rank {a.shape[0]}, components.lora.max_rank is {self._config.max_rank}")
        if problems:
            raise ModelError("\n  - ".join([f"adapter {name!r} does not fit the model:", *problems]))

    def remove(self, name: str) -> None:
        if name not in self._files:
            raise RequestError(f"adapter {name!r} is not loaded; {did_you_mean(name, self._files)}")
        if name in self._names_of.values():
            raise RequestError(f"adapter {name!r} is in use")
        del self._files[name]
        self._stack()

    def _stack(self) -> None:
        """Put the adapters of each layer side by side, padded to the largest rank."""
        members: dict[int, tuple[AdaptedLinear, list[str]]] = {}
        for layer, (linear, _) in self._linears.items():
            members.setdefault(id(linear), (linear, []))[1].append(layer)
        for linear, layers in members.values():
            ranks = [sum(len(file.a[layer]) for layer in layers if layer in file.a) for file in self._files.values()]
            linear.adapter = self._correction(linear, layers, max(ranks)) if any(ranks) else None

    def _correction(self, linear: AdaptedLinear, layers: Sequence[str], rank: int) -> _Correction:
        number, width = len(self._files), sum(linear.outputs.values())
        dtype, device = self._context.dtype, self._context.device
        a = torch.zeros(number, rank, linear.in_features, dtype=dtype, device=device)
        b = torch.zeros(number, rank, width, dtype=dtype, device=device)
        starts = dict(zip(linear.outputs, np.cumsum([0, *linear.outputs.values()]).tolist(), strict=False))
        for index, file in enumerate(self._files.values()):
            row = 0
            for layer in layers:
                if layer not in file.a:
                    continue
                own_a, own_b, projection = file.a[layer], file.b[layer], self._linears[layer][1]
                rows, start = slice(row, row + len(own_a)), starts[projection]
                a[index, rows] = own_a.to(a)
                b[index, rows, start : start + len(own_b)] = (own_b.T.float() * file.scale[layer]).to(b)
                row += len(own_a)
        return _Correction(self._kernels, self._active, a.flatten(0, 1), b.flatten(0, 1))

    # Steps

    def schedule(self, output: SchedulerOutput) -> bool:
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._names_of.pop(req_id, None)
        for request in output.new_requests:
            if request.lora is not None:
                self._names_of[request.req_id] = request.lora
        return bool(self._names_of) and not self._names_of.keys().isdisjoint(output.num_scheduled_tokens)

    def add(self, slot: int, request: NewRequest) -> None:
        self.clear(slot)
        self._names[slot] = request.lora
        self._num_adapted += request.lora is not None

    def clear(self, slot: int) -> None:
        self._num_adapted -= self._names[slot] is not None
        self._names[slot] = None

    def activate(self, batch: InputBatch) -> None:
        self._active.mask = None
        if batch.is_dummy or not self._num_adapted:
            return
        numbers = {name: number for number, name in enumerate(self._files)}
        own = [numbers.get(self._names[slot] or "", -1) for slot in batch.plan.slots.tolist()]
        if max(own) < 0:
            return
        rows = torch.tensor(own, device=self._context.device)
        mask = rows[batch.token_rows][:, None] == torch.arange(len(numbers), device=rows.device)
        self._active.mask = mask.to(self._context.dtype)

    def deactivate(self) -> None:
        self._active.mask = None
