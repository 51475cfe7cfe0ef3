"""Leases: a reader says which versions it is reading, so that they are not removed under it."""

from __future__ import annotations

LEASES = "leases/"
"""Where a store keeps them: one small blob for each pull under way."""
