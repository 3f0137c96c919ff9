"""What `workerkit new-plugin` writes: file names and texts of a package."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from string import Template
from typing import Any

import attrs

from workerkit.framework import config as configs
from workerkit.framework.cli import templates
from workerkit.framework.registry import Offer

_IMPORTS = (
    "from workerkit.framework.assembly import assemble",
    "from workerkit.framework.plugins import PluginHost",
    "from workerkit.framework.registry import Registry",
    "from workerkit.plugins import builtin",
)
_THIRD_PARTY = ("numpy", "pytest", "torch")
_INTERFACES = "from workerkit.framework.interfaces"


@attrs.frozen
class Example:
    """A role that starts from a working part of its own."""

    module: str
    test: str
    key: str  # of the part in a plan
    components: str  # the config that selects it, YAML
    imports: tuple[str, ...]  # of the test, beside those of every test
    sections: str = "{}"  # what else the config says, YAML
    register: str = templates.REGISTER


EXAMPLES: Mapping[str, Example] = {
    "sampler_stage": Example(
        templates.SAMPLER_STAGE,
        templates.SAMPLER_STAGE_TEST,
        "sampler.stages[0]",
        "{sampler: {stages: [$name, temperature, top_k_top_p]}}",
        (
            "import numpy as np",
            "import torch",
            f"{_INTERFACES}.sampling import SamplingContext",
            f"{_INTERFACES}.sampling_params import SamplingParams",
        ),
    ),
    "observers": Example(
        templates.OBSERVERS,
        templates.OBSERVERS_TEST,
        "observers[0]",
        "{observers: [$name]}",
        ("from workerkit.framework.hooks import WorkerHooks", f"{_INTERFACES}.request import ModelRunnerOutput"),
    ),
    "worker_extensions": Example(
        templates.WORKER_EXTENSIONS,
        templates.WORKER_EXTENSIONS_TEST,
        "worker_extensions[0]",
        "{worker_extensions: [$name]}",
        (
            "from workerkit.framework.testing.fakes_model import FAKE_SALT",
            "from workerkit.framework.testing.registry import fake_config, fake_registry",
        ),
    ),
    "kernel_library": Example(
        templates.KERNEL_LIBRARY,
        templates.KERNEL_LIBRARY_TEST,
        "kernels.libraries[0]",
        "{kernels: {libraries: [$name, reference]}}",
        ("import torch", "from workerkit.framework.roles import KERNELS"),
    ),
    **{
        role: Example(
            templates.SPECULATOR,
            templates.SPECULATOR_TEST,
            key,
            components,
            (
                "import pytest",
                "from workerkit.framework.testing.conformance_speculation import "
                "Row, SpeculatorConformance, draft_inputs",
                "from workerkit.framework.testing.registry import fake_registry",
                f"{_INTERFACES}.runner import WorkerShape",
            ),
            "{limits: {num_speculative_tokens: 3}}",
            templates.REGISTER_PROPOSER,
        )
        for role, key, components in (
            ("speculator", "speculator", "{speculator: $name}"),
            ("proposer", "speculator.proposers[0]", "{speculator: {use: composite, proposers: [$name]}}"),
        )
    },
}


def example(role: str, values: Mapping[str, str]) -> Mapping[str, str]:
    """A package around the role's example."""
    chosen = EXAMPLES[role]
    module = chosen.module + chosen.register
    return _package(module, chosen.test, chosen.imports, {**values, "add": _add(values)}, {})


def _add(values: Mapping[str, str], **options: Any) -> str:
    """The arguments of `registry.add`; options that are empty are left out."""
    first = (f"roles.{values['role'].upper()}", f'"{values["name"]}"', values["cls"])
    return ", ".join([*first, *(f"{name}={option!r}".replace("'", '"') for name, option in options.items() if option)])


def derived(
    base: type, offer: Offer, methods: Iterable[str], goes_with: Mapping[str, str], values: Mapping[str, str]
) -> Mapping[str, str]:
    """A package around a class under an installed one, with each of the methods handed on.

    `offer`: how that one is registered. `goes_with`: parts of other roles that a config must name too.
    """
    filled = {
        **values,
        "base": base.__name__,
        "base_name": offer.name,
        "base_module": base.__module__,
        "add": _add(values, requires=offer.requires, defaults=offer.defaults, parts=offer.parts),
        "methods": "\n".join(_delegate(base, name) for name in methods),
    }
    return _package(templates.DERIVED + templates.REGISTER, "", (), filled, goes_with)


def _package(
    module: str, test: str, imports: tuple[str, ...], values: Mapping[str, str], goes_with: Mapping[str, str]
) -> Mapping[str, str]:
    role = values["role"]
    key = EXAMPLES[role].key if role in EXAMPLES else role
    chosen = EXAMPLES[role].components if role in EXAMPLES else "{$role: $name}"
    more = configs.parse_yaml(EXAMPLES[role].sections, role) if role in EXAMPLES else {}
    config = {**more, "components": {**goes_with, **configs.parse_yaml(_fill(chosen, values), role)}}
    filled = {**values, "key": key, "config": _source(config), "yaml": configs.dump_yaml(config)}
    filled["imports"] = _sorted({*_IMPORTS, *imports})
    filled["test"] = _fill(test, filled)
    return {
        "pyproject.toml": _fill(templates.PYPROJECT, filled),
        "README.md": _fill(templates.README, filled),
        f"{values['module']}/__init__.py": _fill(module, filled),
        f"tests/test_{values['name']}.py": _fill(templates.TEST, filled),
    }


def _sorted(imports: Iterable[str]) -> str:
    """Standard library, third party, workerkit: each in its paragraph."""
    groups: list[list[str]] = [[], [], []]
    for line in sorted(imports):
        groups[2 if "workerkit" in line else 1 if line.split()[1] in _THIRD_PARTY else 0].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group)


def _source(config: Mapping[str, Any]) -> str:
    """As Python, in lines that are not too long."""
    sections = (
        f'    "{section}": {{\n'
        + "".join(f'        "{key}": {value!r},\n' for key, value in values.items())
        + "    },\n"
        for section, values in config.items()
    )
    return "{\n" + "".join(sections).replace("'", '"') + "}"


def _fill(template: str, values: Mapping[str, str]) -> str:
    return Template(template).substitute(values)


def _delegate(cls: type, name: str) -> str:
    """A method that hands on to the base class, with the parameters it has there."""
    member = inspect.getattr_static(cls, name)
    doc = (inspect.getdoc(getattr(cls, name)) or f"{name} of the interface.").partition("\n")[0]
    head = textwrap.shorten(doc.replace('"', "'"), 100, placeholder=" …")
    if isinstance(member, property):
        return f'    @property\n    def {name}(self):\n        """{head}"""\n        return super().{name}\n'
    parameters = [*inspect.signature(member).parameters.values()]
    plain = [p.replace(annotation=p.empty) for p in parameters]
    signature = str(inspect.Signature(plain)).replace("'", '"')
    passed = ", ".join(_passed(p) for p in parameters[1:])
    return f'    def {name}{signature}:\n        """{head}"""\n        return super().{name}({passed})\n'


def _passed(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.KEYWORD_ONLY:
        return f"{parameter.name}={parameter.name}"
    stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
    return stars + parameter.name
