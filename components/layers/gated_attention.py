"""Attention whose output is gated, as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import torch

from workerkit.components.layers.attention import Attention
from workerkit.components.layers.mixer import LayerContext


class GatedAttention(Attention):
    """q_proj makes a query and a gate for each head, one behind the other; what is attended is multiplied by the
    sigmoid of the gate, element by element."""

    query_parts = 2

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        both, key, value = self.project(x)
        query, gate = both.view(len(x), self.layer.num_heads, 2, -1).unbind(2)
        attended = self.attend(query, key, value, context)
        result: torch.Tensor = self.o_proj(attended * gate.flatten(1).sigmoid())
        return result
