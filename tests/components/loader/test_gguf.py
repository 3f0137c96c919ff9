"""GGUF files written by the gguf package from transformers' tiny models."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from tiny_gguf import finish, gguf_name, permuted, writer_of

from workerkit.components.loader.auto import AutoLoader
from workerkit.components.loader.gguf import GGUFLoader
from workerkit.components.loader.gguf_file import read_header
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.model import QuantizedTensor
from workerkit.framework.interfaces.sections import ModelSection

from .conftest import SMALL, tiny_model


def write(path, model, arch, quantisation=Q.F32, *, keys=(), tensors=(), drop=()):
    """Returns the weights that the file stands for, by Hugging Face name."""
    config = model.config
    writer = writer_of(path, arch, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for add, *values in keys:
        getattr(writer, add)(*values)
    weights = {}
    for name, tensor in model.state_dict().items():
        if (config.tie_word_embeddings and name == "lm_head.weight") or name in drop:
            continue
        stored = tensor.numpy()
        kind = quantisation if stored.ndim == 2 else Q.F32
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            stored = permuted(stored, heads)
        data = gguf.quantize(stored, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        value = gguf.dequantize(data, kind)
        if arch == "llama" and heads:  # the inverse, row by row
            order = permuted(np.arange(len(value)), heads)
            value = value[np.argsort(order)]
        weights[name] = torch.from_numpy(value)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return weights


@pytest.fixture
def loader(store, tmp_path):
    return GGUFLoader(ModelSection(source=str(tmp_path / "m.gguf")), store)


@pytest.mark.parametrize(
    ("family", "arch"), [("llama", "llama"), ("llama-bias", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
@pytest.mark.parametrize("quantisation", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q8_0])
def test_weights_come_back_in_hugging_faces_names_and_order(loader, tmp_path, family, arch, quantisation):
    model = tiny_model(family)
    expected = write(tmp_path / "m.gguf", model, arch, quantisation)
    config = loader.read_config()
    weights = dict(loader.weights(config))
    assert weights.keys() == expected.keys()
    assert loader.count() == len(expected)
    for name, tensor in expected.items():
        stays_packed = tensor.dim() == 2 and quantisation in (Q.Q4_0, Q.Q4_1, Q.Q8_0)
        assert isinstance(weights[name], QuantizedTensor) == stays_packed
        got = weights[name].dequantize() if stays_packed else weights[name].float()
        assert torch.equal(got, tensor), name
    if quantisation is Q.F32:  # then the file stands for the model itself
        for name, tensor in weights.items():
            assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("family", "arch"), [("llama", "llama"), ("llama-bias", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_metadata_becomes_the_config(loader, tmp_path, family, arch):
    model = tiny_model(family)
    write(tmp_path / "m.gguf", model, arch, Q.F16)
    config = loader.read_config()
    for name in (*SMALL, "tie_word_embeddings"):
        assert getattr(config, name) == getattr(model.config, name), name
    assert config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps)
    assert config.head_dim == (32 if family == "qwen3" else 16)
    assert config.architecture == type(model).__name__
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2, 5), "float16")
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (
        family in ("llama-bias", "qwen2"),
        family == "llama-bias",
        family == "llama-bias",
        family == "qwen3",
    )


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS])
def test_other_quantisations(loader, tmp_path, kind):
    """gguf cannot write these, so blocks of small random bytes stand for some weights."""
    model = tiny_model("llama")
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 50, (6, 512 // block * size), dtype=np.uint8)
    write(tmp_path / "m.gguf", model, "llama", drop=["lm_head.weight"], tensors=[("output.weight", data, kind)])
    weights = dict(loader.weights(loader.read_config()))
    assert weights["lm_head.weight"].shape == (6, 512)
    assert torch.equal(weights["lm_head.weight"], torch.from_numpy(gguf.dequantize(data, kind)))
    assert weights["lm_head.weight"].abs().sum() > 0


def test_a_sliding_window_makes_llama_a_mistral(loader, tmp_path):
    write(tmp_path / "m.gguf", tiny_model("mistral"), "llama", keys=[("add_sliding_window", 16)])
    config = loader.read_config()
    assert (config.architecture, config.sliding_windows) == ("MistralForCausalLM", (16, 16))


def test_rope_scaling_keys(loader, tmp_path):
    path, model = tmp_path / "m.gguf", tiny_model("llama")
    kinds = gguf.RopeScalingType
    write(path, model, "llama", keys=[("add_rope_scaling_type", kinds.LINEAR), ("add_rope_scaling_factor", 4.0)])
    assert (loader.read_config().rope.rope_type, loader.read_config().rope.factor) == ("linear", 4.0)
    yarn = [
        ("add_rope_scaling_type", kinds.YARN),
        ("add_rope_scaling_factor", 8.0),
        ("add_rope_scaling_orig_ctx_len", 32),
        ("add_rope_scaling_yarn_beta_fast", 16.0),
    ]
    write(path, model, "llama", keys=yarn)
    rope = loader.read_config().rope
    assert (rope.rope_type, rope.factor, rope.original_max_position, rope.beta_fast) == ("yarn", 8.0, 32, 16.0)
    write(path, model, "llama", keys=[*yarn, ("add_rope_scaling_attn_factors", 2.0)])
    with pytest.raises(ModelError, match=r"rope\.scaling\.attn_factor"):
        loader.read_config()
    write(path, model, "llama", keys=[("add_rope_scaling_type", kinds.LONGROPE)])
    with pytest.raises(ModelError, match="'longrope' is not supported; none, linear and yarn are"):
        loader.read_config()


def llama3_factors(theta, dim, factor, original=8192):
    """As llama.cpp's converter computes them."""
    factors = []
    for freq in 1.0 / theta ** (np.arange(0, dim, 2) / dim):
        wavelen = 2 * np.pi / freq
        if wavelen < original / 4:
            factors.append(1.0)
        elif wavelen > original:
            factors.append(factor)
        else:
            smooth = (original / wavelen - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_factors_are_recognised(loader, tmp_path):
    model = tiny_model("llama")
    model.config.rope_parameters["rope_theta"] = 500000.0
    factors = llama3_factors(500000.0, 16, 32.0)
    write(tmp_path / "m.gguf", model, "llama", tensors=[("rope_freqs.weight", factors, Q.F32)])
    rope = loader.read_config().rope
    assert (rope.rope_type, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (
        "llama3",
        32.0,
        1.0,
        4.0,
        8192,
    )
    assert loader.count() == 21  # they are no weight
    factors[4] *= 1.1
    write(tmp_path / "m.gguf", model, "llama", tensors=[("rope_freqs.weight", factors, Q.F32)])
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not those of Llama 3"):
        loader.read_config()


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("gemma", [], "architecture 'gemma' is not supported; gemma2, gemma3, llama, qwen2, qwen3, qwen3moe are"),
        ("llama", [("add_uint16", "split.count", 3)], "one of 3 parts"),
        ("llama", [("add_rope_dimension_count", 8)], "partial rotation"),
        ("qwen2", [("add_value_length", 9)], "key_length and value_length differ"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(loader, tmp_path, arch, keys, message):
    write(tmp_path / "m.gguf", tiny_model("qwen2" if arch == "qwen2" else "llama"), arch, keys=keys)
    with pytest.raises(ModelError, match=message):
        loader.read_config()


def test_unknown_tensors_and_types_are_refused_by_name(loader, tmp_path):
    path, model = tmp_path / "m.gguf", tiny_model("llama")
    write(path, model, "llama", tensors=[("blk.0.attn_sinks.weight", np.zeros((2, 32), np.float32), Q.F32)])
    with pytest.raises(WeightError, match=r"blk\.0\.attn_sinks\.weight"):
        loader.weights(loader.read_config())
    write(path, model, "llama", drop=["lm_head.weight"], tensors=[("output.weight", np.zeros((2, 4), np.int32), Q.I32)])
    with pytest.raises(WeightError, match=r"tensor output\.weight is stored as I32"):
        loader.weights(loader.read_config())


def test_a_truncated_file_names_the_tensor(loader, tmp_path):
    path = tmp_path / "m.gguf"
    write(path, tiny_model("llama"), "llama")
    whole = path.read_bytes()
    last = max(read_header(path).tensors.values(), key=lambda tensor: tensor.offset)
    path.write_bytes(whole[:-40])
    with pytest.raises(WeightError, match=f"tensor '{last.name}' ends at byte .* truncated"):
        loader.read_config()
    for size in (0, 3, 10, 30, 200, 2000):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightError, match=r"m\.gguf"):
            loader.read_config()


def test_damaged_headers(loader, tmp_path):
    path = tmp_path / "m.gguf"
    write(path, tiny_model("llama"), "llama")
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):  # no byte of the header may lead to anything but a refusal or another valid file
        broken = bytearray(whole)
        broken[int(rng.integers(0, 3000))] = int(rng.integers(0, 256))
        path.write_bytes(broken)
        try:
            for _name, _tensor in loader.weights(loader.read_config()):
                pass
        except ModelError as error:
            refused += "m.gguf" in str(error)
    assert refused > 50
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        loader.read_config()
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + b"\0" * 100)
    with pytest.raises(ModelError, match="GGUF version 9"):
        loader.read_config()


def test_the_header_agrees_with_the_gguf_package(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, tiny_model("qwen3"), "qwen3", Q.Q8_0, keys=[("add_array", "some.list", ["a", "ü"])])
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.metadata == {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    for tensor in reader.tensors:
        mine = header.tensors[tensor.name]
        assert (mine.offset, mine.num_bytes, mine.type_name) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type.name,
        )
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


def test_auto_takes_a_file_as_gguf(store, tmp_path):
    expected = write(tmp_path / "m.gguf", tiny_model("llama"), "llama")
    part = AutoLoader(ModelSection(source=str(tmp_path / "m.gguf")), store)
    assert part.count() == len(dict(part.weights(part.read_config()))) == len(expected)
    with pytest.raises(ModelError, match="is a folder"):
        GGUFLoader(ModelSection(source=str(tmp_path)), store).read_config()
