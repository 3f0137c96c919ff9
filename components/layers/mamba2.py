"""The recurrent layer of Mamba-2 (Dao and Gu, 2024), as it stands in hybrid models."""

from __future__ import annotations

import torch

from workerkit.components.layers.linear import Linear
from workerkit.components.layers.mixer import LayerContext, RecurrentMixer, conv_and_ssm
from workerkit.components.layers.weights import Destination, Weight, destination
from workerkit.framework.interfaces.families import Mamba2Config
from workerkit.framework.interfaces.kernels import Kernels


class Mamba2Mixer(RecurrentMixer):
    """A projection to a gate, the channels x, b, c of a short convolution, and time steps; the recurrence of each head;
    a gated norm, and a projection back. Formulas as in Hugging Face transformers (`BambaMixer`), with its time steps
    bounded in every step: transformers leaves that out where it decodes from a cache.

    name, index: of the RecurrentLayer. eps: of the norm.
    """

    def __init__(
        self,
        mamba: Mamba2Config,
        hidden: int,
        eps: float,
        name: str,
        index: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.mamba = mamba
        self.eps = eps
        self.kernels = kernels
        inner, channels, heads = mamba.intermediate_size, mamba.conv_dim, mamba.num_heads
        state = (heads, mamba.head_dim, mamba.state_size)
        conv = (channels, mamba.conv_width - 1)
        self.layer = conv_and_ssm(name, index, conv, state, dtype)
        self.split = [inner, channels, heads]
        outputs, bias = sum(self.split), mamba.proj_bias
        self.in_proj = Linear("in_proj", hidden, outputs, bias, kernels, dtype, device, "attention")
        self.out_proj = Linear("out_proj", inner, hidden, bias, kernels, dtype, device, "attention")

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.conv_weight = parameter(channels, 1, mamba.conv_width, dtype=dtype)
        self.conv_bias = parameter(channels, dtype=dtype) if mamba.conv_bias else None
        self.dt_bias, self.a, self.d = parameter(heads), parameter(heads), parameter(heads)
        self.norm_weight = parameter(inner)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        assert context.recurrent is not None, "networks with recurrent layers are given their states"
        batch, mamba = context.recurrent, self.mamba
        conv_states, states = batch.states[self.layer.index]
        rows = (batch.initial, batch.token_states, batch.query_start_loc)
        gate, channels, dt = torch.split(self.in_proj(x), self.split, dim=-1)
        mixed = self.kernels.causal_conv1d(channels, self.conv_weight[:, 0], self.conv_bias, conv_states, *rows)
        shared = mamba.num_groups * mamba.state_size
        parts = torch.split(torch.nn.functional.silu(mixed), [mamba.intermediate_size, shared, shared], dim=-1)
        values = parts[0].view(-1, mamba.num_heads, mamba.head_dim)
        b, c = (part.view(-1, mamba.num_groups, mamba.state_size) for part in parts[1:])
        steps = torch.nn.functional.softplus(dt.float() + self.dt_bias).clamp(*mamba.time_step_limit)
        y = self.kernels.state_space(values, steps, self.a, b, c, states, *rows)
        y = y.float() + self.d[:, None] * values
        result: torch.Tensor = self.out_proj(self._norm(y.flatten(1), gate).to(x.dtype))
        return result

    def _norm(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The gate comes first, then the norm of each group of channels, in float32."""
        gated = y * torch.nn.functional.silu(gate.float())
        groups = gated.view(len(gated), self.mamba.num_groups, -1)
        return torch.nn.functional.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.norm_weight

    def destinations(self) -> dict[str, Destination]:
        tensors = self.in_proj.destinations() | self.out_proj.destinations()
        plain = {"conv1d.weight": self.conv_weight, "dt_bias": self.dt_bias, "D": self.d}
        plain |= {"norm.weight": self.norm_weight} | ({} if self.conv_bias is None else {"conv1d.bias": self.conv_bias})
        tensors |= {name: destination(tensor) for name, tensor in plain.items()}
        tensors["A_log"] = Destination(tuple(self.a.shape), self._fill_a)
        return {f"mamba.{name}": place for name, place in tensors.items()}

    def _fill_a(self, weight: Weight) -> None:
        values = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        self.a.copy_(-values.float().exp())
