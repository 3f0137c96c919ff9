"""Plugins: isolation, roll-back, refusal at load, and what a config is told of a broken one."""

import importlib.metadata
import logging
import sys
import textwrap
import types

import attrs
import pytest

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ConfigError
from workerkit.framework.hooks import API_VERSION, hookimpl
from workerkit.framework.plugins import GROUP, PluginHost, entry_points, load_plugins
from workerkit.framework.roles import new_registry
from workerkit.framework.testing.fakes_sampling import FakeSampler, FakeStage
from workerkit.framework.testing.registry import fake_config


def plugin(name="mine", version=API_VERSION, **members):
    module = types.ModuleType(name)
    module.WORKERKIT_API = version
    for key, value in members.items():
        setattr(module, key, value)
    return module


def offering(*parts):
    @hookimpl
    def worker_components(registry):
        for role, name, factory in parts:
            registry.add(role, name, factory)

    return worker_components


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules to a folder on the path and returns entry points to them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.metadata.EntryPoint(name=name.removeprefix("wkt_"), value=name, group=GROUP)

    return write


GOOD = """
    from workerkit.framework import roles
    from workerkit.framework.hooks import hookimpl
    from workerkit.framework.testing.fakes_sampling import FakeSampler
    WORKERKIT_API = 1
    @hookimpl
    def worker_components(registry):
        registry.add(roles.SAMPLER, "{name}", FakeSampler)
"""
HALF = """
    import attrs
    from workerkit.framework import roles
    from workerkit.framework.hooks import hookimpl
    from workerkit.framework.registry import Role
    from workerkit.framework.testing.fakes_sampling import FakeSampler
    WORKERKIT_API = 1
    @attrs.frozen(kw_only=True)
    class Options:
        "Options."
    class Strange:
        "A role."
    @hookimpl
    def worker_components(registry):
        registry.add(roles.SAMPLER, "half", FakeSampler)
        registry.add_role(Role("strange", Strange, "a role"))
        registry.add_section("half", Options)
        registry.add_command("half", print)
        raise RuntimeError("in the middle")
"""


def test_b74_a_broken_plugin_stops_no_other_and_is_rolled_back(modules, caplog, monkeypatch):
    """[good1, ImportError, raises half-way, good2]: both good ones are there, the rest left two warnings."""
    points = [
        modules("wkt_good1", GOOD.format(name="good1")),
        modules("wkt_importless", "import no_such_module_anywhere"),
        modules("wkt_half", HALF),
        modules("wkt_good2", GOOD.format(name="good2")),
    ]
    monkeypatch.delenv("WORKERKIT_STRICT_PLUGINS", raising=False)
    with caplog.at_level(logging.WARNING):
        plugins = load_plugins(points)
    registry = plugins.registry
    assert set(registry.offers["sampler"]) == {"good1", "good2"}
    assert "strange" not in registry.roles
    assert "strange" not in registry.offers
    assert registry.plugin_sections == {}
    assert registry.commands == {}
    assert set(registry.broken) == {"importless", "half"}
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "'importless'" in warnings[0]
    assert "no_such_module_anywhere" in warnings[0]
    assert "'half'" in warnings[1]
    assert "in the middle" in warnings[1]
    by_name = {report.name: report for report in plugins.reports}
    assert by_name["good1"].registered == ("sampler: good1",)
    assert by_name["half"].registered == ()
    assert "RuntimeError: in the middle" in by_name["half"].traceback
    assert "wkt_half.py" in by_name["half"].traceback
    monkeypatch.setenv("WORKERKIT_STRICT_PLUGINS", "1")
    with pytest.raises(ModuleNotFoundError):
        load_plugins(points)


