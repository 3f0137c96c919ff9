"""Loading needs little memory beside the weights."""

import json
import pathlib
import runpy
import subprocess
import sys

import pytest

BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "loading.py"
CLEAR = pathlib.Path("/proc/self/clear_refs")


@pytest.mark.skipif(not CLEAR.exists(), reason="only Linux tells the peak of a part of a process's life")
def test_a_file_of_another_dtype_is_never_in_memory_as_a_whole(tmp_path):
    """The file has twice the size of the weights, and a mapping of it would count. Larger models, at which
    tests/benchmarks/loading.py looks, need less beside the weights: here libraries are a good part of it."""
    runpy.run_path(str(BENCHMARK))["write"](tmp_path, False, "float32", layers=12, hidden=512, vocab=4000)
    command = [sys.executable, str(BENCHMARK), "--load", str(tmp_path), "bfloat16"]
    taken = json.loads(subprocess.check_output(command, text=True))
    size = 2 * taken["weights"]
    assert size < taken["peak"] < 1.5 * size
