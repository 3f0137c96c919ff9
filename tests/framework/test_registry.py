"""Registration: what is refused, and what is found out from a constructor's signature."""

import abc
from collections.abc import Mapping

import attrs
import pytest

from workerkit.framework import roles
from workerkit.framework.errors import RegistrationError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import RowBlockTables
from workerkit.framework.interfaces.model import ModelLoader
from workerkit.framework.interfaces.observer import StepHooks
from workerkit.framework.interfaces.runner import RunnerParts
from workerkit.framework.interfaces.sampling import Sampler, SamplerStage
from workerkit.framework.interfaces.sections import LimitsSection
from workerkit.framework.interfaces.speculation import Speculator
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.registry import Role
from workerkit.framework.roles import ROLES, new_registry
from workerkit.framework.testing.fakes_sampling import FakeSampler, FakeStage


@attrs.frozen(kw_only=True)
class Options:
    """Options of a test part."""

    size: int = 3


class Everything(FakeSampler):
    """Asks for one of each kind.

    Only the first line is its doc.
    """

    def __init__(
        self,
        config: Options,
        loader: ModelLoader,
        stages: tuple[SamplerStage, ...],
        later: Later[ModelLoader],
        context: DeviceContext,
        limits: LimitsSection,
        parts: RunnerParts,
        hooks: StepHooks,
        tables: RowBlockTables,
    ) -> None:
        self.config = config


def test_roles_have_unique_names_docs_and_abstract_interfaces():
    assert len({role.name for role in ROLES}) == len(ROLES)
    asked = {(role.interface, role.many) for role in ROLES}
    assert len(asked) == len(ROLES), "a parameter's type, one part or many, must say which role it asks for"
    for role in ROLES:
        assert role.doc
        assert issubclass(role.interface, abc.ABC)
        assert role.version in (0, 1)
    provisional = {role.name for role in ROLES if role.version == 0}
    assert {"eplb", "pcp", "dcp", "pipeline", "kv_connector"} <= provisional
    assert not {"sampler", "speculator", "rejection", "lora", "encoder", "encoder_graph"} & provisional


def test_no_interface_of_a_role_is_a_subclass_of_anothers():
    for one in ROLES:
        for other in ROLES:
            assert one.interface is other.interface or not issubclass(one.interface, other.interface)


def test_one_part_and_many_by_name_are_roles_of_their_own_with_one_interface():
    class Several(Speculator):
        num_speculative_tokens = 1

        def __init__(self, one: Speculator, many: Mapping[str, Speculator]) -> None:
            self.parts = (one, many)

        def propose(self, inputs):
            """Never called."""

    registry = new_registry()
    registry.add(roles.SPECULATOR, "several", Several)
    needs = registry.entry("speculator", "several").needs
    assert (needs["one"].role, needs["one"].many) == (roles.SPECULATOR, False)
    assert (needs["many"].role, needs["many"].many, needs["many"].named) == (roles.PROPOSER, True, True)


def test_a_constructor_is_read_completely():
    registry = new_registry()
    registry.add(roles.SAMPLER, "everything", Everything)
    entry = registry.entry("sampler", "everything")
    assert entry.config is Options
    assert entry.doc == "Asks for one of each kind."
    needs = entry.needs
    assert needs["loader"].role is roles.LOADER
    assert (needs["stages"].role, needs["stages"].many) == (roles.SAMPLER_STAGE, True)
    assert (needs["later"].role, needs["later"].later) == (roles.LOADER, True)
    assert needs["context"].value is DeviceContext
    assert needs["limits"].section is LimitsSection
    assert needs["parts"].bundle_class is RunnerParts
    assert needs["parts"].bundle["observers"].many
    assert needs["hooks"].special is StepHooks
    assert (needs["tables"].role, needs["tables"].exact) == (roles.BLOCK_TABLE, RowBlockTables)


def test_an_abstract_class_is_refused_with_what_is_left():
    class Half(Sampler):
        def process(self, logits, batch):
            return logits

    with pytest.raises(RegistrationError, match="leaves abstract: draw"):
        new_registry().add(roles.SAMPLER, "half", Half)


