"""A model whose network comes from the model library."""

from __future__ import annotations

from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import LoadedModel, Model, ModelLibrary, ModelLoader


class NativeModel(Model):
    """Builds the network, lets the backends refuse it before any weight is read, then fills it."""

    def __init__(
        self,
        context: DeviceContext,
        loader: ModelLoader,
        library: ModelLibrary,
        attention: AttentionBackend,
        kernels: Kernels,
    ) -> None:
        self._context = context
        self._loader = loader
        self._library = library
        self._attention = attention
        self._kernels = kernels

    def load(self) -> LoadedModel:
        config = self._loader.read_config()
        network = self._library.build(config, self._context.dtype, self._context.device)
        self._attention.prepare(network.attention_layers, self._context.dtype)
        self._kernels.prepare(self._context)
        network.load_weights(self._loader.weights(config))
        weight_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in network.weights())
        return LoadedModel(network=network, config=config, weight_bytes=weight_bytes)

    def reload_weights(self, loaded: LoadedModel) -> None:
        loaded.network.load_weights(self._loader.weights(loaded.config))