def test_b76_a_broken_plugin_is_a_warning_and_its_part_a_refusal(modules, caplog):
    """Not only at DEBUG level; and a config that names what it would have brought is not started without it."""
    broken = modules(
        "wkt_platform",
        """
        from workerkit.framework.hooks import hookimpl
        WORKERKIT_API = 1
        @hookimpl
        def worker_components(registry):
            raise ModuleNotFoundError("No module named 'torch_npu'")
        """,
    )
    with caplog.at_level(logging.WARNING):
        registry = load_plugins([*entry_points(), broken]).registry
    (warning,) = [r for r in caplog.records if "platform" in r.getMessage()]
    assert warning.levelno >= logging.WARNING
    assert "torch_npu" in warning.getMessage()
    with pytest.raises(ConfigError) as error:
        assemble({"components": {"device": "npu2"}}, registry=registry)
    assert "no device 'npu2'" in str(error.value)
    assert "plugin 'platform' could not be loaded: ModuleNotFoundError: No module named 'torch_npu'" in str(error.value)


def test_a_failed_plugin_can_be_loaded_again_once_it_is_mended():
    host = PluginHost(new_registry())
    state = {"broken": True}

    @hookimpl
    def worker_components(registry):
        registry.add(roles.SAMPLER, "mine", FakeSampler)
        if state["broken"]:
            raise RuntimeError

    assert host.load("mine", plugin(worker_components=worker_components)).error
    state["broken"] = False
    report = host.load("mine", plugin(worker_components=worker_components))
    assert report.error == ""
    assert report.registered == ("sampler: mine",)
    assert host.registry.broken == {}, "what was mended is broken no longer"


def test_a_misspelt_hook_is_refused_at_load_with_the_nearest():
    @hookimpl
    def worker_component(registry):
        raise AssertionError("never called")

    report = PluginHost(new_registry()).load("mine", plugin(worker_component=worker_component))
    assert "no hook 'worker_component'; did you mean 'worker_components'?" in report.error


def test_a_wrong_signature_is_refused_at_load():
    @hookimpl
    def worker_components(registry, config):
        raise AssertionError("never called")

    host = PluginHost(new_registry())
    report = host.load("mine", plugin(worker_components=worker_components))
    assert "config" in report.error
    assert host.registry.broken


@pytest.mark.parametrize("version", [None, API_VERSION + 1, "1"])
def test_the_interface_version_is_checked(version):
    hook = offering((roles.SAMPLER, "mine", FakeSampler))
    host = PluginHost(new_registry())
    report = host.load("mine", plugin(version=version, worker_components=hook))
    assert repr(version) in report.error
    assert str(API_VERSION) in report.error
    assert host.registry.offers["sampler"] == {}


def test_two_plugins_that_offer_the_same_name_second_one_is_refused_whole():
    host = PluginHost(new_registry())
    host.load("first", plugin("first", worker_components=offering((roles.SAMPLER, "x", FakeSampler))))
    both = offering((roles.SAMPLER_STAGE, "y", FakeStage), (roles.SAMPLER, "x", FakeSampler))
    report = host.load("second", plugin("second", worker_components=both))
    assert "already registered by first" in report.error
    assert host.registry.offers["sampler_stage"] == {}
    assert host.registry.offers["sampler"]["x"].plugin == "first"


def test_b132_a_plugin_may_load_another_inside_its_hook():
    host = PluginHost(new_registry())
    inner = plugin("inner", worker_components=offering((roles.SAMPLER, "inner", FakeSampler)))

    @hookimpl
    def worker_components(registry):
        registry.add(roles.SAMPLER, "outer", FakeSampler)
        assert host.load("inner", inner).error == ""

    report = host.load("outer", plugin("outer", worker_components=worker_components))
    assert report.error == ""
    assert set(host.registry.offers["sampler"]) == {"outer", "inner"}
    assert {o.name: o.plugin for o in host.registry.offers["sampler"].values()} == {"outer": "outer", "inner": "inner"}