def test_a_class_of_another_role_is_refused():
    with pytest.raises(RegistrationError, match="is not a Sampler"):
        new_registry().add(roles.SAMPLER, "stage", FakeStage)


def test_a_name_can_be_taken_once_and_the_owner_is_named():
    registry = new_registry()
    with registry.registering("first"):
        registry.add(roles.SAMPLER, "mine", FakeSampler)
    with pytest.raises(RegistrationError, match="already registered by first"):
        registry.add(roles.SAMPLER, "mine", FakeSampler)


def test_an_unknown_role_names_the_nearest():
    with pytest.raises(RegistrationError, match="did you mean 'sampler'"):
        new_registry().add(Role("sampler", Sampler, "misspelt"), "mine", FakeSampler)


def test_a_role_of_a_plugin_can_be_filled_and_not_be_taken_twice():
    class Clock(abc.ABC):
        @abc.abstractmethod
        def now(self) -> float: ...

    class Stopped(Clock):
        """Shows noon."""

        def now(self) -> float:
            return 12.0

    registry = new_registry()
    role = Role("clock", Clock, "time")
    registry.add_role(role)
    registry.add(role, "stopped", Stopped)
    assert registry.entry("clock", "stopped").doc == "Shows noon."
    with pytest.raises(RegistrationError, match="already registered"):
        registry.add_role(role)


def test_a_parameter_that_nothing_can_fill_is_named():
    class Odd(FakeSampler):
        def __init__(self, number: int) -> None:
            pass

    with pytest.raises(RegistrationError, match=r"'number'.*no interface"):
        new_registry().add(roles.SAMPLER, "odd", Odd)


def test_a_parameter_without_annotation_is_named():
    class Bare(FakeSampler):
        def __init__(self, loader) -> None:
            pass

    with pytest.raises(RegistrationError, match="'loader'"):
        new_registry().add(roles.SAMPLER, "bare", Bare)


def test_the_config_must_be_an_attrs_class():
    class Raw(FakeSampler):
        def __init__(self, config: dict) -> None:
            pass

    with pytest.raises(RegistrationError, match="attrs class"):
        new_registry().add(roles.SAMPLER, "raw", Raw)


def test_nested_parts_that_the_constructor_does_not_have_are_refused():
    with pytest.raises(RegistrationError, match="no nested parts"):
        new_registry().add(roles.SAMPLER, "mine", FakeSampler, parts={"stages": ("temperature",)})


def test_a_named_module_is_imported_when_it_is_looked_at():
    registry = new_registry()
    registry.add(roles.SAMPLER, "absent", "no_such_module_anywhere:Part")
    registry.add(roles.SAMPLER, "there", "workerkit.framework.testing.fakes_sampling:FakeSampler")
    assert registry.entry("sampler", "there").factory is FakeSampler
    with pytest.raises(ModuleNotFoundError):
        registry.entry("sampler", "absent")
    with pytest.raises(KeyError):
        registry.entry("sampler", "never heard of")


def test_a_missing_requirement_says_what_to_install():
    registry = new_registry()
    registry.add(roles.SAMPLER, "needy", FakeSampler, requires=("no_such_module_anywhere", "fancy"))
    registry.add(roles.SAMPLER, "served", FakeSampler, requires=("attrs", "fancy"))
    assert "workerkit[fancy]" in registry.missing_requirement("sampler", "needy")
    assert registry.missing_requirement("sampler", "served") is None


def test_b173_two_plugins_cannot_own_the_same_section():
    registry = new_registry()
    registry.add_section("mine", Options)
    with pytest.raises(RegistrationError, match="plugin section 'mine'"):
        registry.add_section("mine", Options)


def test_every_builtin_part_can_be_inspected_and_documents_its_options(workerkit_registry):
    """Registration is lazy; this is where a wrong signature among our own parts shows."""
    for role, offers in workerkit_registry.offers.items():
        for name in offers:
            if workerkit_registry.missing_requirement(role, name):
                continue
            entry = workerkit_registry.entry(role, name)
            assert entry.doc, f"{role}: {name} has no docstring"
            for field in attrs.fields(entry.config) if entry.config else ():
                assert field.metadata.get("doc"), f"{role}: {name}: option {field.name} has no doc"
