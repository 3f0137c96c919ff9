"""Numbers that only some families have."""

from __future__ import annotations
