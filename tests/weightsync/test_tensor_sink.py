from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.weightsync import CorruptVersion, MemoryStore, Publisher, Puller, SinkState, TensorSink
from astraflow.weightsync.tensor_sink import DeviceTarget

Model = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def bf16(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(80, 64, generator=generator).bfloat16(),
        "norm": torch.ones(64, dtype=torch.bfloat16),
        "scale": torch.tensor(2.0),
        "bytes": torch.zeros(33, dtype=torch.float8_e4m3fn),
        "none": torch.zeros(0, 5, dtype=torch.bfloat16),
    }


def step(model: Model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = model["embed"].view(torch.int16)
    bits[torch.rand(bits.shape, generator=generator) < 0.02] += 1
    model["embed"][0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    model["scale"] += 1


def clone(model: Model) -> Model:
    return {name: tensor.clone() for name, tensor in model.items()}


def equal(one: Model, other: Model) -> bool:
    return all(
        torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)) for name in one
    )


@pytest.fixture(params=["host", "device"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`device`: the path of an accelerator's tensors, here on tensors in CPU memory."""
    if request.param == "device":
        monkeypatch.setattr("astraflow.weightsync.tensor_sink._target", lambda name, tensor: DeviceTarget(tensor))
    return str(request.param)


@pytest.mark.usefixtures("kind", "small_frames")
async def test_bf16_tensors_in_place(memory: MemoryStore) -> None:
    model = bf16()
    live = {name: torch.nn.Parameter(torch.zeros_like(tensor), False) for name, tensor in model.items()}
    live["embed"].requires_grad_()
    addresses = [tensor.data_ptr() for tensor in live.values()]
    publisher, puller = Publisher(memory, stream="s", incarnation=1), Puller(memory, TensorSink(live))
    for version in range(4):
        await publisher.publish(model, version)
        report = await puller.pull()
        assert report is not None
        assert report.kind == ("delta" if version else "full")
        assert equal(dict(live), model)
        step(model, version)
    assert addresses == [tensor.data_ptr() for tensor in live.values()]


@pytest.mark.usefixtures("kind", "small_frames")
async def test_a_commit_that_fails_half_way_puts_the_old_bytes_back(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bf16()
    live = clone(model)
    sink = TensorSink(live)
    publisher, puller = Publisher(memory, stream="s", incarnation=1), Puller(memory, sink)
    await publisher.publish(model, 0)
    await puller.pull()
    old, state = clone(live), sink.state()
    step(model, 1)
    await publisher.publish(model, 1)
    staged = await puller.stage()
    assert staged is not None
    *_, (last_key, last) = ((key, change) for key, changes in sink._changes.items() for change in changes.items())
    sink._changes[last_key][last[0]] = last[1]._replace(write=lambda: (_ for _ in ()).throw(RuntimeError("device")))
    with pytest.raises(RuntimeError, match="device"):
        staged.commit()
    assert equal(live, old)
    assert sink.state() == state
    assert await puller.pull() is not None
    assert equal(live, model)


@pytest.mark.usefixtures("kind")
async def test_what_is_staged_shows_when_it_is_committed() -> None:
    live = np.arange(10, dtype=np.uint16)
    sink = TensorSink({"t": torch.from_numpy(live.view(np.int16))})
    [spec] = sink._specs.values()
    sink.begin([spec])
    sink.stage_sparse("t", 4, 2, np.array([0, 3]), np.array([100, 200], np.uint16).view(np.uint8))
    sink.stage_dense("t", 0, np.array([7, 7], np.uint16).view(np.uint8))
    room = np.zeros(20, np.uint8)
    assert sink.read("t", 0, room).view(np.uint16).tolist() == live.tolist() == list(range(10))
    sink.commit(SinkState(digest="x", version=1))
    assert live.tolist() == [7, 7, 100, 3, 4, 200, 6, 7, 8, 9]
    assert sink.read("t", 4, room[:6]).view(np.uint16).tolist() == [100, 3, 4]


async def test_a_full_pull_of_the_same_weights_stages_nothing(memory: MemoryStore) -> None:
    model = bf16()
    sink = TensorSink(clone(model))
    await Publisher(memory, stream="s", incarnation=1).publish(model, 0)
    staged = await Puller(memory, sink).stage()
    assert staged is not None
    assert not sink._changes
    assert staged.commit().kind == "full"
    assert sink.state().version == 0


@pytest.mark.usefixtures("kind", "small_frames")
@pytest.mark.parametrize("published", [("embed",), ("head",), ("embed", "head")])
async def test_tied_weights(memory: MemoryStore, published: tuple[str, ...]) -> None:
    source = bf16()
    names = [name for name in source if name != "embed"]

    def model() -> Model:
        return {**{name: source[name] for name in names}, **dict.fromkeys(published, source["embed"])}

    live = bf16(1)
    live["head"] = live["embed"]
    publisher, puller = Publisher(memory, stream="s", incarnation=1), Puller(memory, TensorSink(live))
    for version in range(3):
        await publisher.publish(model(), version)
        await puller.pull()
        assert equal({**live, "head": live["embed"]}, {**source, "head": source["embed"]})
        step(source, version)


@pytest.mark.usefixtures("kind", "small_frames")
@pytest.mark.parametrize("where", ["everywhere", "one frame"])
async def test_tied_here_but_published_apart_is_refused(memory: MemoryStore, where: str) -> None:
    live = {"embed": torch.zeros(80, 64)}
    live["head"] = live["embed"]
    model = {"embed": torch.zeros(80, 64), "head": torch.zeros(80, 64)}
    (model["head"] if where == "everywhere" else model["head"][70:])[:] = 1
    await Publisher(memory, stream="s", incarnation=1).publish(model, 0)
    with pytest.raises(CorruptVersion, match="share"):
        await Puller(memory, TensorSink(live)).pull()
    assert not live["embed"].any()


def without(model: Model, name: str) -> Model:
    return {key: tensor for key, tensor in model.items() if key != name}


@pytest.mark.parametrize(
    ("alter", "told"),
    [
        (lambda model: without(model, "norm"), "not here: norm"),
        (lambda model: {**model, "more": torch.zeros(1)}, "not published: more"),
        (lambda model: {**model, "norm": model["norm"].float()}, "of another dtype or shape here: norm"),
        (lambda model: {**model, "embed": model["embed"].T.contiguous()}, "of another dtype or shape here: embed"),
    ],
)
async def test_tensors_that_do_not_fit_are_named(
    memory: MemoryStore, alter: Callable[[Model], dict[str, Any]], told: str
) -> None:
    model = bf16()
    await Publisher(memory, stream="s", incarnation=1).publish(model, 0)
    live = alter(clone(model))
    before = clone(live)
    with pytest.raises(CorruptVersion, match=told):
        await Puller(memory, TensorSink(live)).pull()
    assert equal(live, before)


def test_tensors_that_cannot_be_written_in_place() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        TensorSink({"t": torch.zeros(4, 4).T})
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        TensorSink({"t": frozen})


async def test_a_publisher_takes_any_strides(memory: MemoryStore) -> None:
    wide = torch.arange(64, dtype=torch.bfloat16).reshape(8, 8)
    live = {"t": torch.zeros(8, 8, dtype=torch.bfloat16), "n": np.zeros((3, 2), np.float32)}
    narrow = np.arange(6, dtype=np.float32).reshape(2, 3)
    publisher, puller = Publisher(memory, stream="s", incarnation=1), Puller(memory, TensorSink(live))
    for version in range(3):
        await publisher.publish({"t": wide.T, "n": narrow.T}, version)
        await puller.pull()
        assert torch.equal(torch.as_tensor(live["t"]), wide.T)
        assert np.array_equal(np.asarray(live["n"]), narrow.T)
        wide += 1
        narrow += 1
