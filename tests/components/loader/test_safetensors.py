"""Safetensors checkpoints that transformers saved, whole and damaged."""

import json
import pathlib
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from workerkit.components.loader.auto import AutoLoader
from workerkit.components.loader.safetensors import SafetensorsLoader
from workerkit.framework.errors import ModelError, WeightError
from workerkit.framework.interfaces.sections import ModelSection

INDEX = "model.safetensors.index.json"
MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture
def loader(store):
    return lambda folder: SafetensorsLoader(ModelSection(source=str(folder)), store)


def refusal(loader):
    """The error of a damaged checkpoint; it comes before any tensor."""
    with pytest.raises(WeightError) as error:
        loader.weights(loader.read_config())
    return str(error.value)


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
def test_every_tensor_arrives_unchanged(save, loader, family, shard_size):
    model, folder = save(family, max_shard_size=shard_size)
    part = loader(folder)
    assert (folder / INDEX).exists() == (shard_size == "60KB")
    config = part.read_config()
    weights = dict(part.weights(config))
    expected = model.state_dict()
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert weights.keys() == expected.keys()
    assert part.count() == len(weights)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    assert config.architecture == type(model).__name__


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux tells what is mapped")
def test_a_tensor_is_mapped_no_longer_than_it_is_in_use(save, loader):
    """Else the whole file would count as memory of the process."""
    _, folder = save()
    part = loader(folder)
    for _name, tensor in part.weights(part.read_config()):
        tensor.sum()
        assert MAPS.read_text().count(str(folder)) <= 2  # the one before as well


def test_auto_takes_a_folder_as_safetensors(save, store):
    _, folder = save()
    part = AutoLoader(ModelSection(source=str(folder)), store)
    assert part.count() == len(list(part.weights(part.read_config()))) == 21


def test_b146_an_index_that_lists_a_file_that_is_not_there(save, loader):
    """Named before any weight is used."""
    _, folder = save(max_shard_size="60KB")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    text = refusal(loader(folder))
    assert lost.name in text
    assert "does not have" in text


@pytest.mark.parametrize("cut", [1, 5000])
def test_a_truncated_file_names_file_and_tensor(save, loader, cut):
    _, folder = save(max_shard_size="60KB")
    path = sorted(folder.glob("model-*.safetensors"))[0]
    last = list(load_file(path))
    path.write_bytes(path.read_bytes()[:-cut])
    text = refusal(loader(folder))
    assert path.name in text
    assert "truncated" in text
    assert any(name in text for name in last)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (20).to_bytes(8, "little") + b"x" * 20])
def test_a_file_of_something_else(save, loader, content):
    _, folder = save()
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors: the" in refusal(loader(folder))


def test_byte_ranges_that_do_not_fit_the_shape(save, loader):
    _, folder = save()
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [63]
    header["lm_head.weight"]["dtype"] = "F4"
    embedding = header["model.embed_tokens.weight"]
    embedding["shape"] = [-number for number in embedding["shape"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    message = refusal(loader(folder))
    assert "tensor model.norm.weight: bytes" in message
    assert "tensor lm_head.weight: dtype 'F4' is not supported" in message
    assert re.search(r"tensor model.embed_tokens.weight: bytes .* must be integers >= 0", message)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "w.bin", 3])
def test_an_index_cannot_point_elsewhere(save, loader, edit, name):
    _, folder = save(max_shard_size="60KB")
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    edit(folder / INDEX, weight_map=placed | {"model.norm.weight": name})
    assert "model.norm.weight" in refusal(loader(folder))


def test_index_and_shards_must_agree(save, loader, edit):
    _, folder = save(max_shard_size="60KB")
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    first, second = sorted(set(placed.values()))[:2]
    moved = next(name for name, file in placed.items() if file == first)
    dropped = next(name for name, file in placed.items() if file == second)
    kept = {name: file for name, file in placed.items() if name != dropped}
    edit(folder / INDEX, weight_map=kept | {moved: second, "model.ghost.weight": first})
    text = refusal(loader(folder))
    assert f"tensor {moved} is in {first}" in text
    assert f"tensor {dropped} of {second} is not in" in text
    assert "tensor model.ghost.weight is missing" in text


def test_a_tensor_in_two_files(save, loader):
    _, folder = save(max_shard_size="60KB")
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    twice = next(iter(load_file(first)))
    save_file(load_file(second) | {twice: torch.zeros(1)}, second)
    assert f"tensor {twice} is in both {first.name} and {second.name}" in refusal(loader(folder))


def test_pickles_are_never_read(save, loader):
    _, folder = save()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = refusal(loader(folder))
    assert "pytorch_model.bin" in text
    assert "pickles can run code" in text


def test_folders_without_weights(save, loader):
    _, folder = save()
    path = folder / "model.safetensors"
    path.rename(folder / "other.safetensors")
    assert loader(folder).count() == 21  # one file of another name is clear enough
    save_file({"x": torch.zeros(1)}, folder / "second.safetensors")
    assert "2 safetensors files but no" in refusal(loader(folder))
    (folder / "second.safetensors").unlink()
    (folder / "other.safetensors").rename(folder / "x.gguf")
    assert "name it:" in refusal(loader(folder))
    (folder / "x.gguf").unlink()
    assert "has no safetensors file" in refusal(loader(folder))


def test_a_file_in_place_of_a_folder(save, loader):
    _, folder = save()
    with pytest.raises(ModelError, match="by the folder"):
        loader(folder / "model.safetensors").read_config()
