"""Shared by all tests: one thread per process is enough for tiny models, and numbers must not depend on who is running."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
