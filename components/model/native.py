"""A model whose network comes from the model library."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from workerkit.components.layers.weights import Weight
from workerkit.components.model.checkpoint import weights_with_progress
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import LoadedModel, Model, ModelConfig, ModelLibrary, ModelLoader
from workerkit.framework.interfaces.sections import ModelSection


@attrs.frozen(kw_only=True)
class NativeModelConfig:
    """Options of `model: native`."""

    progress: bool = attrs.field(
        default=True, metadata={"doc": "a progress bar while weights are read, where stderr is a terminal"}
    )


class NativeModel(Model):
    """Builds the network, lets the backends refuse it before any weight is read, then fills it."""

    def __init__(
        self,
        config: NativeModelConfig,
        section: ModelSection,
        context: DeviceContext,
        loader: ModelLoader,
        library: ModelLibrary,
        attention: AttentionBackend,
        kernels: Kernels,
    ) -> None:
        self._progress = config.progress
        self._quantization = section.quantization
        self._context = context
        self._loader = loader
        self._library = library
        self._attention = attention
        self._kernels = kernels

    def load(self) -> LoadedModel:
        config = self._loader.read_config()
        network = self._library.build(config, self._context.dtype, self._context.device)
        network.quantize(self._quantization)
        self._kernels.prepare(self._context)
        self._attention.prepare(network.attention_layers, self._context.dtype)
        network.load_weights(self._weights(config))
        weight_bytes = sum(tensor.nbytes for _, tensor in network.weights())
        return LoadedModel(network=network, config=config, weight_bytes=weight_bytes)

    def reload_weights(self, loaded: LoadedModel) -> None:
        loaded.network.load_weights(self._weights(loaded.config))

    def _weights(self, config: ModelConfig) -> Iterator[tuple[str, Weight]]:
        return weights_with_progress(self._loader, config, "loading weights", self._progress)
