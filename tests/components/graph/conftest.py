"""Workers of real parts on the recording fake device, which captures graphs as strictly as a real one."""

import pytest
from graph_workers import AnyRows, Made, Stutter, UnevenStutter

from workerkit.framework import roles


@pytest.fixture
def make(workerkit_registry):
    made = []
    workerkit_registry.add(roles.ATTENTION, "any_rows", AnyRows)
    for name, speculator in (("stutter", Stutter), ("uneven", UnevenStutter)):
        workerkit_registry.add(roles.SPECULATOR, name, speculator, defaults={"rejection": "standard"})

    def factory(runner="v2", graph="none", overrides=None, loader=None, **components):
        config = {
            "model": {"source": "random", "max_model_len": 64},
            "limits": {"max_num_reqs": 6, "max_num_batched_tokens": 32},
            "cache": {"block_size": 4, "num_blocks": 120},
            "components": {
                "runner": runner,
                "device": "fake",
                "graph": graph,
                "attention": "sdpa",
                "kernels": ["reference"],
                "loader": {"use": "random", **(loader or {})},
                "tokenizer": "fake",
                "chat_template": "fake",
                "sampler": {"use": "torch", "temperature": 0.0},
                **components,
            },
        }
        made.append(Made(workerkit_registry, config, overrides))
        made[-1].engine.start()
        return made[-1]

    yield factory
    for worker in made:
        worker.assembly.shutdown()
