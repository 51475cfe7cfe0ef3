"""Which of a policy's versions are real: who is in charge, where trainers went back to, what they can go back to.

Invariants: incarnations only grow; a token of weights that a trainer's rollback abandoned counts as at most the version
that was gone back to; batches from the oldest checkpoint on that a trainer still has can be served again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

REMEMBERED_ATTACHMENTS = 256


class Lineage(msgspec.Struct):
    """`attachments` are (incarnation, version) of the trainers that took over, `checkpoints` the versions that the
    trainer can come back at, both in order."""

    incarnation: int = 0
    attachments: list[tuple[int, int]] = []
    checkpoints: list[int] = []

    def attach(self, version: int, keep: int) -> int:
        """A trainer takes over from its checkpoint at `version`: later ones are gone. Returns its incarnation."""
        self.incarnation += 1
        self.attachments = [*self.attachments[1 - REMEMBERED_ATTACHMENTS :], (self.incarnation, version)]
        self.checkpoints = [kept for kept in self.checkpoints if kept < version]
        self.commit(version, keep)
        return self.incarnation

    def commit(self, version: int, keep: int) -> None:
        """There is a checkpoint at `version`; of those before it the trainer has the last `keep` - 1."""
        if version not in self.checkpoints:
            self.checkpoints = sorted([*self.checkpoints, version])[-keep:]

    @property
    def floor(self) -> int:
        """The oldest version that the trainer can come back at: batches before it will not be asked for."""
        return self.checkpoints[0] if self.checkpoints else 0

    @property
    def checkpoint(self) -> int:
        """The newest version that the trainer can come back at: what made it and those before was committed."""
        return self.checkpoints[-1] if self.checkpoints else 0

    def bound(self, incarnation: int) -> int | None:
        """What tokens of weights of `incarnation` count as at most; None if nobody has gone back since."""
        return min((version for number, version in self.attachments if number > incarnation), default=None)


def check_consumed(model_id: str, version: int, consumed: Sequence[str], batches: Mapping[int, str]) -> None:
    """Raises ValueError if a checkpoint at `version` that has `consumed` is not of the run that made `batches`."""
    if not consumed:
        return
    if len(consumed) != version:
        raise ValueError(f"policy {model_id!r}: a checkpoint at version {version} has consumed {len(consumed)} batches")
    for at, batch_id in batches.items():
        if at < version and consumed[at] != batch_id:
            raise ValueError(
                f"policy {model_id!r}: the checkpoint at version {version} made version {at + 1} of batch "
                f"{consumed[at]!r}, this run of {batch_id!r}: it is another run's checkpoint. Give the trainer "
                "this run's checkpoints, or begin a new run"
            )
