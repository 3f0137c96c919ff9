"""What draft networks have in common: their config's fields, own or shared embeddings and head, own vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workerkit.components.layers.linear import Linear
from workerkit.components.model.checkpoint import CheckpointNetwork, matrix
from workerkit.framework.errors import IntegrityError, ModelError
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import ModelConfig, ModelInputs, ModelOutput

EMBEDDING, HEAD, OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
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
        self.embed_tokens: torch.nn.Parameter | None = None
        self.lm_head: Linear | None = None
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
        return self.embed_tokens is not None

    @property
    def has_head(self) -> bool:
        return self.lm_head is not None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is None:
            raise IntegrityError(f"{self.config.architecture} has no embeddings of its own: use the target's")
        return torch.nn.functional.embedding(input_ids, self.embed_tokens)

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        raise IntegrityError(f"{self.config.architecture} is a draft: it has no forward pass of its own")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.lm_head is None:
            raise IntegrityError(f"{self.config.architecture} has no head of its own: use the target's")
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()

    def required_tensors(self) -> dict[str, torch.Tensor]:
        """Of the own vocabulary; the network adds its layers'."""
        if self.draft_vocab_size == self.config.vocab_size:
            return {}
        return {self.prefix + HEAD: self._add_head().weight, self.prefix + OFFSETS: self._add_target_ids()}

    def optional_shapes(self) -> dict[str, Sequence[tuple[int, ...]]]:
        vocab_size, hidden = self.config.vocab_size, self.config.hidden_size
        shapes: dict[str, Sequence[tuple[int, ...]]] = {self.prefix + EMBEDDING: [(vocab_size, hidden)]}
        if self.draft_vocab_size == vocab_size:
            shapes |= {self.prefix + HEAD: [(vocab_size, hidden)], self.prefix + OFFSETS: [(vocab_size,)]}
        return shapes

    def take(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        # The memory is taken the first time, and filled again later.
        if (embedding := found.get(self.prefix + EMBEDDING)) is not None:
            if self.embed_tokens is None:
                self.embed_tokens = matrix(len(embedding), embedding.shape[1], self.dtype, self.device)
            self.embed_tokens.copy_(embedding)
        if (head := found.get(self.prefix + HEAD)) is not None:
            self._add_head().weight.copy_(head)
        if (offsets := found.get(self.prefix + OFFSETS)) is not None and offsets.any():
            self._add_target_ids().copy_(offsets)
        if self._target_ids is None:
            return []
        if self.lm_head is None:
            return [f"{self.prefix}{OFFSETS} without {self.prefix}{HEAD}: the target's head knows no draft vocabulary"]
        self._target_ids += torch.arange(self.draft_vocab_size, device=self.device)
        return unusable_ids(self.prefix + OFFSETS, self._target_ids, self.config.vocab_size)

    def canonical_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return None if name in UNUSED else super().canonical_name(name)

    def _add_head(self) -> Linear:
        if self.lm_head is None:
            size = self.config.hidden_size
            self.lm_head = Linear("lm_head", size, self.draft_vocab_size, False, self.kernels, self.dtype, self.device)
        return self.lm_head

    def _add_target_ids(self) -> torch.Tensor:
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
