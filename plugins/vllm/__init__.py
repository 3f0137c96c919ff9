"""workerkit under vLLM: its engine, scheduler and server, around the worker that a workerkit config describes.

`platform` and `check_platform` are entry points; vLLM calls them in each of its processes while it is itself being
imported, so nothing of vLLM is imported here.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "WORKERKIT_CONFIG"  # environment variable: the config file
SECTION = "workerkit"  # key of --additional-config: the config file, or the config itself

_PLATFORM = "workerkit.plugins.vllm.platform.WorkerkitPlatform"


def is_wanted() -> bool:
    """Whether a workerkit config was given. Platforms are chosen before vLLM has read its options, hence the look at
    the command line, which its processes share."""
    options = zip(sys.argv, [*sys.argv[1:], ""], strict=True)
    return bool(os.environ.get(VARIABLE)) or any(
        option.partition("=")[0].replace("_", "-") == "--additional-config" and f'"{SECTION}"' in option + value
        for option, value in options
    )


def platform() -> str | None:
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
            "VLLM_TARGET_DEVICE must not be set to cpu, and VLLM_PLUGINS, when it is set, must name workerkit"
        )
