"""Hugging Face checkpoint folders: config.json with one safetensors file or an index of several. Never pickle."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from workerkit.components.loader.hf_config import read_hf_config, read_json
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.model import ModelConfig, ModelLoader
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.store import ModelStore

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


@attrs.frozen
class _Place:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsLoader(ModelLoader):
    """Checks every file whole (names, headers, byte ranges, index) before the first tensor is handed out."""

    def __init__(self, section: ModelSection, files: ModelStore) -> None:
        self._section = section
        self._files = files

    def read_config(self) -> ModelConfig:
        return read_hf_config(self._folder())

    def weights(self, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        return _read(_checked_shards(self._folder()))

    def count(self) -> int:
        return sum(len(places) for places in _checked_shards(self._folder()).values())

    def at(self, source: str) -> ModelLoader:
        return SafetensorsLoader(attrs.evolve(self._section, source=source), self._files)

    def _folder(self) -> pathlib.Path:
        path = self._files.resolve(self._section.source)
        if not path.is_dir():
            raise ModelError(f"{path} is a file; a safetensors model is given by the folder that holds its config.json")
        return path


Shards = dict[pathlib.Path, dict[str, _Place]]


def _read(shards: Shards) -> Iterator[tuple[str, torch.Tensor]]:
    for path, places in shards.items():
        for name, place in places.items():
            yield name, _mapped(path, place)


def _mapped(path: pathlib.Path, place: _Place) -> torch.Tensor:
    """Each tensor is a mapping of its own. What was read of one large mapping would count as memory of the process
    until the last tensor is gone."""
    num_bytes = math.prod(place.shape) * place.dtype.itemsize
    if num_bytes == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    try:
        # Copied where somebody writes there: a mapping that could not be written to would make torch warn.
        data = np.memmap(path, np.uint8, "c", place.offset, (num_bytes,))
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from error
    return torch.from_numpy(data).view(place.dtype).view(place.shape)


def _checked_shards(folder: pathlib.Path) -> Shards:
    """File -> its tensors. Raises WeightError with everything that is wrong with any of the files."""
    if (folder / _SINGLE).is_file():
        paths, placed = [folder / _SINGLE], None
    elif (folder / _INDEX).is_file():
        placed = _weight_map(folder / _INDEX)
        paths = [folder / name for name in sorted(set(placed.values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise WeightError(f"{folder / _INDEX} lists {', '.join(missing)}, which {folder} does not have")
    else:
        paths, placed = [_only_file(folder)], None
    problems: list[str] = []
    shards = {path: _check_header(path, problems) for path in paths}
    if placed is not None and not problems:
        _compare_with_index(shards, placed, problems)
    if problems:
        raise WeightError("\n  - ".join([f"{folder}: the checkpoint is damaged:", *problems]))
    return shards


def _only_file(folder: pathlib.Path) -> pathlib.Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightError(f"{folder} has {len(found)} safetensors files but no {_INDEX} that says what is where")
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise WeightError(
            f"{folder} has no safetensors file, only {', '.join(pickles)}: pickles can run code when they are "
            "loaded and are never read; convert the checkpoint to safetensors"
        )
    if gguf := sorted(folder.glob("*.gguf")):
        raise WeightError(f"{folder} has no safetensors file; to use a GGUF file, name it: {gguf[0]}")
    raise WeightError(f"{folder} has no safetensors file")


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise WeightError(f"{path}: weight_map must name the file of each tensor")
    for tensor, name in placed.items():
        # plain names only: a checkpoint must not point at files elsewhere on the machine
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise WeightError(
                f"{path}: weight_map puts {tensor} in {name!r}, which is not the name of a file beside it"
            )
        if not name.endswith(".safetensors"):
            raise WeightError(f"{path}: weight_map puts {tensor} in {name!r}, which is not a safetensors file")
    return placed


def _compare_with_index(shards: Shards, placed: Mapping[str, str], problems: list[str]) -> None:
    held: dict[str, str] = {}
    for path, places in shards.items():
        for name in places:
            if name in held:
                problems.append(f"tensor {name} is in both {held[name]} and {path.name}")
            elif name not in placed:
                problems.append(f"tensor {name} of {path.name} is not in {_INDEX}")
            held.setdefault(name, path.name)
    for name, file in placed.items():
        if name not in held:
            problems.append(f"tensor {name} is missing: {_INDEX} puts it in {file}")
        elif held[name] != file:
            problems.append(f"tensor {name} is in {held[name]}, {_INDEX} puts it in {file}")


def _check_header(path: pathlib.Path, problems: list[str]) -> dict[str, _Place]:
    """Tensors in the file's order. The format: https://github.com/huggingface/safetensors#format."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            problems.append(f"{path.name}: the file ends inside its header: truncated, or not a safetensors file")
            return {}
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{path.name}: the header is not understood: {error!r}")
            return {}
    start = 8 + length
    faults = {name: fault for name, info in tensors if (fault := _fault(info, size - start))}
    problems.extend(f"{path.name}: tensor {name}: {fault}" for name, fault in faults.items())
    return {
        name: _Place(_DTYPES[info["dtype"]], tuple(info["shape"]), start + info["data_offsets"][0])
        for name, info in tensors
        if name not in faults
    }


def _fault(info: Mapping[str, Any], data_bytes: int) -> str | None:
    try:
        (begin, end), shape, dtype = info["data_offsets"], info["shape"], info["dtype"]
        if dtype not in _DTYPES:
            return f"dtype {dtype!r} is not supported"
        if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
            return f"bytes {begin} to {end} and shape {shape} must be integers >= 0"
        need = math.prod(shape) * _DTYPES[dtype].itemsize
        if end - begin != need:
            return f"bytes {begin} to {end} do not fit {dtype} of shape {shape}, which takes {need}"
        if end > data_bytes:
            return f"ends at byte {end} of the data, the file has {data_bytes}: it is truncated"
    except (TypeError, KeyError, ValueError) as error:
        return f"its entry in the header is not understood: {error!r}"
    return None
