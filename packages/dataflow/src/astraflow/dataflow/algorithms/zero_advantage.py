"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): equal rewards give no gradient."""

from __future__ import annotations

from ..group import PolicyGroup
from .filter import Filter
from .stage import Context


class ZeroAdvantage(Filter):
    """Drops a group whose rewards are all equal; others are drawn in its place, as admission sees that it gave
    nothing."""

    def __init__(self, context: Context) -> None:
        if context.n_samples < 2:
            raise ValueError(f"with n_samples {context.n_samples} every group is constant: nothing would be kept")

    def apply(self, group: PolicyGroup, /) -> PolicyGroup:
        return group.keeping(()) if group.constant else group
