"""Adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from workerkit.framework.errors import ModelError, UnsupportedError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
# Fields of the config that would change what is computed, and the values that do not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False, None),
    "corda_config": (None,),
    "eva_config": (None,),
}


@attrs.frozen(kw_only=True, eq=False)
class AdapterFile:
    """One adapter, read."""

    digest: str  # of its files
    scale: dict[str, float]  # by layer: what B A is multiplied by
    a: dict[str, torch.Tensor]  # name of the layer -> [r, in]
    b: dict[str, torch.Tensor]  # likewise, [out, r]


def read_adapter(folder: pathlib.Path, canonical_name: Callable[[str], str | None]) -> AdapterFile:
    """`canonical_name`: see Network. Raises ModelError when the files are missing or damaged, UnsupportedError naming
    every field of the config that asks for another kind of adapter."""
    from safetensors import SafetensorError, safe_open

    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no {name}: an adapter is a folder with {_CONFIG} and {_WEIGHTS}")
    config, alpha = _config(folder / _CONFIG)
    halves: dict[str, dict[str, torch.Tensor]] = {"A": {}, "B": {}}
    problems = []
    try:
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                match = _NAME.fullmatch(name)
                if match is None:
                    problems.append(f"{name} is neither half of a linear layer's adapter")
                else:
                    stored = match["layer"]
                    layer = (canonical_name(f"{stored}.weight") or stored).removesuffix(".weight")
                    halves[match["half"]][layer] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder / _WEIGHTS} cannot be read: {error}") from error
    a, b = halves["A"], halves["B"]
    problems += [f"{layer} has only one half" for layer in sorted(a.keys() ^ b.keys())]
    problems += [
        f"{layer}: {list(a[layer].shape)} and {list(b[layer].shape)} do not multiply"
        for layer in sorted(a.keys() & b.keys())
        if a[layer].dim() != 2 or b[layer].dim() != 2 or a[layer].shape[0] != b[layer].shape[1]
    ]
    if problems or not a:
        raise ModelError("\n  - ".join([f"{folder / _WEIGHTS} is no adapter:", *(problems or ["it is empty"])]))
    root = 0.5 if config.get("use_rslora") else 1.0  # rank-stabilised: Kalajdzievski, 2023
    return AdapterFile(
        digest=_digest(folder),
        scale={layer: alpha / float(weight.shape[0]) ** root for layer, weight in a.items()},
        a=a,
        b=b,
    )


def _config(path: pathlib.Path) -> tuple[dict[str, Any], float]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(config).__name__}")
    if unsupported := [
        f"{name}: {config[name]!r} (supported: {plain[0]!r})"
        for name, plain in _PLAIN.items()
        if name in config and config[name] not in plain
    ]:
        raise UnsupportedError("\n  - ".join([f"{path} asks for what is not supported:", *unsupported]))
    alpha = config.get("lora_alpha", 8)  # PEFT's default
    if type(alpha) not in (int, float):
        raise ModelError(f"{path}: lora_alpha must be a number, not {alpha!r}")
    return config, float(alpha)


def _digest(folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for name in (_CONFIG, _WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
