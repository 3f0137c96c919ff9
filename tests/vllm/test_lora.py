"""Adapters that vLLM's requests name: loaded when they come, dropped when others need their place, and each request
gets what the model with its adapter merged in gives."""

import pytest
import torch
from adapters import merged, write_adapter
from vllm.lora.request import LoRARequest
from vllm_engine import EACH, VARIANTS, ask, config, prompts, vllm_engine
from vllm_steps import enter, requests, scheduled

from workerkit.framework.errors import RequestError, UnsupportedError


@pytest.fixture(scope="module")
def model(tiny_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def oracles(model, tmp_path_factory):
    """Name -> (folder, model with the adapter merged)."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {None: (None, model)}
    for seed, name in enumerate("abc", 1):
        halves = write_adapter(folder / name, model, seed=seed)
        found[name] = folder / name, merged(model, halves, 4.0)
    return found


def greedy(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("variant", EACH)
def test_requests_of_one_batch_have_adapters_of_their_own(tiny_dir, oracles, variant):
    runner, asynchronous = VARIANTS[variant]
    names = [None, "a", "b", "c", "a", None]
    asks = [ask(prompt, max_tokens=5) for prompt in prompts([30, 9, 17, 12, 9, 9], seed=4)]
    loras = [
        None if name is None else LoRARequest(name, "abc".index(name) + 1, str(oracles[name][0])) for name in names
    ]
    with vllm_engine(tiny_dir, config(runner), asynchronous, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        for _ in range(2):  # the third adapter has to wait for a place, and the first comes back
            outputs = llm.generate(
                [{"prompt_token_ids": [*one.prompt]} for one in asks],
                [one.vllm_params() for one in asks],
                lora_request=loras,
                use_tqdm=False,
            )
            for name, one, output in zip(names, asks, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == greedy(oracles[name][1], one.prompt, 5), name


class Loading:
    """Stands for a worker."""

    def __init__(self):
        self.loaded, self.used = {}, set()

    def load_adapter(self, name, source):
        if source == "broken":
            raise UnsupportedError("it is broken")
        self.loaded[name] = source

    def remove_adapter(self, name):
        if name in self.used:
            raise RequestError("in use")
        del self.loaded[name]


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_the_longest_unused_adapter_makes_room_and_comes_back(protocol):
    worker = Loading()
    vllm = requests(worker=worker, max_adapters=2)

    def new(name, number, path="path"):
        return enter(name, more={"lora_request": LoRARequest(name, number, path)})

    vllm.read(scheduled(protocol, new=[new("a", 1), new("b", 2)]))
    assert worker.loaded == {"a#1": "path", "b#2": "path"}
    worker.used = {"a#1"}
    vllm.read(scheduled(protocol, new=[new("c", 3)]))
    assert [*worker.loaded] == ["a#1", "c#3"]
    worker.used = {"a#1", "c#3"}
    step = vllm.read(scheduled(protocol, new=[new("d", 4), new("e", 5, "broken")]))
    assert step.failed == {"e": "it is broken"}
    assert [*worker.loaded] == ["a#1", "c#3", "d#4"]  # none could be dropped, and d was not told to the worker yet
    worker.used = {"a#1"}
    vllm.read(scheduled(protocol, preempted_req_ids={"b"}, running=[("a", 3, None)]))
    step = vllm.read(scheduled(protocol, resumed=[new("b", 2)]))
    assert step.output.new_requests[0].lora == "b#2"
    assert [*worker.loaded] == ["a#1", "b#2"]


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (LoRARequest("x", 1, "broken"), "it is broken"),
        (LoRARequest("x", 1, "path", load_inplace=True), "adapter 'x': load_inplace is not served"),
    ],
)
def test_a_broken_adapter_fails_its_request_alone(adapter, message):
    vllm = requests(worker=Loading(), max_adapters=2)
    step = vllm.read(scheduled(new=[enter("x", more={"lora_request": adapter}), enter("y")]))
    assert message in step.failed["x"]
    assert [one.req_id for one in step.output.new_requests] == ["y"]


@pytest.mark.parametrize("variant", ["v2"])
def test_adapters_are_managed_by_the_engine(tiny_dir, oracles, variant):
    runner, asynchronous = VARIANTS[variant]
    with vllm_engine(tiny_dir, config(runner), asynchronous, enable_lora=True, max_loras=2) as llm:
        engine = llm.llm_engine
        assert engine.add_lora(LoRARequest("a", 7, str(oracles["a"][0])))
        assert engine.list_loras() == {7}
        assert engine.pin_lora(7)
        assert not engine.pin_lora(8)
        assert engine.remove_lora(7)
        assert not engine.remove_lora(7)
        assert engine.list_loras() == set()
