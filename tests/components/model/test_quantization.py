"""How matrices are kept: packed as the file has them, rounded to 8 bits, or plain, and never twice."""

import gc
import logging
import weakref

import attrs
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from oracles import dense_logits
from reachable import tensor_bytes
from tiny_gguf import write_tiny_gguf

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.layers.linear import MergedLinear
from workerkit.components.loader.gguf import GGUFLoader
from workerkit.components.loader.random import RandomLoader, RandomLoaderConfig
from workerkit.components.loader.store import LocalModelStore, LocalModelStoreConfig
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.sections import LimitsSection, ModelSection, QuantizationSection
from workerkit.framework.testing.fakes_model import FAKE_MODEL, FakeNetwork
from workerkit.kernels.cpu.native.build import unavailable
from workerkit.plugins.builtin_kernels import CpuKernels, NativeKernels, ReferenceKernels

CPU = torch.device("cpu")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
needs_native = pytest.mark.skipif(unavailable() is not None, reason="no native kernels here")
LIBRARIES = pytest.mark.parametrize(
    "libraries",
    [
        (ReferenceKernels,),
        (CpuKernels, ReferenceKernels),
        pytest.param((NativeKernels, ReferenceKernels), marks=needs_native),
    ],
    ids=["reference", "cpu", "native"],
)


def loaded(loader, dtype=torch.float32, libraries=(ReferenceKernels,), **quantization):
    kernels = OrderedKernels(tuple(library() for library in libraries))
    config = loader.read_config()
    network = NativeLibrary(kernels).build(config, dtype, CPU)
    network.quantize(QuantizationSection(**quantization))
    network.load_weights(loader.weights(config))
    return network


def random_loader(**sizes):
    return RandomLoader(RandomLoaderConfig(**sizes), LimitsSection())


def error(logits, exact):
    """Mean error in standard deviations of the exact logits."""
    return float((logits - exact).abs().mean() / exact.std())


@pytest.fixture
def gguf_loader(tmp_path):
    def run(kinds=None, **sizes):
        write_tiny_gguf(tmp_path / "m.gguf", kinds or {}, **sizes)
        store = LocalModelStore(LocalModelStoreConfig(cache_dir=str(tmp_path / "cache"), offline=True))
        return GGUFLoader(ModelSection(source=str(tmp_path / "m.gguf")), store)

    return run


def kinds_of(network):
    """Name of each layer's matrix -> type of its largest tensor."""
    return {
        name: max(module.matrix.tensors, key=lambda tensor: tensor.nbytes).dtype
        for name, module in network.named_modules()
        if isinstance(module, MergedLinear)
    }


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0])
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_file_gives_the_logits_of_the_dequantised_one(gguf_loader, kind, tied):
    """Queries and keys of a llama are reordered, and pieces merged, without unpacking."""
    loader = gguf_loader({"token_embd": Q.Q8_0}, default=kind, tie_word_embeddings=tied)
    kept, plain = loaded(loader, default="keep"), loaded(loader)
    torch.testing.assert_close(dense_logits(kept, IDS), dense_logits(plain, IDS), atol=1e-3, rtol=1e-4)
    packed_type = torch.int8 if kind is Q.Q8_0 else torch.uint8
    types = kinds_of(kept)
    assert types.pop("embed_tokens") == torch.int8
    assert types.pop("lm_head", packed_type) == packed_type
    assert set(types.values()) == {packed_type}


@LIBRARIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("quantization", "most"), [("none", 1e-2), ("keep", 5e-2), ("int8", 5e-2), ("w8a8", 6e-2)])
def test_logits_stay_near_those_of_the_plain_model(gguf_loader, libraries, dtype, quantization, most):
    """Bounds of a tiny model; tests/benchmarks/quantization.py has the errors of a real one."""
    loader = gguf_loader(vocab_size=512)
    exact = dense_logits(loaded(loader), IDS)
    logits = dense_logits(loaded(loader, dtype, libraries, default=quantization), IDS)
    assert logits.dtype == torch.float32
    assert error(logits, exact) < most + (2e-2 if dtype == torch.bfloat16 else 0)


