"""Who this process is among those that torchrun started, without importing torch."""

from __future__ import annotations

import os


def world() -> tuple[int, int]:
    """(rank, number of ranks) as torchrun says; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
