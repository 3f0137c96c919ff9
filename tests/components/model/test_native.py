"""The order in which a model comes to life."""

import pytest
import torch

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.random import RandomLoader, RandomLoaderConfig
from workerkit.components.model.library import NativeLibrary
from workerkit.components.model.native import NativeModel, NativeModelConfig
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.sections import LimitsSection, ModelSection, QuantizationSection
from workerkit.plugins.builtin_kernels import ReferenceKernels

CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)


class RecordedKernels(OrderedKernels):
    def __init__(self, calls):
        super().__init__((ReferenceKernels(),))
        self.calls = calls

    def prepare(self, context):
        self.calls.append("kernels.prepare")
        assert context is CONTEXT


class RecordedLoader(RandomLoader):
    def __init__(self, calls):
        super().__init__(RandomLoaderConfig(num_hidden_layers=3), LimitsSection())
        self.calls = calls

    def read_config(self):
        self.calls.append("loader.read_config")
        return super().read_config()

    def weights(self, config):
        self.calls.append("loader.weights")
        yield from super().weights(config)


class RecordedLibrary(NativeLibrary):
    def __init__(self, kernels, calls):
        super().__init__(kernels)
        self.calls = calls

    def build(self, config, dtype, device):
        self.calls.append("library.build")
        return super().build(config, dtype, device)


class RecordedAttention(AttentionBackend):
    def __init__(self, calls, refuse=False):
        self.calls, self.refuse = calls, refuse

    def prepare(self, layers, dtype):
        self.calls.append("attention.prepare")
        assert [layer.index for layer in layers] == [0, 1, 2]
        assert dtype == torch.float32
        if self.refuse:
            raise UnsupportedError(layers[0].name)

    def build(self, batch, tables, caches, extras):
        raise NotImplementedError


def model(calls, refuse=False, quantization="none"):
    kernels = RecordedKernels(calls)
    return NativeModel(
        NativeModelConfig(),
        ModelSection(quantization=QuantizationSection(default=quantization)),
        CONTEXT,
        RecordedLoader(calls),
        RecordedLibrary(kernels, calls),
        RecordedAttention(calls, refuse),
        kernels,
    )


def test_network_then_attention_then_kernels_then_weights():
    calls = []
    loaded = model(calls).load()
    assert calls == [
        "loader.read_config",
        "library.build",
        "kernels.prepare",
        "attention.prepare",
        "loader.read_config",  # how many tensors there are, for the progress bar
        "loader.weights",
    ]
    assert loaded.config is loaded.network.config
    assert loaded.weight_bytes == sum(t.numel() * t.element_size() for _, t in loaded.network.weights())


def test_matrices_are_kept_as_the_config_says():
    network = model([], quantization="int8").load().network
    assert network.layers[1].mixer.o_proj.matrix.tensors[0].dtype == torch.int8
    assert network.layers[1].input_layernorm.weight.dtype == torch.float32


def test_a_backend_refuses_before_any_weight_is_read():
    calls = []
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn"):
        model(calls, refuse=True).load()
    assert "loader.weights" not in calls


def test_reload_fills_the_same_network_again():
    calls = []
    native = model(calls)
    loaded = native.load()
    before = {name: tensor.clone() for name, tensor in loaded.network.weights()}
    for _, tensor in loaded.network.weights():
        tensor.zero_()
    native.reload_weights(loaded)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.network.weights())
    assert calls.count("library.build") == 1
