"""Linear projections, alone or several on the same input kept as one matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from workerkit.components.layers.weights import Destination, KernelWeights, Weight, copy, packed, to_int8
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.matrix_kernels import Matrix
from workerkit.framework.interfaces.model import QuantizedTensor
from workerkit.framework.interfaces.sections import Quantization


class MergedLinear(KernelWeights):
    """Projections of one input, their outputs side by side: one matrix product where a checkpoint has several.

    The weight is kept by the kernels alone, in the form that suits them. It is made as soon as all pieces are there,
    which are forgotten then, so that loading takes one layer's memory more than the model.

    kind: the field of QuantizationSection that says how it is kept; None: as it is.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        bias: bool,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        kind: str | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.outputs = dict(outputs)  # checkpoint name of each projection -> its output size, in order
        self.has_bias = bias
        self.kernels = kernels
        self.dtype, self.device = dtype, device
        self.kind = kind
        self.quantization: Quantization = "none"
        self.is_unpacked = False  # some of the pieces were packed, and could not be kept so
        self.matrix: Matrix | None = None
        self.adapter: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self._pieces: dict[str, Weight] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, sum of outputs]."""
        assert self.matrix is not None, "load_weights comes first"
        output = self.matrix(x)
        if self.adapter is not None:
            self.adapter(x, output)
        return output

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in_features] -> float32 [N, sum of outputs]."""
        assert self.matrix is not None, "load_weights comes first"
        return self.matrix.logits(x)

    def destinations(self) -> dict[str, Destination]:
        """`q_proj.weight` and the like -> where it goes."""
        places: dict[str, Destination] = {}
        for name, size in self.outputs.items():
            shapes = {"weight": (size, self.in_features), "bias": (size,)}
            for end, shape in shapes.items() if self.has_bias else [("weight", shapes["weight"])]:
                fill, linear = partial(self._add, f"{name}.{end}"), self if end == "weight" else None
                places[f"{name}.{end}"] = Destination(shape, fill, linear=linear, projection=name)
        return places

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        return () if self.matrix is None else self.matrix.tensors

    def release(self) -> None:
        self.matrix, self.is_unpacked = None, False
        self._pieces.clear()

    def _add(self, name: str, piece: Weight) -> None:
        self._pieces[name] = piece
        if len(self._pieces) == len(self.outputs) * (1 + self.has_bias):
            self.matrix = self._pack()
            self._pieces.clear()

    def _pack(self) -> Matrix:
        kernels, dtype, device = self.kernels, self.dtype, self.device
        weights = [self._pieces[f"{name}.weight"] for name in self.outputs]
        size, bias = sum(self.outputs.values()), None
        if self.has_bias:
            biases = [self._pieces[f"{name}.bias"] for name in self.outputs]
            bias = copy(biases, torch.empty(size, dtype=dtype, device=device))
        if self.quantization == "int8":
            return kernels.linear_w8(*to_int8(weights, device), bias, dtype)
        if self.quantization == "w8a8":
            return kernels.linear_w8a8(*to_int8(weights, device), bias, dtype)
        if self.quantization == "keep":
            kept = packed(weights, device)
            if kept is not None and kept.minima is not None:
                return kernels.linear_q4(kept.codes, kept.scales, kept.minima, bias, dtype)
            if kept is not None:
                return kernels.linear_q8(kept.codes, kept.scales, bias, dtype)
            self.is_unpacked = any(isinstance(weight, QuantizedTensor) for weight in weights)
        # Memory of our own, even for one piece as it is: that may be the file, mapped.
        return self._plain(copy(weights, torch.empty(size, self.in_features, dtype=dtype, device=device)), bias)

    def _plain(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        return self.kernels.linear(weight, bias)


class Linear(MergedLinear):
    """One projection."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        kind: str | None = None,
    ) -> None:
        super().__init__(in_features, {name: out_features}, bias, kernels, dtype, device, kind)
