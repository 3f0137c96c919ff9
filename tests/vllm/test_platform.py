"""From vLLM's options and the workerkit config to one worker: who decides what, and what is refused at start."""

import copy
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm_steps import vllm_config, workerkit_config, write_config_json

from workerkit.framework.errors import ConfigError
from workerkit.framework.plan import make_plan
from workerkit.framework.plugins import load_plugins
from workerkit.plugins import vllm as plugin
from workerkit.plugins.vllm import settings
from workerkit.plugins.vllm.worker import VllmWorker

WORKER = "workerkit.plugins.vllm.worker.VllmWorker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_config_json(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def make(folder):
    """make(a workerkit config, options of vLLM) -> VllmConfig."""

    def factory(workerkit=None, **options):
        return vllm_config(folder, workerkit_config() if workerkit is None else workerkit, **options)

    return factory


def problems(make, *given, **options):
    with pytest.raises(ConfigError) as caught:
        make(*given, **options)
    return caught.value.problems


# --- the workerkit config


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read"),
        ("components: [unclosed", "given.yaml"),
        ("cache: {block_siz: 8}", "cache: unknown key 'block_siz'"),
        ("cache:\n  block_size: many", "cache.block_size"),
        ("components: {runner: v3}", "components.runner"),
        ("components: {worker: {use: npu, warm_upp: true}}", "components.worker: unknown key 'warm_upp'"),
        ("components: {worker: {use: npu, warm_up: 'false'}}", "components.worker.warm_up"),
    ],
)
def test_b172_a_wrong_config_file_ends_the_start_with_the_field(make, tmp_path, content, problem):
    path = tmp_path / "given.yaml"
    if content is not None:
        path.write_text(content)
    [found] = problems(make, str(path))
    assert problem in found


@pytest.mark.parametrize("given", [17, [1], True])
def test_a_config_is_a_file_or_a_mapping(make, given):
    [found] = problems(make, given)
    assert "additional_config.workerkit: expected a file name or a mapping" in found


def test_the_variable_names_the_file_where_vllm_has_none(make, tmp_path, monkeypatch):
    path = tmp_path / "given.yaml"
    path.write_text("cache: {block_size: 32}")
    monkeypatch.setenv(plugin.VARIABLE, str(path))
    assert make(additional_config={}).cache_config.block_size == 32
    assert make(workerkit_config(cache={"block_size": 8})).cache_config.block_size == 8


def test_b173_the_options_of_others_are_left_alone(make):
    theirs = {"a_typo": {"of": ["nobody"]}}
    given = workerkit_config()
    found = make(additional_config={"workerkit": given, "theirs": theirs}).additional_config
    assert found == {"workerkit": given, "theirs": theirs}
    assert found["theirs"] is theirs


def test_vllms_own_configs_without_a_model_are_left_alone():
    assert VllmConfig().parallel_config.worker_cls == "auto"


# --- what is refused


def nested(path, value):
    for name in reversed(path.split(".")):
        value = SimpleNamespace(**{name: value})
    return value


@pytest.mark.parametrize(("option", "path", "nothing"), settings._REFUSED, ids=[row[1] for row in settings._REFUSED])
def test_an_option_that_is_not_served_is_refused_by_name(option, path, nothing):
    for value, number in ((object(), 1), ("other", 1), *((value, 0) for value in nothing)):
        found = nested(path, value)
        found.speculative_config = None
        refused = [*settings.refusals(found)]
        assert len(refused) == number
        assert all(option in problem and path in problem for problem in refused)


def test_every_option_that_is_refused_is_where_we_look(make):
    """A field that has moved would be passed over in silence."""
    config = make()
    for _, path, nothing in settings._REFUSED:
        value = config
        for name in path.split("."):
            if value is not None:  # a section that is not there
                value = getattr(value, name)
        assert value is None or value in nothing, path


def test_an_option_alone_ends_the_start(make):
    [found] = problems(make, load_format="dummy")
    assert found.startswith(
        "--load-format (load_config.load_format) is not served: it is 'dummy', right would be 'auto'"
    )


def test_all_problems_come_at_once(make):
    given = workerkit_config(cache={"block_siz": 8})
    options = {
        "enable_lora": True,
        "load_format": "dummy",
        "kv_cache_dtype": "fp8",
        "fully_sharded_loras": True,
        "worker_cls": "their.Worker",
    }
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    found = problems(make, given, scheduler_cls="their.Scheduler", speculative_config=speculative, **options)
    assert len(found) == 7
    for name in (
        "load-format",
        "kv-cache-dtype",
        "fully-sharded-loras",
        "worker-cls",
        "scheduler-cls",
        "speculative-config",
    ):
        assert any(f"--{name}" in problem for problem in found), name
    assert any("block_siz" in problem for problem in found)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (SamplingParams(thinking_token_budget=5), "thinking_token_budget is not served"),
        (SamplingParams(extra_args={"typical_q": 1}), "did you mean 'typical_p'"),
        (SamplingParams(extra_args={"typical_p": -1.0}), "^'typical_p' must be"),
        (SamplingParams(extra_args={"top_n_sigma": "much"}), "^'top_n_sigma' must be"),
    ],
)
def test_a_request_is_refused_before_it_enters_the_engine(make, params, problem):
    make()
    current_platform.validate_request(None, SamplingParams(extra_args={"typical_p": 0.5}))
    with pytest.raises(VLLMValidationError, match=problem):
        current_platform.validate_request(None, params)


