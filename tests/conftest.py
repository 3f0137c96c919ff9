"""Shared by all tests: nothing asks a hub, and forking tokenizers stay quiet."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