def test_b132_a_failing_outer_plugin_takes_its_inner_one_back():
    host = PluginHost(new_registry())
    inner = plugin("inner", worker_components=offering((roles.SAMPLER, "inner", FakeSampler)))

    @hookimpl
    def worker_components(registry):
        host.load("inner", inner)
        raise RuntimeError

    host.load("outer", plugin("outer", worker_components=worker_components))
    assert host.registry.offers["sampler"] == {}


def test_disabled_plugins_are_left_out(modules, monkeypatch):
    points = [modules("wkt_good1", GOOD.format(name="good1")), modules("wkt_good2", GOOD.format(name="good2"))]
    monkeypatch.setenv("WORKERKIT_DISABLE_PLUGINS", "good1, other")
    assert set(load_plugins(points).registry.offers["sampler"]) == {"good2"}


def test_builtin_parts_come_through_the_same_door_and_first():
    points = entry_points()
    assert points[0].name == "builtin"
    report = load_plugins(points).reports[0]
    assert report.error == ""
    assert "runner: v1" in report.registered
    assert "workerkit" in report.origin


def test_every_registry_is_fresh():
    one, two = load_plugins().registry, load_plugins().registry
    one.add(roles.SAMPLER, "mine", FakeSampler)
    assert "mine" not in two.offers["sampler"]


def test_a_builtin_part_that_is_left_abstract_fails_the_config_not_the_process(workerkit_registry):
    workerkit_registry.add(roles.SAMPLER, "gone", "workerkit.components.sampler.no_such_module:Gone")
    with pytest.raises(ConfigError, match="'gone' cannot be used: ModuleNotFoundError"):
        assemble(fake_config(sampler="gone"), registry=workerkit_registry)


# --- sections


@attrs.frozen(kw_only=True)
class Section:
    """A plugin's own section."""

    words: tuple[str, ...] = ()
    strict: bool = False


class Sectioned(FakeSampler):
    """Reads its plugin's section, by type."""

    def __init__(self, section: Section) -> None:
        self.section = section


def with_section(registry):
    registry.add_section("mine", Section)
    registry.add(roles.SAMPLER, "sectioned", Sectioned)
    return registry


def test_b173_a_plugins_section_reaches_its_parts_and_nobody_elses_schema(workerkit_registry):
    with_section(workerkit_registry)

    @attrs.frozen(kw_only=True)
    class Other:
        """Another plugin's section."""

        words: int = 0

    workerkit_registry.add_section("other", Other)
    config = {**fake_config(sampler="sectioned"), "plugins": {"mine": {"words": ["a"]}, "other": {"words": 3}}}
    assembly = assemble(config, registry=workerkit_registry)
    assert assembly.get(roles.SAMPLER).section == Section(words=("a",))
    assert assembly.plan.document["plugins"]["other"] == {"words": 3}


def test_b173_a_section_without_owner_is_refused(workerkit_registry):
    with_section(workerkit_registry)
    with pytest.raises(ConfigError) as error:
        assemble({**fake_config(), "plugins": {"mime": {}}}, registry=workerkit_registry)
    assert "plugins.mime: no installed plugin owns this section; did you mean 'mine'?" in str(error.value)


def test_b172_a_sections_options_are_strict(workerkit_registry):
    """A typo is an error with its path, "false" is no boolean."""
    with_section(workerkit_registry)
    section = {"wrods": [], "strict": "false", "words": [1]}
    with pytest.raises(ConfigError) as error:
        assemble({**fake_config(), "plugins": {"mine": section}}, registry=workerkit_registry)
    text = str(error.value)
    assert "plugins.mine: unknown key 'wrods'; did you mean 'words'?" in text
    assert "plugins.mine.strict: expected bool, got 'false' (str)" in text
    assert "plugins.mine.words[0]: expected str, got 1 (int)" in text


def test_an_absent_section_takes_its_defaults(workerkit_registry):
    with_section(workerkit_registry)
    assert (
        assemble(fake_config(sampler="sectioned"), registry=workerkit_registry).get(roles.SAMPLER).section == Section()
    )
