"""GGUF files of tiny random models of Hugging Face, with the names and the changes of llama.cpp's converter: what is
served from them, packed or not, is what Hugging Face makes of the same numbers."""

import shutil

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from hf_oracle import assert_served_as_by, random_prompts, serve
from safetensors.torch import load_file, save_file
from tiny_families import decoder
from tiny_gguf import converted, finish, writer_of

from workerkit.components.loader.gguf import GGUFLoader
from workerkit.components.loader.store import LocalModelStore, LocalModelStoreConfig
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.model import LoadedModel, QuantizedTensor
from workerkit.framework.interfaces.sections import ModelSection

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
WINDOW = ("add_sliding_window", 8)
GEMMA_BASES = [("add_rope_freq_base", 5000.0), ("add_rope_freq_base_swa", 300.0)]
GEMMA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
LINEAR = [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 8.0)]
CASES = {  # architecture, family, what its config has beyond `decoder`'s, keys beyond those of all files
    "llama": ("llama", "Llama", {}, []),
    "mistral": ("llama", "Mistral", {}, [WINDOW]),
    "mixtral": (
        "llama",
        "Mixtral",
        {"sliding_window": None},
        [("add_expert_count", 5), ("add_expert_used_count", 2)],
    ),
    "qwen2": ("qwen2", "Qwen2", {"use_sliding_window": False}, []),
    "qwen3": ("qwen3", "Qwen3", {}, []),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {**EXPERTS, "mlp_only_layers": []},
        [("add_expert_count", 6), ("add_expert_used_count", 3), ("add_expert_feed_forward_length", 32)],
    ),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {"query_pre_attn_scalar": 32, "attention_bias": False},
        [WINDOW, ("add_attn_logit_softcapping", 2.0), ("add_final_logit_softcapping", 3.0)],
    ),
    "gemma2-plain-caps": (
        "gemma2",
        "Gemma2",
        {
            "query_pre_attn_scalar": 32,
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        [WINDOW],
    ),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32},
        [WINDOW, ("add_rope_freq_base", 1e6)],  # what follows from the family is in no file
    ),
    "gemma3-by-keys": (
        "gemma3",
        "Gemma3Text",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                **GEMMA_ROPE,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            },
        },
        [
            WINDOW,
            *GEMMA_BASES,
            *LINEAR,
            ("add_sliding_window_pattern", [False, True, False]),
            ("add_final_logit_softcapping", 5.0),
        ],
    ),
    "gemma3-short-pattern": (
        "gemma3",
        "Gemma3Text",
        {"sliding_window_pattern": 2, "query_pre_attn_scalar": 32, "rope_parameters": GEMMA_ROPE},
        [WINDOW, *GEMMA_BASES, ("add_sliding_window_pattern", 2)],
    ),
}
ROUTERS = (".mlp.gate.weight", ".block_sparse_moe.gate.weight")


def write(folder, case, kind=Q.F32, change=lambda arrays: arrays):
    """`folder / "m.gguf"`; returns the model of Hugging Face that has its numbers."""
    arch, family, fields, keys = CASES[case]
    model = decoder(family, **fields)
    model.save_pretrained(folder / "whole")
    tensors = load_file(folder / "whole" / "model.safetensors")

    def kind_of(name, dim):
        return Q.F32 if dim == 1 or name.endswith((*ROUTERS, "ffn_gate_inp.weight")) else kind

    rounded = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(t.numpy(), at), at)).view(t.shape)
        for name, t in tensors.items()
        for at in [kind_of(name, t.dim())]
    }
    (folder / "rounded").mkdir()
    save_file(rounded, folder / "rounded" / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "whole" / "config.json", folder / "rounded")
    writer = writer_of(folder / "m.gguf", arch, model.config)
    if theta := model.config.rope_parameters.get("rope_theta"):
        writer.add_rope_freq_base(theta)
    for add, *values in keys:
        getattr(writer, add)(*values)
    for name, array in change(converted(tensors, arch, model.config)).items():
        at = kind_of(name, array.ndim)
        writer.add_tensor(name, gguf.quantize(array, at), raw_dtype=at)
    finish(writer)
    return type(model).from_pretrained(folder / "rounded", dtype=torch.float32).eval()


