"""A mixture of experts in the place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workerkit.components.layers.linear import Linear
from workerkit.components.layers.weights import Destination, KernelWeights, Weight, copy
from workerkit.framework.interfaces.kernels import Experts, Kernels
from workerkit.framework.interfaces.model import MoEConfig


def softmax_top_k(logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits float32 [T, E] -> experts [T, k] int64 and their weights [T, k]: the largest probabilities,
    divided by their sum with `normalize`. As in Mixtral (Jiang et al., 2024) and Qwen3-MoE."""
    weights, ids = torch.topk(logits.softmax(-1), top_k, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights


class ExpertWeights(KernelWeights):
    """Gated MLPs that are kept stacked, in the form that suits the kernels, which is the only copy.

    names: checkpoint names of an expert's gate, up and down projections.
    """

    def __init__(
        self,
        config: MoEConfig,
        hidden: int,
        names: tuple[str, str, str],
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden = hidden
        self.names = names
        self.kernels = kernels
        self.dtype, self.device = dtype, device
        self.experts: Experts | None = None
        self._gate_up = self._down = torch.empty(0)
        self._num_filled = 0  # tensors of the checkpoint that are in these

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids [T, k] int64, weights [T, k] float32 -> [T, H]."""
        assert self.experts is not None, "load_weights comes first"
        return self.experts(x, ids, weights)

    def destinations(self) -> dict[str, Destination]:
        """`0.w1.weight` and the like -> where it goes."""
        inner = self.config.intermediate_size
        gate, up, down = self.names
        places = {}
        for expert in range(self.config.num_experts):
            for name, shape, rows in (
                (gate, (inner, self.hidden), slice(0, inner)),
                (up, (inner, self.hidden), slice(inner, 2 * inner)),
                (down, (self.hidden, inner), None),
            ):
                places[f"{expert}.{name}.weight"] = Destination(shape, self._filler(expert, rows))
        return places

    def _filler(self, expert: int, rows: slice | None) -> Callable[[Weight], None]:
        number, inner = self.config.num_experts, self.config.intermediate_size

        def fill(weight: Weight) -> None:
            if not self._num_filled:
                self._gate_up = torch.empty(number, 2 * inner, self.hidden, dtype=self.dtype, device=self.device)
                self._down = torch.empty(number, self.hidden, inner, dtype=self.dtype, device=self.device)
            copy([weight], self._down[expert] if rows is None else self._gate_up[expert, rows])
            self._num_filled += 1
            if self._num_filled == 3 * number:
                self.experts = self.kernels.experts(self._gate_up, self._down)
                self._forget_pieces()

        return fill

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        return () if self.experts is None else self.experts.tensors

    def release(self) -> None:
        self.experts = None
        self._forget_pieces()

    def _forget_pieces(self) -> None:
        self._gate_up = self._down = torch.empty(0)
        self._num_filled = 0


class SparseMLP(torch.nn.Module):
    """A router in front of experts. `room`: where its tensors are below a layer in a checkpoint."""

    def __init__(self, experts: ExpertWeights, room: str) -> None:
        super().__init__()
        self.room = room
        self.experts = experts
        number, kernels = experts.config.num_experts, experts.kernels
        self.gate = Linear("gate", experts.hidden, number, False, kernels, experts.dtype, experts.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        config = self.experts.config
        ids, weights = softmax_top_k(self.gate.logits(x), config.num_experts_per_tok, config.normalize)
        result: torch.Tensor = self.experts(x, ids, weights)
        return result

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below the layer -> where the tensor goes."""
        places = {f"{self.room}.{name}": place for name, place in self.gate.destinations().items()}
        return places | {f"{self.room}.experts.{name}": place for name, place in self.experts.destinations().items()}
