"""What networks of torch modules have in common: they are filled by the names that tensors have in a checkpoint."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from workerkit.components.layers.linear import MergedLinear
from workerkit.components.layers.rope import RotaryEmbedding
from workerkit.components.layers.weights import Destination, KernelWeights, Weight
from workerkit.components.model.free_memory import giving_back
from workerkit.framework.errors import WeightError
from workerkit.framework.interfaces.lora import AdaptedLinear
from workerkit.framework.interfaces.model import ModelConfig, ModelLoader, Network, QuantizedTensor
from workerkit.framework.interfaces.sections import QuantizationSection

logger = logging.getLogger(__name__)

COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store it; it follows from the config


class CheckpointNetwork(torch.nn.Module, Network):
    """Knows which tensors a checkpoint must and may have, and refuses all others. No weight requires a gradient."""

    config: ModelConfig
    quantization = QuantizationSection()

    @abc.abstractmethod
    def required_tensors(self) -> dict[str, Destination]:
        """Checkpoint name -> where the tensor goes."""

    def zeroed_tensors(self) -> dict[str, Destination]:
        """Likewise; those that the checkpoint does not have are 0."""
        return {}

    def optional_tensors(self) -> dict[str, Destination]:
        """Likewise; those that the checkpoint does not have are left out, and `take` finds out. Asked for at the
        beginning of each load."""
        return {}

    def optional_shapes(self) -> dict[str, Sequence[tuple[int, ...]]]:
        """Checkpoint name of what `take` is given if it is there -> the shapes that it may have."""
        return {}

    def take(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        """The optional tensors that the checkpoint has, after all others are filled -> what is wrong with them."""
        return []

    def canonical_name(self, name: str) -> str | None:
        """The name that the methods above use for it; None: of no use here."""
        return None if name.endswith(COMPUTED) else name

    def linears(self) -> dict[str, tuple[AdaptedLinear, str]]:
        return {
            name.removesuffix(".weight"): (place.linear, place.projection)
            for name, place in self.required_tensors().items()
            if isinstance(place.linear, MergedLinear) and place.linear.kind in ("attention", "mlp")
        }

    def quantize(self, section: QuantizationSection) -> None:
        self.quantization = section

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named_parameters()
        yield from self.named_buffers()
        for name, module in self.named_modules():
            if isinstance(module, KernelWeights):
                yield from ((f"{name}.{index}", tensor) for index, tensor in enumerate(module.kept))

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> None:
        self.release()
        required, zeroed, shapes = self.required_tensors(), self.zeroed_tensors(), self.optional_shapes()
        targets = required | zeroed | self.optional_tensors()
        for _, linear in self._linears():
            linear.quantization = self.quantization.of(linear.kind)
        shapes |= {name: (target.shape,) for name, target in targets.items()}
        found: dict[str, torch.Tensor] = {}
        seen: set[str] = set()
        problems: list[str] = []
        for stored_name, tensor in giving_back(weights):
            name = self.canonical_name(stored_name)
            if name is None:
                continue
            if name not in shapes:
                problems.append(f"unexpected tensor {stored_name} {list(tensor.shape)}")
            elif name in seen:
                problems.append(f"{stored_name} comes twice")
            elif tuple(tensor.shape) not in shapes[name]:
                allowed = " or ".join(str(list(shape)) for shape in shapes[name])
                problems.append(f"{stored_name} has shape {list(tensor.shape)}, not {allowed}")
            elif name in targets:
                targets[name].fill(tensor)
            else:
                found[name] = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
            seen.add(name)
        problems += [f"missing tensor {name} {list(t.shape)}" for name, t in required.items() if name not in seen]
        for name in zeroed.keys() - seen:
            zeroed[name].fill(torch.zeros(zeroed[name].shape))
        if not problems:
            problems += self.take(found)
        if problems:
            raise WeightError(
                "\n  - ".join([f"the checkpoint does not fit {self.config.architecture}:", *sorted(problems)])
            )
        for module in self.modules():
            if isinstance(module, RotaryEmbedding):
                module.reset()  # its frequencies follow from the config
        if unpacked := [name for name, linear in self._linears() if linear.is_unpacked]:
            logger.warning("not kept packed, for their parts are packed in different ways: %s", ", ".join(unpacked))

    def release(self) -> None:
        for module in self.modules():
            if isinstance(module, KernelWeights):
                module.release()

    def _linears(self) -> Iterator[tuple[str, MergedLinear]]:
        return ((name, module) for name, module in self.named_modules() if isinstance(module, MergedLinear))


def weights_with_progress(
    loader: ModelLoader, config: ModelConfig, label: str, progress: bool
) -> Iterator[tuple[str, Weight]]:
    """What the loader yields, with a bar on stderr if that is a terminal."""
    from tqdm import tqdm

    hidden = None if progress else True  # None: hidden where stderr is no terminal
    yield from tqdm(loader.weights(config), label, loader.count(), leave=False, unit="tensor", disable=hidden)
