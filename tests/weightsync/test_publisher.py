"""What a publisher takes, what it writes, and how it goes on after a restart or a failure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from astraflow.weightsync import (
    DirectoryStore,
    MemoryStore,
    Publisher,
    Puller,
    SafetensorsSink,
    StaleIncarnation,
    Store,
    TensorSink,
)
from astraflow.weightsync.manifest import HEAD, decode_head

Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays, int], None]
Copy = Callable[[Arrays], Arrays]
Same = Callable[[Arrays, Arrays], bool]
Pulled = Callable[[Store, Arrays], Awaitable[Arrays]]


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=100,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).bfloat16()


async def test_an_anchor_is_a_file_that_other_tools_open(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = tiny_llama()
    publisher = Publisher(DirectoryStore(tmp_path), stream="s", incarnation=1, anchor_every=2)
    await publisher.publish(model.state_dict(), 0)
    for version in (1, 2):
        with torch.no_grad():
            model.lm_head.weight[version] *= 1.5
        await publisher.publish(model.state_dict(), version)
    anchor = tmp_path / "1" / "v" / "2"
    loaded = safetensors.torch.load_file(anchor / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    model.config.save_pretrained(tmp_path / "model")
    model.generation_config.save_pretrained(tmp_path / "model")
    shutil.copy(anchor / "model.safetensors", tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_file_or_a_hugging_face_directory_is_published(
    store: Store,
    tmp_path: Path,
    small_frames: int,
    model: Arrays,
    change: Change,
    same: Same,
    shards: int,
    pulled: Pulled,
) -> None:
    path = tmp_path / "model"
    path.mkdir()

    def save() -> Path:
        if shards == 1:
            safetensors.numpy.save_file(model, path / "model.safetensors")
            return path / "model.safetensors"
        names = {f"model-{shard}.safetensors": list(model)[shard::shards] for shard in range(shards)}
        for file, held in names.items():
            safetensors.numpy.save_file({name: model[name] for name in held}, path / file)
        index = {"weight_map": {name: file for file, held in names.items() for name in held}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path

    publisher = Publisher(store, stream="s", incarnation=1)
    first = await publisher.publish(save(), 0)
    assert same(await pulled(store, model), model)
    change(model, 1)
    second = await publisher.publish(str(save()), 1)
    assert not second.anchor
    assert same(await pulled(store, model), model)
    third = await publisher.publish(model, 2)  # the same tensors, from memory
    assert (third.digest, third.density) == (second.digest, 0.0)
    assert third.digest != first.digest
    if shards == 1:
        assert (await publisher.publish(path, 3)).digest == second.digest


def header(fields: object, body: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + body


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"\xff\xff",
        header({"t": TENSOR}),
        header({"t": {**TENSOR, "dtype": "F3"}}, bytes(8)),
        header({"t": {**TENSOR, "shape": [3]}}, bytes(8)),
        header({"t": {**TENSOR, "shape": [-1, -2]}}, bytes(8)),
        header({"t": {**TENSOR, "data_offsets": [8, 0]}}, bytes(8)),
        header({"t": {**TENSOR, "data_offsets": [-8, 0]}}, bytes(8)),
        header({"t": {}}, bytes(8)),
    ],
)
async def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    store = DirectoryStore(tmp_path / "store")
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        await Publisher(store, stream="s", incarnation=1).publish(path, 0)
    assert not (tmp_path / "store" / "HEAD").exists()


async def test_a_directory_whose_index_leads_elsewhere_is_refused(
    memory: MemoryStore, tmp_path: Path, model: Arrays
) -> None:
    safetensors.numpy.save_file(model, tmp_path / "secret.safetensors")
    inside = tmp_path / "model"
    inside.mkdir()
    publisher = Publisher(memory, stream="s", incarnation=1)
    index: Any
    for index in ({"weight_map": {"t": "../secret.safetensors"}}, {"weight_map": {"t": 3}}, {}, []):
        (inside / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="index"):
            await publisher.publish(inside, 0)
    with pytest.raises(FileNotFoundError):
        await publisher.publish(tmp_path / "nowhere", 0)
    with pytest.raises(TypeError, match="list"):
        await publisher.publish([1], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(7, 300), (1, 1, 50, 60), (3000,), (2, 3, 4, 5, 6), (0, 9)])
async def test_tensors_that_are_not_contiguous(
    store: Store, small_frames: int, same: Same, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(*shape, 2)).astype(np.float32)
    strided = {"even": wide[..., 0], "odd": wide[..., 1].T, "one": np.ones(1, np.float32)}
    both: dict[str, Any] = {**strided, "torch": torch.from_numpy(wide)[..., 1].permute(*range(len(shape) - 1, -1, -1))}
    publisher = Publisher(store, stream="s", incarnation=1)
    for version in range(3):
        await publisher.publish(both, version)
        live = {name: np.zeros(both[name].shape, np.float32) for name in both}
        assert await Puller(store, TensorSink(live)).pull() is not None
        assert all(np.array_equal(live[name], np.asarray(both[name])) for name in both)
        wide[..., version % 2] += 1


async def test_a_publisher_that_starts_again_goes_on_with_a_delta(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, same: Same, pulled: Pulled
) -> None:
    """So that a trainer's restart costs no full pull."""
    first = Publisher(store, stream="s", incarnation=1)
    puller = Puller(store, SafetensorsSink(tmp_path / "served"))
    for version in range(3):
        change(model, version)
        await first.publish(model, version)
    await puller.pull()
    change(model, 9)
    second = Publisher(store, stream="s", incarnation=2)
    report = await second.publish(model, 1)
    assert report.anchor
    assert 0 < report.delta_bytes < report.dense_bytes / 4
    got = await puller.pull()
    assert got is not None
    assert (got.kind, got.incarnation, got.version, got.delta_bytes) == ("delta", 2, 1, report.delta_bytes)
    assert same(safetensors.numpy.load_file(tmp_path / "served" / "current" / "model.safetensors"), model)
    assert same(await pulled(store, model), model)
    change(model, 10)
    assert not (await second.publish(model, 2)).anchor


