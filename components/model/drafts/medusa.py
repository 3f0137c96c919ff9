"""Medusa (Cai et al., 2024): residual blocks and a head for each token ahead, on the target's final hidden state.

Weight names of the authors' files and of vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from workerkit.components.layers.linear import Linear
from workerkit.components.layers.weights import Destination, destination
from workerkit.components.model.checkpoint import CheckpointNetwork
from workerkit.components.model.drafts.head import flag, integer, unusable_ids
from workerkit.framework.errors import IntegrityError, ModelError
from workerkit.framework.interfaces.draft import HeadsDraft
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import ModelConfig, ModelInputs, ModelOutput

_AUTHORS = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


class Medusa(CheckpointNetwork, HeadsDraft):
    """Head k: y = y + silu(W y + b) for each of its layers, from y = h on; then its own head's logits.

    `truncated_vocab_size` with the tensor `token_map` is the draft vocabulary; `original_lm_head`: all have one head.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        raw = config.raw
        # The authors' names, then vLLM's; there the number of layers is that of one head.
        self._num_heads = integer(config, "medusa_num_heads" if "medusa_num_heads" in raw else "num_heads")
        self.num_layers = integer(config, "medusa_num_layers", config.num_hidden_layers)
        hidden, vocab_size = config.hidden_size, config.vocab_size
        draft_vocab_size = integer(config, "truncated_vocab_size", vocab_size)
        if draft_vocab_size > vocab_size:
            raise ModelError(
                f"{config.architecture}: truncated_vocab_size {draft_vocab_size} is more than vocab_size {vocab_size}"
            )
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleList(
                Linear(f"blocks.{head}.layers.{layer}", hidden, hidden, True, kernels, dtype, device)
                for layer in range(self.num_layers)
            )
            for head in range(self._num_heads)
        )
        self.heads = torch.nn.ModuleList(
            Linear(f"lm_heads.{head}", hidden, draft_vocab_size, False, kernels, dtype, device)
            for head in range(1 if flag(config, "original_lm_head") else self._num_heads)
        )
        self._target_ids: torch.Tensor | None
        ids = torch.empty(draft_vocab_size, dtype=torch.int64, device=device)
        self.register_buffer("_target_ids", ids if draft_vocab_size < vocab_size else None)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return ()

    @property
    def tap_points(self) -> tuple[str, ...]:
        return ()

    @property
    def features(self) -> Sequence[str]:
        return ()

    @property
    def target_ids(self) -> torch.Tensor | None:
        return self._target_ids

    @property
    def has_embeddings(self) -> bool:
        return False

    @property
    def has_head(self) -> bool:
        return True

    @property
    def num_heads(self) -> int:
        return self._num_heads

    def head_logits(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        block = self.blocks[head]
        assert isinstance(block, torch.nn.ModuleList)
        for layer in block:
            hidden = hidden + torch.nn.functional.silu(layer(hidden))
        return self._linear(self.heads)[min(head, len(self.heads) - 1)].logits(hidden)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise IntegrityError("Medusa reads no tokens")

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        raise IntegrityError("Medusa is a draft: it has no forward pass of its own")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise IntegrityError("Medusa has a head for each token ahead: see head_logits")

    def required_tensors(self) -> dict[str, Destination]:
        tensors: dict[str, Destination] = {}
        for head in self._linear(self.heads):
            tensors |= head.destinations()
        tensors |= {name: place for name, place in self._block_tensors().items() if name.endswith("weight")}
        if self._target_ids is not None:
            tensors["token_map"] = destination(self._target_ids)
        return tensors

    def zeroed_tensors(self) -> dict[str, Destination]:
        return {name: place for name, place in self._block_tensors().items() if name.endswith("bias")}

    def _block_tensors(self) -> dict[str, Destination]:
        return {
            name: place
            for block in self.blocks
            for layer in self._linear(block)
            for name, place in layer.destinations().items()
        }

    def take(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        return [] if self._target_ids is None else unusable_ids("token_map", self._target_ids, self.config.vocab_size)

    def canonical_name(self, name: str) -> str | None:
        if match := _AUTHORS.fullmatch(name):
            head, layer, is_block, kind = match.groups()
            if is_block:
                return f"blocks.{head}.layers.{layer}.{kind}"
            return f"lm_heads.{head}.{kind}" if int(layer) == self.num_layers else name
        name = name.removeprefix("medusa_heads.")
        return "lm_heads.0.weight" if name == "lm_head.weight" and len(self.heads) == 1 else name

    @staticmethod
    def _linear(modules: torch.nn.Module) -> list[Linear]:
        assert isinstance(modules, torch.nn.ModuleList)
        return [module for module in modules if isinstance(module, Linear)]