# --- who decides

SOURCE = {
    "model": {"source": "smollm2", "max_model_len": 7, "dtype": "bfloat16"},
    "limits": {"max_num_reqs": 1, "max_num_batched_tokens": 2, "seed": 3, "num_speculative_tokens": 0},
    "cache": {"block_size": 8, "memory_bytes": 2**20, "num_blocks": 40},
    "components": {"graph": "compiled", "worker": {"use": "npu", "profile_dir": "ours"}},
}


def decided(make, options=None, **sections):
    """The document for a worker under these options of vLLM."""
    given = workerkit_config(**{**SOURCE, **sections})
    config = make(given, dtype="float32", seed=5, **(options or {}))
    return settings.document(config, settings.source_of(config), plans_ahead=True)


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("model.max_model_len", {}, 64),
        ("limits.max_num_reqs", {}, 8),
        ("limits.max_num_batched_tokens", {}, 48),
        ("limits.seed", {}, 5),
        ("limits.num_speculative_tokens", {}, 0),
        ("model.dtype", {}, "bfloat16"),
        ("cache.block_size", {}, 8),
        ("cache.block_size", {"block_size": 32}, 32),
        ("cache.memory_bytes", {}, 2**20),
        ("cache.num_blocks", {}, 40),
        ("cache.memory_bytes", {"kv_cache_memory_bytes": 2**24}, 2**24),
        ("cache.num_blocks", {"kv_cache_memory_bytes": 2**24}, None),
        ("components.graph", {}, "compiled"),
        ("components.graph", {"enforce_eager": True}, "none"),
        ("components.sampler.logprobs", {"logprobs_mode": "processed_logprobs"}, "processed"),
        ("components.worker.profile_dir", {}, "ours"),
        (
            "components.worker.profile_dir",
            {"profiler_config": {"profiler": "torch", "torch_profiler_dir": "/theirs"}},
            "/theirs",
        ),
        ("components.scheduler.async_scheduling", {}, True),
    ],
)
def test_precedence(make, path, options, expected):
    assert settings._get(decided(make, options), path, "nothing") == expected


def test_dtype_is_vllms_where_the_workerkit_config_has_none(make, folder):
    for section in ({"source": "smollm2"}, {"dtype": "auto"}):
        found = decided(make, model=section)
        assert (found["model"]["dtype"], found["model"]["source"]) == ("float32", str(folder))


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(8, None, 8), (8, 32, 32), (None, None, 16)])
def test_b121_block_size_is_the_same_before_and_after_the_worker_starts(make, ours, theirs, expected):
    cache = {"num_blocks": 40} | ({} if ours is None else {"block_size": ours})
    config = make(workerkit_config(cache=cache), **({} if theirs is None else {"block_size": theirs}))
    assert config.cache_config.block_size == expected
    worker = VllmWorker(config, 0, 0, "nowhere", True)
    try:
        worker.init_device()
        worker.load_model()
        current_platform.update_block_size_for_backend(config)
        assert {spec.block_size for spec in worker.get_kv_cache_spec().values()} == {expected}
        assert config.cache_config.block_size == expected
    finally:
        worker.shutdown()


@pytest.mark.parametrize(
    ("runner", "components", "asked", "ahead"),
    [
        ("v1", {}, None, False),
        ("v2", {}, None, True),
        ("v2", {}, False, False),
        ("v2", {"speculator": "ngram"}, None, True),
        ("v2", {"speculator": "suffix"}, None, False),
    ],
)
def test_steps_are_planned_ahead_where_no_part_waits_for_tokens(make, runner, components, asked, ahead):
    given = workerkit_config(runner, components=components, limits={"num_speculative_tokens": 3 if components else 0})
    config = make(given, async_scheduling=asked)
    assert config.scheduler_config.async_scheduling == ahead
    kind = "FailingAsyncScheduler" if ahead else "FailingScheduler"
    assert config.scheduler_config.scheduler_cls == f"workerkit.plugins.vllm.scheduler.{kind}"
    assert config.parallel_config.worker_cls == WORKER
    assert (config.num_speculative_tokens, config.speculative_config is None) == (
        (3, False) if components else (0, True)
    )


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_check_of_a_checked_configuration_changes_nothing(make, runner):
    """vLLM checks again in each of its processes."""
    components = {"speculator": "ngram"}
    config = make(workerkit_config(runner, components=components, limits={"num_speculative_tokens": 2}))
    once = copy.deepcopy(config)
    current_platform.check_and_update_config(config)
    for name in ("parallel_config", "scheduler_config", "cache_config", "compilation_config", "additional_config"):
        assert getattr(config, name) == getattr(once, name), name
    assert config.speculative_config.num_speculative_tokens == once.speculative_config.num_speculative_tokens == 2
    plans = [
        make_plan(load_plugins().registry, settings.document(one, settings.source_of(one), False))
        for one in (once, config)
    ]
    assert plans[0].sections == plans[1].sections
