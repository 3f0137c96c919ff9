"""A mixture of experts in the place of a layer's MLP."""

from __future__ import annotations

import attrs
import torch

from workerkit.components.layers.linear import Linear
from workerkit.components.layers.mlp import GatedMLP
from workerkit.components.layers.weights import Destination, destination
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import MoEConfig


def softmax_top_k(logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits float32 [T, E] -> experts [T, k] int64 and their weights [T, k]: the largest probabilities,
    divided by their sum with `normalize`. As in Mixtral (Jiang et al., 2024) and Qwen3-MoE."""
    weights, ids = torch.topk(logits.softmax(-1), top_k, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights


def sigmoid_top_k(logits: torch.Tensor, bias: torch.Tensor, config: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise for DeepSeek-V3 (2024): `bias` [E] is added to the sigmoids when experts are chosen, and is not in their
    weights. Experts lie in groups; only those of the groups whose two best are best together can be chosen."""
    scores = logits.sigmoid()
    biased = scores + bias
    groups = biased.view(len(biased), config.num_groups, -1)  # [T, groups, E / groups]
    worth = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = worth.topk(config.top_k_groups, dim=-1).indices
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
    open_scores = groups.masked_fill(closed[..., None], float("-inf")).flatten(-2)
    ids = open_scores.topk(config.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(-1, ids)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * config.scaling


class ExpertWeights(torch.nn.Module):
    """Gated MLPs, of which each token goes through a few; `model.quantization.mlp` says how their matrices are kept.

    names: checkpoint names of an expert's gate, up and down projections. act: a name of ACTIVATIONS.
    """

    def __init__(
        self,
        config: MoEConfig,
        hidden: int,
        names: tuple[str, str, str],
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
        act: str = "silu",
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden = hidden
        self.kernels = kernels
        self.dtype, self.device = dtype, device
        inner = config.intermediate_size
        self.mlps = torch.nn.ModuleList(
            GatedMLP(hidden, inner, bias, kernels, dtype, device, act, str(number), names)
            for number in range(config.num_experts)
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids [T, k] int64, weights [T, k] float32 -> [T, H]."""
        return self.kernels.experts(x, ids, weights, list(self.mlps))

    def destinations(self) -> dict[str, Destination]:
        """`0.w1.weight` and the like -> where it goes."""
        places: dict[str, Destination] = {}
        for mlp in self.mlps:
            assert isinstance(mlp, GatedMLP)
            # An adapter corrects rows that are a step's tokens in their order, which those of an expert are not.
            places |= {name: attrs.evolve(place, linear=None) for name, place in mlp.destinations().items()}
        return places


class SparseMLP(torch.nn.Module):
    """A router in front of experts. `room`: where its tensors are below a layer in a checkpoint.

    shared: what every token goes through, beside its experts. shared_gate: name of the projection to a number whose
    sigmoid multiplies what comes out of that; None: nothing does. router: name of the router, in the room.
    """

    def __init__(
        self,
        experts: ExpertWeights,
        room: str,
        shared: GatedMLP | None = None,
        shared_gate: str | None = None,
        *,
        router: str = "gate",
        router_bias: bool = False,
    ) -> None:
        super().__init__()
        self.room = room
        self.experts = experts
        self.shared = shared
        config, kernels, dtype, device = experts.config, experts.kernels, experts.dtype, experts.device
        self.gate = Linear(router, experts.hidden, config.num_experts, router_bias, kernels, dtype, device)
        self.shared_gate: Linear | None = None
        if shared_gate is not None:
            self.shared_gate = Linear(shared_gate, experts.hidden, 1, False, kernels, dtype, device)
        self.score_bias: torch.nn.Parameter | None = None
        if config.routing == "sigmoid":
            bias = torch.empty(config.num_experts, dtype=torch.float32, device=device)
            self.score_bias = torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        routed: torch.Tensor = self.experts(x, *self.route(self.gate.logits(x)))
        if self.shared is None:
            return routed
        shared: torch.Tensor = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        return self.experts.kernels.add(routed, shared)

    def route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Router logits float32 [T, E] -> experts [T, k] int64, their weights [T, k] float32."""
        config = self.experts.config
        if self.score_bias is not None:
            return sigmoid_top_k(logits, self.score_bias, config)
        return softmax_top_k(logits, config.num_experts_per_tok, config.normalize)

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below the layer -> where the tensor goes."""
        places = {f"{self.room}.{name}": place for name, place in self.gate.destinations().items()}
        if self.score_bias is not None:
            places[f"{self.room}.gate.e_score_correction_bias"] = destination(self.score_bias)
        if self.shared_gate is not None:
            places |= {f"{self.room}.{name}": place for name, place in self.shared_gate.destinations().items()}
        if self.shared is not None:
            places |= self.shared.destinations()
        return places | {f"{self.room}.experts.{name}": place for name, place in self.experts.destinations().items()}
