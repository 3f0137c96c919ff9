"""What draft networks have in common: their config's fields, own or shared embeddings and head, own vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workerkit.components.layers.embedding import Embedding
from workerkit.components.layers.linear import Linear
from workerkit.components.layers.weights import Destination, destination
from workerkit.components.model.checkpoint import CheckpointNetwork
from workerkit.framework.errors import IntegrityError, ModelError
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import ModelConfig, ModelInputs, ModelOutput

EMBEDDING, HEAD, OFFSETS = "embed_tokens", "lm_head", "d2t"
# Of use in training only: which target tokens have a draft id, and copies of the target's tensors.
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def field(config: ModelConfig, name: str) -> Any:
    """A field of the config file, or of its `eagle_config`, where some checkpoints have it; None: absent."""
    inner = config.raw.get("eagle_config")
    value = config.raw.get(name)
    return inner.get(name) if value is None and isinstance(inner, Mapping) else value


def integer(config: ModelConfig, name: str, default: int | None = None) -> int:
    """A positive integer of the config file; null counts as absent. Raises ModelError naming the field."""
    value = default if (given := field(config, name)) is None else given
    if type(value) is not int or value < 1:
        raise ModelError(f"{config.architecture}: {name} must be an integer >= 1, not {value!r}")
    return value


def flag(config: ModelConfig, name: str, default: bool = False) -> bool:
    """A truth value of the config file; null counts as absent. Raises ModelError naming the field."""
    value = default if (given := field(config, name)) is None else given
    if type(value) is not bool:
        raise ModelError(f"{config.architecture}: {name} must be true or false, not {value!r}")
    return value


class DraftModule(CheckpointNetwork):
    """The part of DraftHead that is the same for all: embeddings and head are its own where the checkpoint has them.

    A draft vocabulary smaller than the target's needs a head and `d2t` of its own; they cannot be anyone else's.
    """

    prefix = ""  # of embeddings, head and d2t in the checkpoint

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.dtype, self.device = dtype, device
        self.draft_vocab_size = integer(config, "draft_vocab_size", config.vocab_size)
        if self.draft_vocab_size > config.vocab_size:
            raise ModelError(
                f"{config.architecture}: draft_vocab_size {self.draft_vocab_size} is more than "
                f"vocab_size {config.vocab_size}"
            )
        hidden = config.hidden_size
        self.embed_tokens = Embedding(self.prefix + EMBEDDING, config.vocab_size, hidden, kernels, dtype, device)
        self.lm_head = Linear(self.prefix + HEAD, hidden, self.draft_vocab_size, False, kernels, dtype, device)
        self._has_embeddings = self._has_head = False  # the checkpoint decides
        self._target_ids: torch.Tensor | None
        self.register_buffer("_target_ids", None)

    @property
    def tap_points(self) -> tuple[str, ...]:
        return ()

    @property
    def target_ids(self) -> torch.Tensor | None:
        return self._target_ids

    @property
    def has_embeddings(self) -> bool:
        return self._has_embeddings

    @property
    def has_head(self) -> bool:
        return self._has_head

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if not self._has_embeddings:
            raise IntegrityError(f"{self.config.architecture} has no embeddings of its own: use the target's")
        return self.embed_tokens.rows(input_ids)

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        raise IntegrityError(f"{self.config.architecture} is a draft: it has no forward pass of its own")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._has_head:
            raise IntegrityError(f"{self.config.architecture} has no head of its own: use the target's")
        return self.lm_head.logits(hidden)

    def required_tensors(self) -> dict[str, Destination]:
        """Of the own vocabulary; the network adds its layers'."""
        if self.draft_vocab_size == self.config.vocab_size:
            return {}
        return self.lm_head.destinations() | {self.prefix + OFFSETS: destination(self._add_target_ids())}

    def optional_tensors(self) -> dict[str, Destination]:
        own = self.embed_tokens.destinations()
        return own | self.lm_head.destinations() if self.draft_vocab_size == self.config.vocab_size else own

    def optional_shapes(self) -> dict[str, Sequence[tuple[int, ...]]]:
        same = self.draft_vocab_size == self.config.vocab_size
        return {self.prefix + OFFSETS: [(self.draft_vocab_size,)]} if same else {}

    def take(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        self._has_embeddings = self.embed_tokens.matrix is not None
        self._has_head = self.lm_head.matrix is not None
        if (offsets := found.get(self.prefix + OFFSETS)) is not None and offsets.any():
            self._add_target_ids().copy_(offsets)
        if self._target_ids is None:
            return []
        if not self._has_head:
            own, head = self.prefix + OFFSETS, self.prefix + HEAD
            return [f"{own} without {head}.weight: the target's head knows no draft vocabulary"]
        self._target_ids += torch.arange(self.draft_vocab_size, device=self.device)
        return unusable_ids(self.prefix + OFFSETS, self._target_ids, self.config.vocab_size)

    def canonical_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return None if name in UNUSED else super().canonical_name(name)

    def _add_target_ids(self) -> torch.Tensor:
        """Memory is taken the first time, and filled again later."""
        if self._target_ids is None:
            self._target_ids = torch.empty(self.draft_vocab_size, dtype=torch.int64, device=self.device)
        return self._target_ids


def unusable_ids(name: str, target_ids: torch.Tensor, vocab_size: int) -> list[str]:
    """What is wrong with the target's ids of a draft vocabulary, [Vd] int64."""
    if ((target_ids < 0) | (target_ids >= vocab_size)).any():
        return [f"{name} leads to token ids from {int(target_ids.min())} to {int(target_ids.max())} of {vocab_size}"]
    if (target_ids.sort().values.diff() == 0).any():
        return [f"{name} leads to the same token id more than once"]
    return []
