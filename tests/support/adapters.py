"""Adapters for tests: as PEFT writes them, and what they make of a Hugging Face model."""

import copy
import json

import torch
from safetensors.torch import save_file

TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def write_adapter(folder, model, seed, rank=4, alpha=16, targets=TARGETS, layers=None, **fields):
    """Random halves for the targets of a Hugging Face model; returns them by layer name."""
    generator = torch.Generator().manual_seed(seed)
    halves, tensors = {}, {}
    for name, module in model.named_modules():
        if name.endswith(tuple(targets)) and (layers is None or any(f"layers.{n}." in name for n in layers)):
            a = torch.randn(rank, module.in_features, generator=generator) * 0.2
            b = torch.randn(module.out_features, rank, generator=generator) * 0.2
            halves[name] = a, b
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return halves


def merged(model, halves, scale):
    """A copy of the model whose weights have the adapter's product added."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, (a, b) in halves.items():
            other.get_submodule(name).weight += scale * b @ a
    return other
