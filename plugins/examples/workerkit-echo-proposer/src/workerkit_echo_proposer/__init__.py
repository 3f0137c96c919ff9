"""The plugin: tells workerkit that there is a proposer `echo`."""

from __future__ import annotations

from workerkit.framework import roles
from workerkit.framework.hooks import hookimpl
from workerkit.framework.registry import Registry

WORKERKIT_API = 1  # the interface version that this plugin was made for


@hookimpl
def worker_components(registry: Registry) -> None:
    """Register the proposer, alone and as one of a composite. Who selects it gets drafts verified, too."""
    where = "workerkit_echo_proposer.proposer:EchoProposer"
    registry.add(roles.SPECULATOR, "echo", where, defaults={"rejection": "standard"})
    registry.add(roles.PROPOSER, "echo", where)
