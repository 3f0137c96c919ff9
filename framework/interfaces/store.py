"""Where model files come from: paths, and named models that are fetched into a cache when first needed."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class NamedModel:
    """A model file that lies inside a wheel of a package index."""

    name: str
    description: str
    license: str  # SPDX identifier
    package: str
    version: str
    member: str  # path of the model file inside the wheel
    sha256: str  # of the member
    size: int  # of the member, in bytes
    chat: bool  # follows instructions through a chat template


@attrs.frozen(kw_only=True)
class GGUFTensor:
    """One tensor of a GGUF file, checked to lie within it."""

    name: str
    shape: tuple[int, ...]  # in numpy's order: rows first, the reverse of the file's
    type_name: str  # e.g. "F32", "Q4_K"
    offset: int  # of its first byte in the file
    num_bytes: int


@attrs.frozen(kw_only=True)
class GGUFHeader:
    """Everything in a GGUF file but the data."""

    path: pathlib.Path
    metadata: Mapping[str, Any] = attrs.field(repr=False)  # arrays as lists
    tensors: Mapping[str, GGUFTensor] = attrs.field(repr=False)


class ModelStore(abc.ABC):
    """Finds model files and reads the header that a loader and a tokenizer share."""

    @abc.abstractmethod
    def names(self) -> Mapping[str, NamedModel]:
        """The named models, by name."""

    @abc.abstractmethod
    def is_cached(self, name: str) -> bool:
        """Whether a named model is in the cache, whole by its size. ModelError when no model has that name."""

    @abc.abstractmethod
    def fetch(self, name: str, progress: bool | None = False) -> pathlib.Path:
        """The named model's file, downloaded and checked unless it is cached. `progress` draws bars on stderr;
        None draws them where stderr is a terminal."""

    @abc.abstractmethod
    def resolve(self, source: str) -> pathlib.Path:
        """A file or folder that exists. A named model comes first and is fetched when needed; `./name` means a path.

        Raises ModelError naming the nearest known model.
        """

    @abc.abstractmethod
    def read_gguf(self, path: pathlib.Path) -> GGUFHeader:
        """The header of a GGUF file, parsed once. Raises WeightError when it is damaged or truncated."""
