"""A processor without AVX-512, or a machine without a compiler: everything runs on plain torch, and says why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.graph import BatchShape
from workerkit.framework.plugins import load_plugins

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, sys
from letters import VOCAB, Letters
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins
registry = load_plugins().registry
registry.add(roles.TOKENIZER, "letters", Letters)
config = {
    "model": {"source": "random", "max_model_len": 64, "dtype": sys.argv[1], "quantization": sys.argv[2]},
    "cache": {"num_blocks": 40},
    "components": {"loader": {"use": "random", "vocab_size": VOCAB}, "tokenizer": "letters"},
}
with assemble(config, registry=registry) as made:
    made.engine.start()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    results = made.engine.generate([[1, 2, 3], list(range(30))], params)
    kernels, graph = made.get(roles.KERNELS), made.get(roles.GRAPH)
    parts = {"kernels": sorted(set(kernels.bindings.values())), "graph": type(graph).__name__}
    print(json.dumps({"tokens": [result.token_ids for result in results], **parts}))
"""
OFF = {
    "switched_off": {"WORKERKIT_NATIVE": "0"},
    "no_avx512": {
        "WORKERKIT_NATIVE": "0",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "no_compiler": {"CXX": "no-such-compiler"},  # and an empty cache
}


def run(dtype, quantization, **environment):
    support = os.pathsep.join([str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, dtype, quantization],
        env={**os.environ, "PYTHONPATH": support, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("where", OFF)
def test_everything_runs_on_plain_torch(where, tmp_path):
    environment = OFF[where] | ({"XDG_CACHE_HOME": str(tmp_path)} if where == "no_compiler" else {})
    plain = run("float32", "none", **environment)
    assert plain["kernels"] == ["cpu", "reference"]
    assert plain["graph"] == "NoGraph"
    assert plain["tokens"] == run("float32", "none")["tokens"], "the machine's own kernels write the same"
    if where == "no_avx512":
        for quantization in ("none", "int8", "w8a8"):
            assert [len(tokens) for tokens in run("bfloat16", quantization, **environment)["tokens"]] == [20, 20]


def test_a_worker_that_asks_for_native_kernels_hears_what_is_missing(monkeypatch):
    monkeypatch.setenv("WORKERKIT_NATIVE", "0")
    config = {"model": {"source": "random"}, "components": {"loader": "random", "kernels": ["native", "reference"]}}
    with (
        pytest.raises(UnsupportedError, match=r"library .native.: WORKERKIT_NATIVE=0 switches native kernels off"),
        assemble(config, registry=load_plugins().registry) as made,
    ):
        made.worker.start()


@pytest.mark.parametrize("loader", [{"head_dim": 8}, {}], ids=["heads of 8", "float16"])
def test_a_model_that_native_kernels_do_not_serve_runs_on_plain_torch(loader):
    """In the library's own process: its other ops are native, attention is not."""
    dtype = "float32" if loader else "float16"
    config = {
        "model": {"source": "random", "max_model_len": 32, "dtype": dtype},
        "cache": {"num_blocks": 20},
        "components": {"loader": {"use": "random", **loader}},
    }
    with assemble(config, registry=load_plugins().registry) as made:
        made.worker.start()
        assert made.get(roles.ATTENTION).graph_support == "never"
        assert made.get(roles.GRAPH).dispatch(BatchShape(num_tokens=1, num_reqs=1)).mode == "eager"
        made.worker.execute_dummy_batch()
