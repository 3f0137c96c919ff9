"""Shared by all tests: nothing asks a hub, forking tokenizers stay quiet, and Ctrl-C is heard, which a shell ignores
for what it runs in the background."""

import os
import signal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)
