"""Both backends over a paged cache: random mixes of chunks, decodes and padding equal the whole sequence at once."""

import attrs
import numpy as np
import pytest
import torch

from workerkit.components.attention.cpu import CpuAttention
from workerkit.components.attention.reference import ReferenceAttention
from workerkit.components.attention.sdpa import SdpaAttention
from workerkit.components.kernels.ordered import OrderedKernels
from workerkit.components.loader.random import RandomLoader, RandomLoaderConfig
from workerkit.components.model.library import NativeLibrary
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import BatchPlan, HostLengths, InputBatch
from workerkit.framework.interfaces.kv_cache import (
    AttentionLayer,
    BatchTables,
    KVCacheGroup,
    KVCaches,
    KVCacheSpec,
    KVLayout,
)
from workerkit.framework.interfaces.model import ModelInputs
from workerkit.framework.interfaces.sections import LimitsSection
from workerkit.plugins.builtin_kernels import CpuKernels, ReferenceKernels

KERNELS = OrderedKernels((CpuKernels(), ReferenceKernels()))
PLAIN = OrderedKernels((ReferenceKernels(),))
BACKENDS = {
    "cpu": lambda: CpuAttention(KERNELS),
    "cpu over reference kernels": lambda: CpuAttention(PLAIN),
    "reference": lambda: ReferenceAttention(PLAIN),
    "sdpa": lambda: SdpaAttention(PLAIN),
}
BLOCK = 4


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]()


def network(**values):
    loader = RandomLoader(RandomLoaderConfig(**values), LimitsSection())
    config = loader.read_config()
    built = NativeLibrary(KERNELS).build(config, torch.float32, torch.device("cpu"))
    built.load_weights(loader.weights(config))
    return built


