"""workerkit under vLLM: its engine, scheduler and server, around the worker that a workerkit config describes.

`find_platform` and `check_platform` are entry points; vLLM calls them in each of its processes while it is itself being
imported, so nothing of vLLM is imported here.
"""

from __future__ import annotations

import json
import os
import sys

VARIABLE = "WORKERKIT_CONFIG"  # environment variable: the config file
SECTION = "workerkit"  # key of --additional-config: the config file, or the config itself

_PLATFORM = "workerkit.plugins.vllm.platform.WorkerkitPlatform"


def is_wanted() -> bool:
    """Whether a workerkit config was given. Platforms are chosen before vLLM has read its options, hence the look at
    the command line, which its processes share."""
    options = zip(sys.argv, [*sys.argv[1:], ""], strict=True)
    return bool(os.environ.get(VARIABLE)) or any(_gives_config(option, value) for option, value in options)


def _gives_config(option: str, value: str) -> bool:
    """vLLM takes `--additional-config JSON` and `--additional-config.KEY VALUE`, either with "=", "_" for "-"."""
    name, _, given = option.partition("=")
    name, *path = name.replace("_", "-").split(".")
    if name != "--additional-config" or path:
        return name == "--additional-config" and path[0] == SECTION
    try:
        return SECTION in json.loads(given or value)
    except (ValueError, TypeError):  # vLLM says what is wrong with it
        return False


def find_platform() -> str | None:
    """Entry point of `vllm.platform_plugins`: our platform, or None where nobody has asked for it."""
    return _PLATFORM if is_wanted() else None


def check_platform() -> None:
    """Entry point of `vllm.general_plugins`: vLLM must not serve with a worker of its own when ours was asked for.

    Raises UnsupportedError, which ends vLLM's start.
    """
    if not is_wanted():
        return
    from workerkit.plugins.vllm.platform import chosen_platform

    if (chosen := chosen_platform()) != _PLATFORM:
        from workerkit.framework.errors import UnsupportedError

        raise UnsupportedError(
            f"a workerkit config was given ({VARIABLE} or --additional-config), but vLLM runs on {chosen}: "
            "VLLM_TARGET_DEVICE must not be set to cpu"
        )