@pytest.mark.parametrize("damage", ["anchor", "manifest", "delta", "layout"])
async def test_where_the_last_version_cannot_be_read_back_an_anchor_is_written(
    store: Store, small_frames: int, model: Arrays, change: Change, same: Same, damage: str, pulled: Pulled
) -> None:
    first = Publisher(store, stream="s", incarnation=1)
    for version in range(2):
        change(model, version)
        await first.publish(model, version)
    names = {"anchor": "1/v/0/model.safetensors", "manifest": "1/v/1/manifest.msgpack", "delta": "1/v/1/delta.ws"}
    if damage == "layout":
        model["extra"] = np.ones(5, np.float32)
    else:
        data = bytearray(store.read(names[damage]))
        data[-1] ^= 1
        store.put(names[damage], [bytes(data)])
    report = await Publisher(store, stream="s", incarnation=2).publish(model, 2)
    assert (report.anchor, report.delta_bytes, report.density) == (True, 0, 1.0)
    assert same(await pulled(store, model), model)


class Unsure(MemoryStore):
    """A store whose `swap` is done and then fails, or says that it was not done, as one that tries twice may."""

    how = ""
    cut = False

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        assert super().swap(key, old, new)
        self.cut = self.how == "lost"
        if self.how in ("error", "lost"):
            raise TimeoutError("no answer")
        return self.how != "twice"

    def read(self, key: str, offset: int = 0, length: int | None = None) -> memoryview:
        if self.cut:
            raise ConnectionError("no way to the store")
        return super().read(key, offset, length)


@pytest.fixture
def unsure() -> Iterator[Unsure]:
    store = Unsure("unsure")
    yield store
    store.close()


@pytest.mark.parametrize("how", ["error", "twice"])
async def test_a_swap_that_was_done_though_it_failed_counts(
    unsure: Unsure, small_frames: int, model: Arrays, change: Change, same: Same, how: str, pulled: Pulled
) -> None:
    publisher = Publisher(unsure, stream="s", incarnation=1)
    await publisher.publish(model, 0)
    unsure.how = how
    change(model, 1)
    assert (await publisher.publish(model, 1)).version == 1
    unsure.how = ""
    change(model, 2)
    assert not (await publisher.publish(model, 2)).anchor
    assert same(await pulled(unsure, model), model)


async def test_a_swap_that_cannot_be_told_is_told_by_the_next_publish(
    unsure: Unsure, small_frames: int, model: Arrays, change: Change, same: Same, pulled: Pulled
) -> None:
    publisher = Publisher(unsure, stream="s", incarnation=1)
    await publisher.publish(model, 0)
    unsure.how = "lost"
    change(model, 1)
    with pytest.raises(ConnectionError):
        await publisher.publish(model, 1)
    unsure.how, unsure.cut = "", False
    change(model, 2)
    report = await publisher.publish(model, 2)
    assert report.delta_bytes > 0
    assert same(await pulled(unsure, model), model)
    assert [ref.version for ref in decode_head(unsure.read(HEAD)).versions] == [2, 1, 0]


async def test_two_publishers_that_start_at_once_are_told_apart(store: Store, model: Arrays) -> None:
    await Publisher(store, stream="s", incarnation=1).publish(model, 0)
    one, two = (Publisher(store, stream="s", incarnation=2) for _ in range(2))
    await one.publish(model, 1)
    await two.publish(model, 2)
    with pytest.raises(StaleIncarnation):
        await one.publish(model, 3)
