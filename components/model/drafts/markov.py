"""DSpark's sequential head: what the token before says about the next one, as a low-rank bias on its logits."""

from __future__ import annotations

import torch

from workerkit.components.layers.embedding import Embedding
from workerkit.components.layers.linear import Linear
from workerkit.components.layers.weights import Destination
from workerkit.framework.errors import ModelError, did_you_mean
from workerkit.framework.interfaces.kernels import Kernels

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(torch.nn.Module):
    """`w2 · w1[previous]`; gated by the position's state, or carried along the block by a recurrent cell.

    V is the target's vocabulary, Vd the draft's. Raises ModelError for an unknown kind.
    """

    def __init__(
        self,
        kind: str,
        vocab_size: int,
        draft_vocab_size: int,
        rank: int,
        hidden_size: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ModelError(f"markov_head_type {kind!r} is not known; {did_you_mean(kind, KINDS)}")
        self.rank = rank
        self.markov_w1 = Embedding("markov_w1", vocab_size, rank, kernels, dtype, device)
        self.markov_w2 = Linear("markov_w2", rank, draft_vocab_size, False, kernels, dtype, device)
        self.gate_proj: Linear | None = None
        self.joint_proj: Linear | None = None
        if kind == "gated":
            self.gate_proj = Linear("gate_proj", hidden_size + rank, rank, True, kernels, dtype, device)
        elif kind == "rnn":
            self.joint_proj = Linear("joint_proj", 2 * rank + hidden_size, 3 * rank, True, kernels, dtype, device)

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """Ids of the target [R] -> [R, r]."""
        return self.markov_w1.rows(previous)

    def forward(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[R], [R, H], state [R, r] or None at the block's start -> float32 bias [R, Vd], the next state."""
        embeds = self.embed(previous)
        if self.gate_proj is not None:
            embeds = self.gate_proj(torch.cat((hidden, embeds), dim=-1)).sigmoid() * embeds
        elif self.joint_proj is not None:
            state = torch.zeros_like(embeds) if state is None else state
            gate, new, out = self.joint_proj(torch.cat((state, embeds, hidden), dim=-1)).chunk(3, dim=-1)
            state = torch.lerp(new.tanh(), state, gate.sigmoid())
            embeds = out.tanh()
        return self.markov_w2.logits(embeds), state

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below `markov_head.` -> where the tensor goes."""
        tensors: dict[str, Destination] = {}
        for linear in (self.markov_w1, self.markov_w2, self.gate_proj, self.joint_proj):
            if linear is not None:
                tensors |= linear.destinations()
        return tensors