@LIBRARIES
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("quantization", "bits"), [("none", 16), ("keep", 4 + 64 / 32), ("int8", 8), ("w8a8", 8)])
def test_no_weight_is_kept_twice(gguf_loader, libraries, tied, quantization, bits):
    """`keep`: 4 bits and, at most, two float32 for 32 weights. Sizes are multiples of what native panels hold."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    loader = gguf_loader(tie_word_embeddings=tied, vocab_size=1024, head_dim=32, **sizes)
    network = loaded(loader, torch.bfloat16, libraries, default=quantization)
    count = sum(
        tensor.shape[0] * tensor.shape[1] for _, tensor in loader.weights(network.config) if len(tensor.shape) == 2
    )
    scales = 0 if quantization in ("none", "keep") else 4 * 8 * 1024 * 2
    gc.collect()
    assert tensor_bytes(network) <= 1.05 * (count * bits / 8 + scales)
    assert tensor_bytes(network) >= sum(tensor.nbytes for _, tensor in network.weights()) * 0.99


@LIBRARIES
def test_what_a_layer_was_made_of_is_gone_before_the_next_one_comes(libraries):
    source = random_loader(num_hidden_layers=3)
    config = source.read_config()
    yielded, most = [], 0

    def weights():
        nonlocal most
        for name, tensor in source.weights(config):
            yielded.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            most = max(most, sum(ref() is not None for ref in yielded))

    network = NativeLibrary(OrderedKernels(tuple(library() for library in libraries))).build(
        config, torch.bfloat16, CPU
    )
    network.load_weights(weights())
    assert most <= 4  # queries, keys and values wait for each other; the last tensor is still the loader's
    gc.collect()
    assert sum(ref() is not None for ref in yielded) == 0


def test_each_kind_of_layer_has_a_choice(gguf_loader):
    network = loaded(gguf_loader(), attention="keep", mlp="int8", embedding="none", head="w8a8")
    assert kinds_of(network) == {
        "embed_tokens": torch.float32,
        "lm_head": torch.int8,
        **{f"layers.{n}.mixer.{name}_proj": torch.uint8 for n in (0, 1) for name in ("qkv", "o")},
        **{f"layers.{n}.mlp.{name}_proj": torch.int8 for n in (0, 1) for name in ("gate_up", "down")},
    }
    assert len(network.lm_head.matrix.tensors) == 2


def test_an_embedding_that_is_the_head_is_kept_as_the_head_is():
    network = loaded(random_loader(tie_word_embeddings=True), embedding="none", head="int8")
    assert network.lm_head is network.embed_tokens
    assert kinds_of(network)["embed_tokens"] == torch.int8


@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8"])
def test_an_equal_head_beside_tied_embeddings_is_kept_once(quantization, caplog):
    source = random_loader(tie_word_embeddings=True)
    config = source.read_config()
    tensors = dict(source.weights(config))
    network = NativeLibrary(OrderedKernels((ReferenceKernels(),))).build(config, torch.float32, CPU)
    network.quantize(QuantizationSection(default=quantization))
    network.load_weights([*tensors.items(), ("lm_head.weight", tensors["model.embed_tokens.weight"].clone())])
    assert network.lm_head is network.embed_tokens
    assert not caplog.records


def test_layers_that_cannot_stay_packed_are_named(gguf_loader, caplog):
    loader = gguf_loader({"attn_v": Q.Q8_0, "ffn_down": Q.F16})
    with caplog.at_level(logging.WARNING):
        network = loaded(loader, default="keep")
    (record,) = caplog.records
    assert record.message.endswith("different ways: layers.0.mixer.qkv_proj, layers.1.mixer.qkv_proj")
    types = kinds_of(network)
    assert (types["layers.0.mixer.qkv_proj"], types["layers.0.mlp.down_proj"]) == (torch.float32, torch.float32)
    assert types["layers.0.mlp.gate_up_proj"] == torch.uint8
    torch.testing.assert_close(dense_logits(network, IDS), dense_logits(loaded(loader), IDS), atol=1e-3, rtol=1e-4)


def test_a_network_of_a_plugin_refuses_what_it_does_not_know():
    network = FakeNetwork(FAKE_MODEL, CPU)
    network.quantize(QuantizationSection())
    with pytest.raises(UnsupportedError, match=r"model\.quantization: FakeForCausalLM keeps its weights as they are"):
        network.quantize(QuantizationSection(head="int8"))


def test_a_draft_is_kept_packed_but_never_rounded():
    section = QuantizationSection(default="w8a8", attention="keep")
    assert section.kept == QuantizationSection(attention="keep", mlp="none", embedding="none", head="none")
    assert attrs.evolve(section, mlp="none").of("mlp") == "none"
    assert section.of(None) == "none"
