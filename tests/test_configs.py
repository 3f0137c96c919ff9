"""Each of the ready workers is a valid config; those with drafts differ from the plain one in what they say only."""

from pathlib import Path

import pytest

from workerkit.framework import config as configs
from workerkit.framework.plan import make_plan
from workerkit.framework.plugins import load_plugins

FOLDER = Path(__file__).resolve().parent.parent / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_ready_worker_is_valid(path):
    make_plan(load_plugins().registry, configs.read_file(path))


@pytest.mark.parametrize("name", ["ngram", "suffix", "eagle3"])
def test_a_worker_with_drafts_is_the_plain_one_apart_from_them(name):
    document = configs.read_file(FOLDER / f"spec-{name}.yaml")
    assert document["limits"].pop("num_speculative_tokens") > 0
    speculator = document["components"].pop("speculator")
    assert name in (speculator, speculator["use"] if isinstance(speculator, dict) else None)
    assert document["components"].pop("rejection") == "standard"
    document["components"].pop("draft", None)
    assert document == configs.read_file(FOLDER / "cpu-v2.yaml")
