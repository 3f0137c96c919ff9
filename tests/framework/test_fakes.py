"""The fakes themselves: one for every role, and workers that are nothing but fakes around a real runner."""

import time

import pytest

from workerkit.framework import roles
from workerkit.framework.errors import ConfigError
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.fakes_model import fake_tokens

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_every_role_has_a_fake(workerkit_registry):
    assert {name for name, offers in workerkit_registry.offers.items() if "fake" in offers} == set(
        workerkit_registry.roles
    )
    for name in workerkit_registry.roles:
        entry = workerkit_registry.entry(name, "fake")
        assert entry.factory.__module__.startswith("workerkit.framework.testing.")


@pytest.mark.parametrize("runner", ["v1", "v2", "fake"])
def test_a_runner_with_all_else_faked_starts_and_generates_within_a_second(runner, fake_config, assembly_factory):
    assembly_factory(fake_config(runner, speculator="none"))  # imports of the first time are not measured
    start = time.monotonic()
    assembly = assembly_factory(fake_config(runner, speculator="none"))
    assembly.engine.start()
    (done,) = assembly.engine.generate(PROMPT, GREEDY)
    elapsed = time.monotonic() - start
    assert list(done.token_ids) == fake_tokens(PROMPT, 20)
    assert done.finish_reason == "length"
    assembly.engine.check_integrity()
    assert elapsed < 1.0, f"it took {elapsed:.2f} s"


def test_fake_config_names_the_runner_and_the_real_roles_alone(fake_config, assembly_factory):
    plan = assembly_factory(fake_config("v2", sampler="torch", kernels="ordered")).plan
    names = {node.role.name: node.name for node in plan.nodes.values() if node.role and not node.role.nested}
    real = {role for role, name in names.items() if not name.startswith("fake")}
    assert real == {"runner", "sampler", "kernels"}
    singles = {role.name for role in roles.ROLES if not role.nested and not role.many}
    assert set(names) == singles


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    "real",
    [
        {"worker": "npu"},
        {"engine": "standalone", "scheduler": "continuous"},
        {"attention": "cpu", "kernels": "ordered"},
        {"attention": "reference", "kernels": "ordered"},
        {"kv_cache": "paged"},
        {"device": "cpu"},
        {"sampler": "torch", "kernels": "ordered"},
        {"memory_pool": "storage"},
        {"graph": "none", "pcp": "none", "dcp": "none", "eplb": "none", "kv_connector": "none", "pipeline": "none"},
        {"lora": "none", "encoder": "none", "grammar": "none", "rejection": "none", "model_state": "none"},
    ],
    ids=lambda real: "+".join(real),
)
def test_any_part_may_be_the_real_one(runner, real, fake_config, assembly_factory):
    assembly = assembly_factory(fake_config(runner, speculator="none", **real))
    assembly.engine.start()
    (done,) = assembly.engine.generate([PROMPT], GREEDY)
    assert list(done.token_ids) == fake_tokens(PROMPT, 20)


@pytest.mark.parametrize(
    ("runner", "real"),
    [
        ("v1", {"request_state": "host"}),
        ("v1", {"input_batch": "persistent"}),
        ("v1", {"block_table": "multi_group"}),
        ("v1", {"request_state": "host", "input_batch": "persistent", "block_table": "multi_group"}),
        ("v2", {"request_state": "ascend"}),
        ("v2", {"input_batch": "ascend"}),
        ("v2", {"block_table": "ascend"}),
        ("v2", {"request_state": "ascend", "input_batch": "ascend", "block_table": "ascend"}),
    ],
)
def test_the_runners_own_parts_agree_with_the_fakes(runner, real, fake_config, assembly_factory):
    assembly = assembly_factory(fake_config(runner, speculator="none", scheduler="continuous", **real))
    engine = assembly.engine
    engine.start()
    prompts = [[7], PROMPT, [250, 2, 2], list(range(40)), [9] * 17]
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    tokens = {req_id: [] for req_id in ids}
    while engine.has_unfinished:
        for delta in engine.step():
            tokens[delta.req_id].extend(delta.token_ids)
        engine.check_integrity()
    assert [tokens[req_id] for req_id in ids] == [fake_tokens(prompt, 20) for prompt in prompts]


def test_the_wrong_kind_of_fake_is_refused_by_name(fake_config, assembly_factory):
    with pytest.raises(ConfigError) as error:
        assembly_factory(fake_config("v2", block_table="fake"))
    assert "components.block_table 'fake'" in str(error.value)
    assert "fake_slots" in str(error.value)
    assert "ascend" in str(error.value)
