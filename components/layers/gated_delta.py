"""Gated DeltaNet (Yang et al., 2024), the recurrent layer of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.components.layers.mixer import LayerContext, RecurrentMixer, conv_and_ssm
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.weights import Destination, Weight, destination
from workerkit.framework.interfaces.families import GatedDeltaConfig
from workerkit.framework.interfaces.kernels import Kernels


class GatedDeltaNet(RecurrentMixer):
    """Projections to queries, keys and values, which go through a short convolution, and to a gate, rates and decays;
    the gated delta rule of each head; a norm before the gate, and a projection back. Formulas as in Hugging Face
    transformers (`Qwen3NextGatedDeltaNet`).

    name, index: of the RecurrentLayer. eps: of the norm. is_interleaved: a checkpoint has two tensors for all
    projections, whose rows belong to one key head after another (Qwen3-Next), instead of one for each (Qwen3.5).
    """

    def __init__(
        self,
        delta: GatedDeltaConfig,
        hidden: int,
        eps: float,
        name: str,
        index: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_interleaved: bool,
    ) -> None:
        super().__init__()
        self.delta = delta
        self.is_interleaved = is_interleaved
        self.kernels = kernels
        heads = delta.num_value_heads
        conv = (delta.conv_dim, delta.conv_width - 1)
        state = (heads, delta.key_head_dim, delta.value_head_dim)
        self.layer = conv_and_ssm(name, index, conv, state, dtype)
        qkvz = {"in_proj_qkv": delta.conv_dim, "in_proj_z": delta.value_size}
        # What rates and decays are made of is small, and errors in it add up: it is kept as it is.
        ba = {"in_proj_b": heads, "in_proj_a": heads}
        self.in_proj_qkvz = MergedLinear(hidden, qkvz, False, kernels, dtype, device, "attention")
        self.in_proj_ba = MergedLinear(hidden, ba, False, kernels, dtype, device)
        self.out_proj = Linear("out_proj", delta.value_size, hidden, False, kernels, dtype, device, "attention")
        self.norm = RMSNorm(delta.value_head_dim, eps, kernels, dtype, device)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.conv_weight = parameter(delta.conv_dim, 1, delta.conv_width, dtype=dtype)
        self.dt_bias, self.a_log = parameter(heads), parameter(heads)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        assert context.recurrent is not None, "networks with recurrent layers are given their states"
        batch, delta = context.recurrent, self.delta
        conv_states, states = batch.states[self.layer.index]
        rows = (batch.initial, batch.token_states, batch.query_start_loc)
        qkv, z = torch.split(self.in_proj_qkvz(x), [delta.conv_dim, delta.value_size], dim=-1)
        b, a = self.in_proj_ba(x).float().chunk(2, dim=-1)
        mixed = self.kernels.causal_conv1d(qkv, self.conv_weight[:, 0], None, conv_states, *rows)
        sizes = [delta.key_size, delta.key_size, delta.value_size]
        query, key, value = torch.split(torch.nn.functional.silu(mixed), sizes, dim=-1)
        query, key = (part.view(len(x), delta.num_key_heads, -1) for part in (query, key))
        value = value.view(len(x), delta.num_value_heads, -1)
        decay = -self.a_log.exp() * torch.nn.functional.softplus(a + self.dt_bias)
        attended = self.kernels.gated_delta_rule(query, key, value, decay, b.sigmoid(), states, *rows)
        gated = self.norm(attended).flatten(1).float() * torch.nn.functional.silu(z.float())
        result: torch.Tensor = self.out_proj(gated.to(x.dtype))
        return result

    def destinations(self) -> dict[str, Destination]:
        if self.is_interleaved:
            tensors = self._interleaved()
        else:
            tensors = self.in_proj_qkvz.destinations() | self.in_proj_ba.destinations()
        tensors |= self.out_proj.destinations() | {"norm.weight": self.norm.destination()}
        plain = {"conv1d.weight": self.conv_weight, "dt_bias": self.dt_bias, "A_log": self.a_log}
        tensors |= {name: destination(tensor) for name, tensor in plain.items()}
        return {f"linear_attn.{name}": place for name, place in tensors.items()}

    def _interleaved(self) -> dict[str, Destination]:
        """The rows of each key head: its query, its key, and the values and gates, or rates and decays, of its value
        heads."""
        delta = self.delta
        key, groups = delta.key_head_dim, delta.num_value_heads // delta.num_key_heads
        value = groups * delta.value_head_dim
        numbers = torch.arange(2 * (delta.key_size + delta.value_size)).view(delta.num_key_heads, -1)
        query_rows, key_rows, value_rows, gate_rows = (
            part.flatten() for part in torch.split(numbers, [key, key, value, value], dim=1)
        )
        rates, decays = torch.arange(2 * delta.num_value_heads).view(delta.num_key_heads, 2, groups).unbind(1)
        qkvz = {"in_proj_qkv": torch.cat((query_rows, key_rows, value_rows)), "in_proj_z": gate_rows}
        ba = {"in_proj_b": rates.flatten(), "in_proj_a": decays.flatten()}
        return {
            "in_proj_qkvz.weight": _of_rows(self.in_proj_qkvz, qkvz),
            "in_proj_ba.weight": _of_rows(self.in_proj_ba, ba),
        }


def _of_rows(linear: MergedLinear, rows: Mapping[str, torch.Tensor]) -> Destination:
    """A tensor in which these rows are the weight of each of the layer's projections."""
    places = linear.destinations()

    def fill(weight: Weight) -> None:
        values = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        for name, numbers in rows.items():
            places[f"{name}.weight"].fill(values[numbers.to(values.device)])

    return Destination((sum(map(len, rows.values())), linear.in_features), fill)
