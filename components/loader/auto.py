"""Chooses the loader by what the model's source turns out to be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import attrs

from workerkit.components.layers.weights import Weight
from workerkit.components.loader.gguf import GGUFLoader
from workerkit.components.loader.safetensors import SafetensorsLoader
from workerkit.framework.interfaces.model import ModelConfig, ModelLoader
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.store import ModelStore


class AutoLoader(ModelLoader):
    """A file is read as GGUF, a folder as safetensors. The source is looked at (and fetched) at the first call."""

    def __init__(self, section: ModelSection, files: ModelStore) -> None:
        self._section = section
        self._files = files

    def read_config(self) -> ModelConfig:
        return self._delegate.read_config()

    def weights(self, config: ModelConfig) -> Iterator[tuple[str, Weight]]:
        return self._delegate.weights(config)

    def count(self) -> int:
        return self._delegate.count()

    def at(self, source: str) -> ModelLoader:
        return AutoLoader(attrs.evolve(self._section, source=source), self._files)

    @cached_property
    def _delegate(self) -> ModelLoader:
        is_folder = self._files.resolve(self._section.source).is_dir()
        return (SafetensorsLoader if is_folder else GGUFLoader)(self._section, self._files)