class Cache:
    """A cache with a group for each sliding window, and blocks for each sequence in an order of no meaning."""

    def __init__(self, layers, num_sequences, max_len):
        windows = list(dict.fromkeys(layer.sliding_window for layer in layers))
        groups, self.tables = [], []
        generator = torch.Generator().manual_seed(3)
        width = -(-max_len // BLOCK)
        blocks = len(windows) * num_sequences * width + 1
        ids = (torch.randperm(blocks - 1, generator=generator) + 1).view(len(windows), num_sequences, width)
        for window in windows:
            spec = KVCacheSpec(
                num_kv_heads=layers[0].num_kv_heads,
                head_dim=layers[0].head_dim,
                dtype="float32",
                block_size=BLOCK,
                element_bytes=4,
                sliding_window=window,
            )
            members = tuple(layer.index for layer in layers if layer.sliding_window == window)
            groups.append(KVCacheGroup(spec=spec, layers=members))
            self.tables.append(ids[len(self.tables)].int())
        shape = (blocks, BLOCK, layers[0].num_kv_heads, layers[0].head_dim)
        self.caches = KVCaches(
            layout=KVLayout(num_blocks=blocks, groups=tuple(groups), kernel_block_size=BLOCK),
            keys=tuple(torch.zeros(shape) for _ in layers),
            values=tuple(torch.zeros(shape) for _ in layers),
            group_of_layer=tuple(windows.index(layer.sliding_window) for layer in layers),
        )

    def batch(self, rows, pad_tokens=0, pad_rows=0):
        """rows: (sequence, first position, token ids) -> (InputBatch, BatchTables)."""
        lens = np.array([len(ids) for _, _, ids in rows], dtype=np.int32)
        computed = np.array([first for _, first, _ in rows], dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(lens), [lens.sum()] * pad_rows)).astype(np.int32)
        total = int(lens.sum())
        padded = total + pad_tokens
        ids, positions = torch.zeros(padded, dtype=torch.int32), torch.zeros(padded, dtype=torch.long)
        ids[:total] = torch.tensor([token for _, _, tokens in rows for token in tokens])
        positions[:total] = torch.tensor([first + i for _, first, tokens in rows for i in range(len(tokens))])
        num_rows = len(rows) + pad_rows
        seq_lens = torch.zeros(num_rows, dtype=torch.int32)
        seq_lens[: len(rows)] = torch.from_numpy(computed + lens)
        tables, slots = [], []
        for source in self.tables:
            table = torch.zeros(num_rows, source.shape[1], dtype=torch.int32)
            slot = torch.full((padded,), -1, dtype=torch.int32)
            for row, (sequence, first, tokens) in enumerate(rows):
                own = -(-(first + len(tokens)) // BLOCK)
                table[row, :own] = source[sequence, :own]
                for i in range(len(tokens)):
                    at = first + i
                    slot[starts[row] + i] = source[sequence, at // BLOCK] * BLOCK + at % BLOCK
            tables.append(table)
            slots.append(slot)
        zeros = np.zeros(len(rows), dtype=np.int32)
        plan = BatchPlan(
            req_ids=tuple(str(sequence) for sequence, _, _ in rows),
            slots=np.array([sequence for sequence, _, _ in rows]),
            num_scheduled_tokens=lens,
            num_computed_tokens=computed,
            num_draft_tokens=zeros,
            prefill_lens=zeros,
            prompt_lens=zeros,
        )
        last = torch.from_numpy(starts[1 : len(rows) + 1].astype(np.int64)) - 1
        batch = InputBatch(
            plan=plan,
            num_reqs=len(rows),
            num_reqs_padded=num_rows,
            num_tokens=total,
            num_tokens_padded=padded,
            max_query_len=int(lens.max()),
            idx_mapping=torch.from_numpy(plan.slots),
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
            seq_lens=seq_lens,
            # V2 knows only an upper bound while drafts are being verified
            host_seq_lens=HostLengths(upper_bound=computed + lens + 2, exact=lambda: computed + lens),
            input_ids=ids,
            positions=positions,
            rope_lens=positions + 1,
            token_rows=torch.zeros(padded, dtype=torch.long),
            logits_indices=last,
            logits_rows=torch.arange(len(rows)),
            draft_ids=torch.full((len(rows),), -1),
            cu_num_logits_np=np.arange(len(rows) + 1, dtype=np.int32),
        )
        return batch, BatchTables(block_tables=tuple(tables), slot_mappings=tuple(slots))


def forward(net, backend, cache, rows, **padding):
    """Hidden states of the rows' tokens, one tensor a row."""
    batch, tables = cache.batch(rows, **padding)
    attend = backend.build(batch, tables, cache.caches, {})
    inputs = ModelInputs(input_ids=batch.input_ids, positions=batch.positions, rope_lens=batch.rope_lens, attend=attend)
    hidden = net.forward(inputs).hidden
    assert hidden.shape[0] == batch.num_tokens_padded
    assert hidden.isfinite().all()
    return list(hidden[: batch.num_tokens].split([len(ids) for _, _, ids in rows]))


def whole(net, ids):
    """The sequence at once, without a cache."""
    count = torch.arange(len(ids))

    def attend(layer, query, key, value):
        seen = count[None, :] <= count[:, None]
        if layer.sliding_window is not None:
            seen &= count[None, :] > count[:, None] - layer.sliding_window
        group = layer.num_heads // layer.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qnd,knd->nqk", query, key).masked_fill(~seen, float("-inf"))
        return torch.einsum("nqk,knd->qnd", torch.softmax(scores * layer.scale, -1), value)

    inputs = ModelInputs(input_ids=torch.tensor(ids), positions=count, rope_lens=count + 1, attend=attend)
    return net.forward(inputs).hidden


MODELS = {
    "full": {},
    "sliding": {"sliding_window": 5},
    "tight": {"sliding_window": 1},
    "two groups": {"num_hidden_layers": 4, "sliding_window": 6, "full_attention_interval": 2},
    "heads": {"num_attention_heads": 6, "num_key_value_heads": 1, "qk_norm": True, "qkv_bias": True},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_steps_equal_the_whole_sequence(backend, model, seed):
    net = network(**MODELS[model])
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 34, 7)
    sequences = [rng.integers(0, 256, length).tolist() for length in lengths]
    cache = Cache(net.attention_layers, len(sequences), 40)
    expected = [whole(net, ids) for ids in sequences]
    done = [0] * len(sequences)
    kinds = set()
    while any(done[i] < len(ids) for i, ids in enumerate(sequences)):
        live = [i for i, ids in enumerate(sequences) if done[i] < len(ids)]
        chosen = rng.permutation(live)[: rng.integers(1, len(live) + 1)]
        rows = []
        for i in map(int, chosen):
            count = 1 if rng.random() < 0.6 else int(rng.integers(1, 12))
            rows.append((i, done[i], sequences[i][done[i] : done[i] + count]))
        if rng.random() < 0.5:  # as the runners order them
            rows.sort(key=lambda row: len(row[2]) > 1)
        kinds |= {len(ids) > 1 for _, _, ids in rows}
        got = forward(net, backend, cache, rows, pad_tokens=int(rng.integers(0, 4)), pad_rows=int(rng.integers(0, 3)))
        for (i, first, ids), hidden in zip(rows, got, strict=True):
            torch.testing.assert_close(hidden, expected[i][first : first + len(ids)], atol=2e-5, rtol=1e-4)
            done[i] += len(ids)
    assert kinds == {True, False}


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 64])
def test_chunks_of_any_size(backend, chunk):
    net = network(num_hidden_layers=3, sliding_window=7, full_attention_interval=3)
    ids = list(range(40, 63))
    cache = Cache(net.attention_layers, 1, 40)
    expected = whole(net, ids)
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        (got,) = forward(net, backend, cache, [(0, first, part)])
        torch.testing.assert_close(got, expected[first : first + chunk], atol=2e-5, rtol=1e-4)


