"""The plugin: tells workerkit that there is a sampler stage `ban_token`."""

from __future__ import annotations

from workerkit.framework import roles
from workerkit.framework.hooks import hookimpl
from workerkit.framework.registry import Registry

WORKERKIT_API = 1  # the interface version that this plugin was made for


@hookimpl
def worker_components(registry: Registry) -> None:
    """Register the stage. Its module is named, not imported: nobody waits for it who does not use it."""
    registry.add(roles.SAMPLER_STAGE, "ban_token", "workerkit_ban_token.stage:BanToken")
