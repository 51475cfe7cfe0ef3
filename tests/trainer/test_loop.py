"""The loop against a dataflow made by hand and the real weight store: order, resume, cancellation, fencing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from astraflow.dataflow import (
    Attachment,
    AttachRequest,
    BatchReply,
    BatchRequest,
    CommitRequest,
    DataflowService,
    Empty,
    Fenced,
    PolicyVersion,
    RunFailed,
    StepReport,
    TrainBatch,
)
from astraflow.trainer import (
    BadBatch,
    PolicySpec,
    TrainerConfig,
    UnknownBackend,
    latest_checkpoint,
    train,
)
from astraflow.trainer.torch_backend import TorchBackend
from astraflow.weightsync import MemoryStore, StaleIncarnation

CONFIG = TrainerConfig(dtype="float32", minibatches=2, checkpoint_every=2, lr=1e-3)


class FakeDataflow:
    """Serves batch v at version v up to `steps`, and writes down everything that is said to it, in order."""

    def __init__(self, make_batch: Callable[[int], TrainBatch], steps: int) -> None:
        self.make_batch, self.steps = make_batch, steps
        self.incarnation = 0
        self.said: list[Any] = []
        self.error: Exception | None = None
        self.on_batch: Callable[[int], None] = lambda version: None
        self.empty_replies = 1

    async def attach(self, request: AttachRequest, /) -> Attachment:
        self.said.append(request)
        self.incarnation += 1
        return Attachment(incarnation=self.incarnation, steps=self.steps)

    async def next_batch(self, request: BatchRequest, /) -> BatchReply:
        await anyio.lowlevel.checkpoint()
        if self.error:
            raise self.error
        if request.version >= self.steps:
            return BatchReply(finished=True)
        if self.empty_replies:
            self.empty_replies -= 1
            return BatchReply()
        self.on_batch(request.version)
        return BatchReply(batch=self.make_batch(request.version))

    async def publish(self, request: PolicyVersion, /) -> Empty:
        self.said.append(request)
        return Empty()

    async def report(self, request: StepReport, /) -> Empty:
        self.said.append(request)
        return Empty()

    async def commit(self, request: CommitRequest, /) -> Empty:
        self.said.append(request)
        return Empty()

    def service(self) -> DataflowService:
        return cast("DataflowService", self)

    def told(self, kind: type) -> list[Any]:
        return [item for item in self.said if isinstance(item, kind)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    opened = MemoryStore(f"loop-{tmp_path.name}")
    yield opened
    opened.close()


@pytest.fixture
def fake(make_batch: Callable[..., TrainBatch]) -> Callable[[int], FakeDataflow]:
    return lambda steps: FakeDataflow(lambda version: make_batch(version, groups=2), steps)


async def test_order_of_things(
    spec: PolicySpec, store: MemoryStore, fake: Callable[[int], FakeDataflow], tmp_path: Path
) -> None:
    dataflow = fake(3)
    summary = await train(spec, CONFIG, dataflow.service(), store, export=tmp_path / "export")
    kinds = [type(item).__name__ for item in dataflow.said]
    step = ["PolicyVersion", "StepReport"]
    order = ["AttachRequest", "PolicyVersion", *step, *step, *step]
    assert [kind for kind in kinds if kind != "CommitRequest"] == order
    assert kinds.index("CommitRequest") > kinds.index("StepReport", 4)  # after version 2, which its checkpoint has
    published = dataflow.told(PolicyVersion)
    assert [item.version for item in published] == [0, 1, 2, 3]
    assert {item.weights for item in published} == {store.url}
    assert len({item.digest for item in published}) == 4
    assert [item.version for item in dataflow.told(StepReport)] == [1, 2, 3]
    assert [item.batch_id for item in dataflow.told(StepReport)] == ["b0.0", "b0.1", "b0.2"]
    assert dataflow.told(StepReport)[0].metrics["tokens"] > 0
    assert (summary.version, summary.started_at, summary.skipped) == (3, 0, 0)
    found = latest_checkpoint(Path(spec.directory))
    assert found is not None
    assert found.directory == summary.checkpoint
    assert found.meta.consumed == ("b0.0", "b0.1", "b0.2")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    masters = load_file(found.directory / "training-00000-of-00001.safetensors")
    assert torch.equal(model.model.norm.weight, masters["master.model.norm.weight"])


async def test_cancelled_in_a_step_it_ends_the_step_saves_and_a_resume_is_bit_identical(
    spec: PolicySpec, fake: Callable[[int], FakeDataflow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(CONFIG, checkpoint_every=0)
    other = msgspec.structs.replace(spec, directory=str(tmp_path / "uninterrupted"))
    stores = [MemoryStore(f"resume-{tmp_path.name}-{i}") for i in range(2)]
    await train(other, config, fake(4).service(), stores[0], export=tmp_path / "through")

    dataflow = fake(4)
    step = TorchBackend.step
    with anyio.CancelScope() as scope, monkeypatch.context() as patch:

        def cancelled_in_step(self: TorchBackend, batch: TrainBatch, /) -> Any:
            if batch.version == 1:
                anyio.from_thread.run_sync(scope.cancel)
                time.sleep(0.05)
            return step(self, batch)

        patch.setattr(TorchBackend, "step", cancelled_in_step)
        await train(spec, config, dataflow.service(), stores[1])
    assert scope.cancelled_caught
    found = latest_checkpoint(Path(spec.directory))
    assert found is not None
    assert found.meta.consumed == ("b0.0", "b0.1")
    assert [item.version for item in dataflow.told(StepReport)] in ([], [1])  # it was being published

    summary = await train(spec, config, dataflow.service(), stores[1], export=tmp_path / "resumed")
    attached = dataflow.told(AttachRequest)[-1]
    assert (attached.version, attached.consumed) == (2, ("b0.0", "b0.1"))
    assert dataflow.told(PolicyVersion)[-3].version == 2  # what was resumed is published again, as incarnation 2
    assert dataflow.told(PolicyVersion)[-3].incarnation == 2
    assert (summary.started_at, summary.version) == (2, 4)
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("through", "resumed"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    for opened in stores:
        opened.close()


async def test_the_event_loop_stays_free_during_a_step(
    spec: PolicySpec, store: MemoryStore, fake: Callable[[int], FakeDataflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, ticks = TorchBackend.step, 0

    def slow(self: TorchBackend, batch: TrainBatch, /) -> Any:
        time.sleep(0.2)
        return step(self, batch)

    monkeypatch.setattr(TorchBackend, "step", slow)
    async with anyio.create_task_group() as tasks:

        async def tick() -> None:
            nonlocal ticks
            while True:
                await anyio.sleep(0.01)
                ticks += 1

        tasks.start_soon(tick)
        await train(spec, CONFIG, fake(2).service(), store)
        tasks.cancel_scope.cancel()
    assert ticks > 10


async def test_a_failed_run_surfaces_its_cause_and_keeps_what_was_learned(
    spec: PolicySpec, store: MemoryStore, fake: Callable[[int], FakeDataflow]
) -> None:
    dataflow = fake(5)

    def fail(version: int) -> None:
        if version == 1:
            raise RunFailed("all groups dropped: 40 of 40 rewards are 0")

    dataflow.on_batch = fail
    with pytest.raises(RunFailed, match="40 of 40"):
        await train(spec, CONFIG, dataflow.service(), store)
    found = latest_checkpoint(Path(spec.directory))
    assert found is not None
    assert found.meta.version == 1


async def test_a_replaced_trainer_stops_with_the_cause(
    spec: PolicySpec, store: MemoryStore, fake: Callable[[int], FakeDataflow]
) -> None:
    dataflow = fake(5)
    dataflow.error = Fenced("incarnation 1 was replaced by 2")
    with pytest.raises(Fenced, match="replaced by 2"):
        await train(spec, CONFIG, dataflow.service(), store)
    dataflow.error, dataflow.incarnation = None, 7
    await train(spec, CONFIG, dataflow.service(), store)
    dataflow.incarnation = 2  # an old trainer that somehow attached: the weight store knows better
    with pytest.raises(StaleIncarnation):
        await train(spec, CONFIG, dataflow.service(), store)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": 3}, "is at version 0: batch b0.0 was cut at 3"), ({"model_id": "q"}, "is for 'q'")],
)
async def test_a_bad_batch_stops_the_loop(
    spec: PolicySpec,
    store: MemoryStore,
    make_batch: Callable[..., TrainBatch],
    change: dict[str, Any],
    message: str,
) -> None:
    dataflow = FakeDataflow(lambda version: msgspec.structs.replace(make_batch(version), **change), 2)
    with pytest.raises(BadBatch, match=message):
        await train(spec, CONFIG, dataflow.service(), store)
    assert not dataflow.told(StepReport)


async def test_a_batch_is_not_trained_twice(
    spec: PolicySpec, store: MemoryStore, make_batch: Callable[..., TrainBatch]
) -> None:
    same = make_batch(0, groups=2)
    dataflow = FakeDataflow(lambda version: msgspec.structs.replace(same, version=version), 2)
    with pytest.raises(BadBatch, match="trained already"):
        await train(spec, CONFIG, dataflow.service(), store)


async def test_not_resuming_where_something_is_refuses(
    spec: PolicySpec, store: MemoryStore, fake: Callable[[int], FakeDataflow]
) -> None:
    await train(spec, CONFIG, fake(1).service(), store)
    with pytest.raises(FileExistsError, match="version-00000001"):
        await train(spec, CONFIG, fake(1).service(), store, resume=False)


async def test_an_unknown_backend_ends_it_before_anything_is_said(
    spec: PolicySpec, store: MemoryStore, fake: Callable[[int], FakeDataflow]
) -> None:
    dataflow = fake(1)
    with pytest.raises(UnknownBackend):
        await train(spec, msgspec.structs.replace(CONFIG, backend="torhc"), dataflow.service(), store)
    assert not dataflow.said


async def test_backends_are_constructed_one_at_a_time(
    spec: PolicySpec, fake: Callable[[int], FakeDataflow], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Loading a model sets torch's default dtype for every thread: another backend's tensors would have it."""
    inside, most = 0, 0

    class Slow(TorchBackend):
        def __init__(self, spec: PolicySpec, config: TrainerConfig, /) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.05)
            super().__init__(spec, config)
            inside -= 1

    monkeypatch.setattr("astraflow.trainer.loop.load_backend", lambda name: Slow)
    stores = [MemoryStore(f"one-{tmp_path.name}-{i}") for i in range(3)]
    async with anyio.create_task_group() as tasks:
        for i, store in enumerate(stores):
            own = msgspec.structs.replace(spec, directory=str(tmp_path / str(i)))
            tasks.start_soon(train, own, CONFIG, fake(1).service(), store)
    assert most == 1
    for store in stores:
        store.close()


