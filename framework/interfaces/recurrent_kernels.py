"""Signatures of the ops of recurrent layers. All say by `initial`, `token_states` and `query_start_loc`, which are
those of RecurrentBatch, where the states of their rows lie. Every row has a token at least. A row's initial state is
read before any of its states is written, and no row begins where another one leaves a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class CausalConv1d(Protocol):
    """Depthwise causal convolution, without an activation."""

    """x [T, C]; weight [C, width], its last column for the token itself; bias [C] or None; states [S, C, width - 1], in
    place: the last width - 1 inputs, oldest first; initial [R] int64; token_states [T] int64, -1: not kept;
    query_start_loc [R + 1] int32 -> [T, C]."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        initial: torch.Tensor,
        token_states: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> torch.Tensor: ...


class StateSpace(Protocol):
    """The recurrence of Mamba-2 (Dao and Gu, 2024)."""

    """h <- h * exp(a * dt) + dt * x ⊗ b, y = h · c, of each head. x [T, Nh, P]; dt [T, Nh] float32, a [Nh] float32,
    below 0; b, c [T, G, N], Nh / G heads sharing each; states [S, Nh, P, N] float32, in place; initial [R] int64;
    token_states [T] int64, -1: not kept; query_start_loc [R + 1] int32 -> [T, Nh, P]."""

    def __call__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        states: torch.Tensor,
        initial: torch.Tensor,
        token_states: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> torch.Tensor: ...


class GatedDeltaRule(Protocol):
    """The recurrence of Gated DeltaNet (Yang et al., 2024)."""

    """S <- exp(decay) S, S <- S + k beta (v - S^T k)^T, o = S^T q / sqrt(Dk), of each head. query, key [T, Nk, Dk],
    which the op divides by their L2 norms, Nv / Nk heads sharing each; value [T, Nv, Dv]; decay (its logarithm, at most
    0) and beta [T, Nv] float32; states [S, Nv, Dk, Dv] float32, in place; initial [R] int64; token_states [T] int64,
    -1: not kept; query_start_loc [R + 1] int32 -> [T, Nv, Dv]."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        initial: torch.Tensor,
        token_states: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> torch.Tensor: ...
