"""What is not worth training, decided per (task, policy) group after its rollout.

A filter looks at a group and says why to drop it, or None to keep it; the reason is counted in the policy's `dropped`.
"""

from __future__ import annotations

from collections.abc import Callable

from .ingest import PolicyGroup

Filter = Callable[[PolicyGroup], str | None]


def zero_advantage(group: PolicyGroup) -> str | None:
    """Dynamic sampling (DAPO, arXiv:2503.14476): equal rewards give no gradient."""
    return "zero_advantage" if group.constant else None