def assembly_of(folder, quantization):
    config = {
        "model": {
            "source": str(folder / "m.gguf"),
            "dtype": "float32",
            "max_model_len": 128,
            "quantization": quantization,
        },
        "limits": {"max_num_reqs": 8, "max_num_batched_tokens": 100},
        "cache": {"block_size": 8, "num_blocks": 200},
        "components": {"runner": "v2", "kernels": ["cpu", "reference"]},  # native ones round activations to 8 bits
    }
    return assemble(config)


def loader_of(folder):
    store = LocalModelStore(LocalModelStoreConfig(cache_dir=str(folder / "cache"), offline=True))
    return GGUFLoader(ModelSection(source=str(folder / "m.gguf")), store)


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0, Q.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES)
def test_kept_packed_it_is_hugging_faces_model_of_the_same_numbers(case, kind, tmp_path):
    model, prompts = write(tmp_path, case, kind), random_prompts([1, 90, 20, 40])
    assembly = assembly_of(tmp_path, "keep")
    assert_served_as_by(model, prompts, serve(assembly, prompts, 6))


@pytest.mark.parametrize("case", ["qwen3moe", "mixtral"])
def test_experts_are_read_one_by_one_and_stay_packed(case, tmp_path, monkeypatch):
    write(tmp_path, case, Q.Q8_0)
    loader, fromfile, read = loader_of(tmp_path), np.fromfile, []

    def recording(path, dtype, count, offset):
        read.append(count)
        return fromfile(path, dtype, count, offset=offset)

    monkeypatch.setattr(np, "fromfile", recording)
    config, sizes = loader.read_config(), {}
    for name, weight in loader.weights(config):
        if ".experts." in name:
            assert isinstance(weight, QuantizedTensor)
            sizes[name] = read[-1]
    inner = config.moe.intermediate_size
    assert set(sizes.values()) == {inner * config.hidden_size // 32 * 34}
    assert len(sizes) == 3 * config.moe.num_experts * config.num_hidden_layers
    assert loader.count() == len(read)


@pytest.mark.parametrize(("kind", "byte_count"), [(Q.Q8_0, 1 + 4 / 32), (Q.Q4_1, 1 / 2 + 8 / 32)])
def test_packed_experts_take_what_the_file_says(kind, byte_count, tmp_path):
    """A byte or half of one for a weight, and a float32 or two for 32 of them."""
    write(tmp_path, "qwen3moe", kind)
    assembly = assembly_of(tmp_path, "keep")
    assembly.worker.init_device()
    assembly.worker.load_model()
    network = assembly.value(LoadedModel).network
    kept = sum(tensor.nbytes for name, tensor in network.weights() if ".experts." in name)
    assert kept == 3 * 6 * 3 * 32 * 64 * byte_count


@pytest.mark.parametrize("arch", ["gpt-oss", "deepseek2", "qwen3next", "qwen3vl", "qwen2moe"])
def test_other_architectures_are_refused_by_name(arch, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.add_block_count(2)
    finish(writer)
    with pytest.raises(
        ModelError, match=f"'{arch}' is not supported; gemma2, gemma3, llama, qwen2, qwen3, qwen3moe are"
    ):
        loader_of(tmp_path).read_config()


@pytest.mark.parametrize("stack", [lambda array: array[:5], lambda array: array[0]])
def test_stacks_of_another_number_are_refused(stack, tmp_path):
    def change(arrays):
        return arrays | {"blk.1.ffn_up_exps.weight": stack(arrays["blk.1.ffn_up_exps.weight"])}

    write(tmp_path, "qwen3moe", change=change)
    loader = loader_of(tmp_path)
    with pytest.raises(WeightError, match=r"tensor blk\.1\.ffn_up_exps\.weight is \[.*\], not of 6 experts"):
        loader.weights(loader.read_config())