def test_b33_padding_rows_of_nan_change_nothing(backend):
    net = network()
    cache, clean = (Cache(net.attention_layers, 3, 16) for _ in range(2))
    layer = net.attention_layers[0]
    rows = [(i, 0, [1]) for i in range(3)]
    batch, tables = cache.batch(rows, pad_tokens=2, pad_rows=2)
    query, key, value = (torch.randn(5, heads, layer.head_dim) for heads in (4, 2, 2))
    real = [tensor[:3].clone() for tensor in (query, key, value)]
    for tensor in (key, value):
        tensor[3:] = float("nan")
    got = backend.build(batch, tables, cache.caches, {})(layer, query, key, value)
    assert all(tensor.isfinite().all() for tensor in (*cache.caches.keys, *cache.caches.values, got))
    assert torch.equal(cache.caches.keys[0][0], torch.zeros_like(cache.caches.keys[0][0]))
    unpadded = backend.build(*clean.batch(rows), clean.caches, {})(layer, *real)
    torch.testing.assert_close(got[:3], unpadded)


def test_what_lies_past_the_sequence_in_its_last_block_is_not_seen(backend):
    """A block keeps the keys of its former owner."""
    net = network()
    cache = Cache(net.attention_layers, 2, 16)
    for tensor in (*cache.caches.keys, *cache.caches.values):
        tensor[1:].fill_(7.0)
    ids = [3, 1, 4, 1, 5]
    (first,) = forward(net, backend, cache, [(0, 0, ids)])
    (second,) = forward(net, backend, cache, [(0, 5, [9])])
    torch.testing.assert_close(torch.cat((first, second)), whole(net, [*ids, 9]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 4, 5, 11])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_blocks_behind_the_window_may_hold_anything(backend, window, chunk):
    """The scheduler gave them to someone else, whose bytes need not be numbers; the rows keep their ids."""
    net = network(num_hidden_layers=2, sliding_window=window)
    cache = Cache(net.attention_layers, 2, 40)
    ids = list(range(40, 70))
    expected = whole(net, ids)
    for first in range(0, len(ids), chunk):
        behind = cache.tables[0][:, : max(0, first - window + 1) // BLOCK].long()
        for tensor in (*cache.caches.keys, *cache.caches.values):
            tensor[behind] = float("nan")
        rows = [(0, first, ids[first : first + chunk]), (1, first, ids[first : first + 1])]
        got, _ = forward(net, backend, cache, rows, pad_rows=1)
        torch.testing.assert_close(got, expected[first : first + chunk], atol=2e-5, rtol=1e-4)


def test_a_decode_reads_only_the_columns_that_its_window_needs():
    """Of a hundred blocks of context a window of 6 needs the last two or three."""
    seen = []

    class Counting(OrderedKernels):
        def __init__(self):
            super().__init__((CpuKernels(), ReferenceKernels()))
            decode = self.decode_attention

            def counted(query, key_cache, value_cache, block_table, *more):
                seen.append(tuple(block_table.shape))
                return decode(query, key_cache, value_cache, block_table, *more)

            self.decode_attention = counted

    net = network(num_hidden_layers=2, sliding_window=6, full_attention_interval=2)
    cache = Cache(net.attention_layers, 2, 420)
    forward(net, CpuAttention(Counting()), cache, [(0, 401, [5]), (1, 2, [6])])
    assert seen == [(2, 2), (2, 101)]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_soft_caps_and_values_of_another_size_than_keys(backend, window, softcap):
    """Steps of random chunks, with padding, against softmax attention whose denominator has one term more."""
    rng, heads, length = torch.Generator().manual_seed(4), 4, 23
    layer = AttentionLayer(
        name="a layer",
        index=0,
        num_heads=heads,
        num_kv_heads=2,
        head_dim=8,
        scale=0.4,
        sliding_window=window,
        latent_dim=5,
        has_sinks=True,
        softcap=softcap,
    )
    backend.prepare([layer], torch.float32)
    cache = Cache([layer], 2, 40)
    caches = attrs.evolve(cache.caches, values=(cache.caches.keys[0][..., :5],))
    queries, keys = (torch.randn(2, length, count, 8, generator=rng) for count in (heads, 2))
    sinks = torch.randn(heads, generator=rng)
    scores = torch.einsum("qnd,knd->nqk", queries[0], keys[0].repeat_interleave(2, 1)) * layer.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length)
    seen = (position <= position[:, None]) & (position > position[:, None] - (window or length))
    weights = scores.exp() * seen / ((scores.exp() * seen).sum(-1) + sinks.exp()[:, None])[..., None]
    expected = torch.einsum("nqk,knd->qnd", weights, keys[0, ..., :5].repeat_interleave(2, 1))
    for first, end in ((0, 7), (7, 8), (8, 21), (21, 22), (22, 23)):
        own, other = range(first, end), range(first, first + 1)
        rows = [(1, first, other), (0, first, own)]
        batch, tables = cache.batch(rows, pad_tokens=2, pad_rows=1)
        query, key = (torch.cat((x[1, first : first + 1], x[0, first:end], x[0, :2])) for x in (queries, keys))
        got = backend.build(batch, tables, caches, {})(layer, query, key, key[..., :5], sinks)
        assert got.shape == (len(query), heads, 5)
        assert got.isfinite().all()
        torch.testing.assert_close(got[1 : 1 + end - first], expected[first:end], atol=2e-6, rtol=1e-5)


def test_a_layer_that_cannot_be_served_is_named(backend):
    layers = [
        AttentionLayer(name=f"layer {heads}", index=i, num_heads=heads, num_kv_heads=2, head_dim=8, scale=1.0)
        for i, heads in enumerate((4, 5))
    ]
    backend.prepare(layers[:1], torch.float32)
    with pytest.raises(UnsupportedError, match="layer 5"):
        backend.prepare(layers, torch.float32)