async def test_the_next_batch_comes_the_last_weights_go_and_a_checkpoint_is_written_while_a_step_runs(
    spec: PolicySpec, store: MemoryStore, fake: Callable[[int], FakeDataflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 does not end before batch 3 was served, version 2 announced and checkpoint 2 committed."""
    dataflow = fake(5)
    seen: list[int] = []
    dataflow.on_batch = seen.append
    step = TorchBackend.step

    def patient(self: TorchBackend, batch: TrainBatch, /) -> Any:
        end = time.monotonic() + 20
        while batch.version == 2 and time.monotonic() < end:
            announced = dataflow.told(PolicyVersion)[-1].version
            committed = [item.version for item in dataflow.told(CommitRequest)]
            if 3 in seen and announced == 2 and committed == [2]:
                self.overlapped = True  # type: ignore[attr-defined]
                break
            time.sleep(0.01)
        else:
            assert batch.version != 2, "nothing happened beside the step"
        return step(self, batch)

    monkeypatch.setattr(TorchBackend, "step", patient)
    summary = await train(spec, CONFIG, dataflow.service(), store)
    assert summary.version == 5
    assert seen == [0, 1, 2, 3, 4]  # one ahead, never more
    versions = [item.version for item in dataflow.told(PolicyVersion)]
    assert versions == [0, 1, 2, 3, 4, 5]


async def test_a_publication_that_fails_ends_training_with_its_cause(
    spec: PolicySpec, store: MemoryStore, fake: Callable[[int], FakeDataflow]
) -> None:
    dataflow = fake(5)
    publish = dataflow.publish

    async def refuse(request: PolicyVersion, /) -> Empty:
        if request.version == 2:
            raise Fenced("incarnation 1 was replaced by 2")
        return await publish(request)

    dataflow.publish = refuse  # type: ignore[method-assign]
    with pytest.raises(Fenced, match="replaced by 2"):
        await train(spec, CONFIG, dataflow.service(), store)
    assert [item.version for item in dataflow.told(PolicyVersion)] == [0, 1]
    assert not dataflow.told(CommitRequest)


async def test_published_weights_are_those_of_their_version_whatever_the_next_step_does(
    spec: PolicySpec, fake: Callable[[int], FakeDataflow], tmp_path: Path
) -> None:
    """Digests of every version equal those of a loop that does one thing after the other."""
    digests = []
    for name, slow in (("beside", 0.0), ("in turn", 0.3)):
        dataflow, store = fake(4), MemoryStore(f"{name}-{tmp_path.name}")
        own = msgspec.structs.replace(spec, directory=str(tmp_path / name))
        dataflow.on_batch = lambda version, slow=slow: time.sleep(slow)  # type: ignore[misc]
        await train(own, CONFIG, dataflow.service(), store)
        digests.append([item.digest for item in dataflow.told(PolicyVersion)])
        store.close()
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 5
