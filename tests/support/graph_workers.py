"""Workers of real parts on the recording fake device, which captures graphs as strictly as a real one."""

import torch

from workerkit.framework import roles
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import Drafts, Speculator
from workerkit.framework.testing.recording import Recorder

RUNNERS = ("v1", "v2")
PROMPTS = [[1, 2, 3], [4] * 20, [7, 8], [5, 6, 5, 6, 5, 6, 5], [11] * 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


class AnyRows(AttentionBackend):
    """Each token is a row of its own: slow, and a graph may hold it whatever the batch."""

    graph_support = "always"

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def prepare(self, layers, dtype):
        pass

    def build(self, batch, tables, caches, extras):
        def attend(layer, query, key, value):
            group = caches.group_of_layer[layer.index]
            keys, values = caches.keys[layer.index], caches.values[layer.index]
            self.kernels.reshape_and_cache(key, value, keys, values, tables.slot_mappings[group])
            table = tables.block_tables[group].long()[batch.token_rows]
            per_head = layer.num_heads // layer.num_kv_heads
            k, v = (
                cache[table].flatten(1, 2).transpose(1, 2).repeat_interleave(per_head, 1) for cache in (keys, values)
            )
            seen = (torch.arange(k.shape[2]) <= batch.positions[:, None])[:, None, None]
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(query[:, :, None], k, v, attn_mask=seen, scale=layer.scale)[:, :, 0]

        return attend


class Stutter(Speculator):
    """Proposes the newest token again, K times for every row."""

    uneven = False

    def __init__(self, shape: WorkerShape) -> None:
        self.num_drafts = shape.num_speculative_tokens

    num_speculative_tokens = property(lambda self: self.num_drafts)

    def propose(self, inputs):
        drafts = inputs.next_tokens.clamp(min=0)[:, None].repeat(1, self.num_drafts)
        if self.uneven:
            drafts[1::2, -1] = -1
        return Drafts(token_ids=drafts)


class UnevenStutter(Stutter):
    """One draft less for every other row."""

    uneven = True


class Made:
    """An assembled worker whose parts are recorded."""

    def __init__(self, registry, config, overrides):
        self.recorder = Recorder()
        self.assembly = self.recorder.assemble(config, overrides, registry)
        self.engine = self.assembly.engine

    def tokens(self, prompts=PROMPTS, params=GREEDY):
        results = self.engine.generate(prompts, params)
        self.engine.check_integrity()
        return [result.token_ids for result in results]

    @property
    def graph(self):
        return self.assembly.get(roles.GRAPH)

    @property
    def device(self):
        """The fake of the device's graphs."""
        return self.assembly.get(roles.DEVICE).graph_device

    def replayed(self):
        """The descriptors of the steps that did not run eagerly."""
        return [call.args["desc"] for call in self.recorder.of("graph.run") if call.args["desc"].mode != "eager"]
