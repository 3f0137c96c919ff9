"""The pytest plugin `workerkit`: fixtures to assemble workers from fakes. Imports little until one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from workerkit.framework.assembly import Assembly
    from workerkit.framework.registry import Registry

for _suites in ("conformance", "conformance_cache"):
    pytest.register_assert_rewrite(f"workerkit.framework.testing.{_suites}")


@pytest.fixture
def workerkit_registry() -> Registry:
    """A registry of its own with every installed plugin, and a fake named `fake` for every role."""
    from workerkit.framework.testing.registry import fake_registry

    return fake_registry()


@pytest.fixture
def fake_config() -> Callable[..., dict[str, Any]]:
    """`workerkit.framework.testing.registry.fake_config`: a config in which all but the named roles are fakes."""
    from workerkit.framework.testing.registry import fake_config

    return fake_config


@pytest.fixture
def assembly_factory(workerkit_registry: Registry) -> Iterator[Callable[..., Assembly]]:
    """`factory(config, overrides=None)` assembles with `workerkit_registry`; all workers are shut down afterwards."""
    from workerkit.framework.assembly import assemble

    made: list[Assembly] = []

    def factory(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Assembly:
        made.append(assemble(config, overrides, workerkit_registry))
        return made[-1]

    yield factory
    for assembly in reversed(made):
        assembly.shutdown()
