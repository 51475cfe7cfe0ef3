"""Several ranks as one backend: rank 0 runs the training loop, and what it does to its backend the others do too.

Invariant: a call is over when it is over on all ranks; where one failed the team is of no further use, rank 0's loop
ends with the error, and so do the followers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio.to_thread
import msgspec

from astraflow.dataflow import TrainBatch
from astraflow.weightsync import (
    PublishReport,
    RankLost,
    ShardedPublisher,
    Store,
    TorchChannel,
    broadcast,
    gather,
)

from .config import TrainerConfig
from .interface import PolicySpec, PublishTarget, StepResult, TrainerBackend
from .torch_backend import TorchBackend

PATIENCE_S = 7 * 24 * 3600.0
"""How long a rank waits for the next call. A rank that is gone is noticed at once, by its closed connection."""

T = TypeVar("T")


class _Step(msgspec.Struct, frozen=True, tag=True):
    batch: TrainBatch


class _Publish(msgspec.Struct, frozen=True, tag=True):
    target: PublishTarget
    version: int


class _Files(msgspec.Struct, frozen=True, tag=True):
    action: Literal["save", "load", "export"]
    directory: str


class _Stop(msgspec.Struct, frozen=True, tag=True):
    pass


Call = _Step | _Publish | _Files | _Stop


class _Member:
    """One rank: its backend, its end of the channel, and its publisher."""

    def __init__(self, backend: TorchBackend, store: Store) -> None:
        self.backend, self.channel = backend, TorchChannel(PATIENCE_S)
        self._store = store
        self._publisher: tuple[PublishTarget, ShardedPublisher] | None = None

    async def publish(self, call: _Publish) -> PublishReport:
        """The ranks tell each other what goes wrong here."""
        target = call.target
        if self._publisher is None or self._publisher[0] != target:
            made = ShardedPublisher(
                self._store,
                self.channel,
                stream=target.stream,
                incarnation=target.incarnation,
                anchor_every=target.anchor_every,
            )
            self._publisher = (target, made)
        return await self._publisher[1].publish(self.backend.pieces(), call.version)

    def local(self, call: _Step | _Files) -> None:
        """This rank's part of a call whose result only rank 0 wants."""
        if isinstance(call, _Step):
            self.backend.step(call.batch)
        else:
            action: Callable[[Path], None] = getattr(self.backend, call.action)
            action(Path(call.directory))

    def together(self, work: Callable[[], T]) -> T:
        """This rank's part of a call, and then the others' word that theirs is done.

        Raises RuntimeError naming a rank whose part failed where this one's did not.
        """
        failure: Exception | None = None
        try:
            result = work()
        except RankLost:
            raise
        except Exception as error:  # whatever it is, the others wait to hear of it
            failure = error
        said = gather(self.channel, b"" if failure is None else f"{type(failure).__name__}: {failure}".encode())
        verdict = next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(said) if text), "")
        verdict = broadcast(self.channel, verdict.encode()).decode()
        if failure is not None:
            raise failure
        if verdict:
            raise RuntimeError(f"another rank of the trainer failed; {verdict}")
        return result


class Team:
    """`TrainerBackend` on rank 0 for all ranks."""

    def __init__(self, backend: TorchBackend, store: Store) -> None:
        self._member = _Member(backend, store)

    @classmethod
    def of(cls, backend: TrainerBackend, store: Store) -> Team:
        """Raises ValueError for a backend that knows only one process."""
        if not isinstance(backend, TorchBackend):
            raise ValueError(f"{type(backend).__name__} trains in one process; start it without torchrun")
        return cls(backend, store)

    def step(self, batch: TrainBatch, /) -> StepResult:
        return self._call(_Step(batch), lambda: self._member.backend.step(batch))

    async def publish(self, target: PublishTarget, version: int, /) -> PublishReport:
        call = _Publish(target, version)
        await anyio.to_thread.run_sync(broadcast, self._member.channel, msgspec.msgpack.encode(call))
        return await self._member.publish(call)

    def weights(self) -> Mapping[str, Any]:
        raise NotImplementedError("the ranks publish what they hold; nobody has all of it")

    def save(self, directory: Path, /) -> None:
        self._files("save", directory)

    def load(self, directory: Path, /) -> None:
        self._files("load", directory)

    def export(self, directory: Path, /) -> None:
        self._files("export", directory)

    def stop(self) -> None:
        """Send the followers home."""
        broadcast(self._member.channel, msgspec.msgpack.encode(_Stop()))

    def _files(self, action: Literal["save", "load", "export"], directory: Path) -> None:
        call = _Files(action, str(directory))
        self._call(call, lambda: self._member.local(call))

    def _call(self, call: Call, work: Callable[[], T]) -> T:
        broadcast(self._member.channel, msgspec.msgpack.encode(call))
        return self._member.together(work)


async def follow(spec: PolicySpec, config: TrainerConfig, store: Store) -> None:
    """Be another rank than 0 until rank 0 says it is over.

    Raises RankLost if rank 0 is gone, and whatever this rank's part of a call raises.
    """
    member = await anyio.to_thread.run_sync(lambda: _Member(TorchBackend(spec, config), store))
    while True:
        data = await anyio.to_thread.run_sync(broadcast, member.channel, b"")
        call = msgspec.msgpack.decode(data, type=Call)
        if isinstance(call, _Stop):
            return
        if isinstance(call, _Publish):
            await member.publish(call)
        else:
            await anyio.to_thread.run_sync(member.together, partial(member.local, call))
