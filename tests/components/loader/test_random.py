"""Random weights: reproducible, complete, and with logits that are well apart."""

import pytest
import torch

from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.random import RandomLoader, RandomLoaderConfig
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.interfaces.model import ModelInputs
from workerkit.framework.interfaces.sections import LimitsSection
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels


def loader(seed=0, **values):
    return RandomLoader(RandomLoaderConfig(**values), LimitsSection(seed=seed))


def network_of(source):
    config = source.read_config()
    library = NativeLibrary(OrderedKernels((CpuKernels(), ReferenceKernels())))
    network = library.build(config, torch.float32, torch.device("cpu"))
    network.load_weights(source.weights(config))
    return network


def test_same_seed_same_weights():
    config = loader().read_config()
    first, again, other = (dict(source.weights(config)) for source in (loader(), loader(), loader(seed=1)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert loader().count() == len(first)


def test_no_one_dimensional_weight_is_trivial():
    source = loader(qkv_bias=True, qk_norm=True)
    for name, tensor in source.weights(source.read_config()):
        if tensor.dim() == 1:
            assert tensor.std() > 0.1, name


def test_sliding_windows_by_layer():
    windows = loader(num_hidden_layers=4, sliding_window=6, full_attention_interval=2).read_config().sliding_windows
    assert windows == (6, None, 6, None)
    assert loader(sliding_window=6).read_config().sliding_windows == (6, 6)
    assert loader().read_config().sliding_windows == (None, None)


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_text_is_varied_and_its_choices_are_clear(tied):
    network = network_of(loader(tie_word_embeddings=tied, num_hidden_layers=3))
    gaps, texts = [], set()
    for start in range(8):
        ids = [start * 7 + 1, start]
        for _ in range(40):
            count = torch.arange(len(ids))
            inputs = ModelInputs(input_ids=torch.tensor(ids), positions=count, rope_lens=count + 1, attend=dense_attend)
            logits = network.compute_logits(network.forward(inputs).hidden[-1:])
            top = logits.topk(2).values[0]
            gaps.append(float(top[0] - top[1]))
            ids.append(int(logits.argmax()))
        texts.add(tuple(ids[2:]))
    assert len(texts) == 8
    assert len({token for text in texts for token in text}) > 40
    gaps.sort()
    assert gaps[len(gaps) // 2] > 0.3
    assert gaps[0] > 2e-4  # some ten times the error of float32 kernels


def dense_attend(layer, query, key, value):
    group = layer.num_heads // layer.num_kv_heads
    return torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.repeat_interleave(group, 1).transpose(0, 1),
        value.repeat_interleave(group, 1).transpose(0, 1),
        is_causal=True,
        scale=layer.scale,
    ).transpose(0, 1)
