"""Sharded publishing by real processes: torch.distributed on gloo, FSDP2's parameters, a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from astraflow.weightsync import DirectoryStore, Publisher, Puller, SafetensorsSink, shards_of
from astraflow.weightsync.manifest import HEAD, decode_head

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(101, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 97) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(2))     # fewer rows than some worlds have ranks
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(64, 101, bias=False)
        self.head.weight = self.embed.weight        # tied

def make():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Model()

def step(model, version):
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            whole = torch.rand(parameter.shape, generator=generator) < 0.02
            if hasattr(parameter, "to_local"):
                rows = -(-parameter.shape[0] // parameter.device_mesh.size())
                whole = whole[parameter.device_mesh.get_rank() * rows:][:rows]
            local[whole] *= 1.01
"""

RANKS = (
    MODEL
    + """
import json, os, signal, sys
from datetime import timedelta
from types import SimpleNamespace
import anyio
import structlog
import torch._dynamo                                # which FSDP2 imports when it is used: once, before the forks
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from astraflow.weightsync import DirectoryStore, RankLost, ShardedPublisher, TorchChannel, shards_of
import astraflow.weightsync.sharded as sharded, astraflow.weightsync.sharded_work as work

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
sharded.FRAME_BYTES = work.FRAME_BYTES = 4096

class Dying(DirectoryStore):
    point = ""

    def maybe(self, what):
        if what == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self, key, chunks):
        super().put(key, chunks)
        self.maybe(key.rpartition("/")[2].partition("-")[0].partition(".")[0])

    def put_at(self, key, size, pieces):
        super().put_at(key, size, pieces)
        self.maybe("anchor")

    def swap(self, key, old, new):
        self.maybe("swap")
        moved = super().swap(key, old, new)
        self.maybe("swapped")
        return moved

    def read(self, key, offset=0, length=None):
        if "delta" in key:
            self.maybe("advance")
        return super().read(key, offset, length)

async def publish(run, rank, model, rows):
    store = Dying(run.directory + "/store")
    publisher = ShardedPublisher(store, TorchChannel(timeout_s=30), stream="s", incarnation=run.incarnation,
                                 anchor_every=4)
    for version in range(run.first, run.last):
        store.point = run.point if rank == run.victim and version == run.last - 1 else ""
        report = await publisher.publish(shards_of(model, torch.bfloat16), version)
        yield [version, report.digest, report.anchor, rows]
        step(model, version)

async def main(run, rank):
    model = make()
    for version in range(run.first):
        step(model, version)
    mesh = init_device_mesh("cpu", (run.world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = [piece.data.shape[:1] for piece in shards_of(model)]
    with open(f"{run.directory}/said-{run.incarnation}-{rank}", "w") as said:
        try:
            async for line in publish(run, rank, model, rows):
                print(json.dumps(line), file=said, flush=True)
        except RankLost:
            os._exit(3)

def child(run, rank):
    dist.init_process_group("gloo", init_method=f"file://{run.directory}/meeting-{run.incarnation}", rank=rank,
                            world_size=run.world_size, timeout=timedelta(seconds=60))
    anyio.run(main, run, rank)
    os._exit(0)

for run in json.loads(sys.argv[1]):
    run = SimpleNamespace(**run)
    os.makedirs(run.directory, exist_ok=True)
    children = [os.fork() or child(run, rank) for rank in range(run.world_size)]
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""
)


def run(*runs: dict[str, Any]) -> list[list[int]]:
    """One process forks the ranks of one run after the other; their exit codes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", RANKS, json.dumps([{"victim": -1, "point": "", **each} for each in runs])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    codes = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(codes) == len(runs)
    return codes


def said(directory: Path, rank: int, incarnation: int = 1) -> list[Any]:
    return [json.loads(line) for line in (directory / f"said-{incarnation}-{rank}").read_text().splitlines()]


def alone(versions: int) -> list[dict[str, torch.Tensor]]:
    """What the ranks publish, made in one process."""
    names: dict[str, object] = {}
    exec(MODEL, names)
    model, result = names["make"](), []  # type: ignore[operator]
    for version in range(versions):
        result.append({piece.name: piece.data.clone() for piece in shards_of(model, torch.bfloat16)})
        names["step"](model, version)  # type: ignore[operator]
    return result


async def pulled(tmp: Path) -> dict[str, torch.Tensor]:
    await Puller(DirectoryStore(tmp / "store"), SafetensorsSink(tmp / "served")).pull()
    tensors: dict[str, torch.Tensor] = load_file(tmp / "served" / "current" / "model.safetensors")
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
async def test_fsdp2_on_gloo_publishes_what_one_process_does(tmp_path: Path, small_frames: int) -> None:
    """With 1, 2 and 3 ranks, whose rows are uneven. The tied head is published once, under the embedding's name."""
    versions, worlds = 6, (1, 2, 3)
    where = {world_size: tmp_path / str(world_size) for world_size in worlds}
    runs: list[dict[str, Any]] = [
        {"directory": str(where[world_size]), "world_size": world_size, "incarnation": 1, "first": 0, "last": versions}
        for world_size in worlds
    ]
    assert run(*runs) == [[0] * world_size for world_size in worlds]
    right = alone(versions)
    assert "head.weight" not in right[0]
    publisher = Publisher(DirectoryStore(tmp_path / "alone"), stream="s", incarnation=1)
    digests = [(await publisher.publish(right[version], version)).digest for version in range(versions)]
    for world_size in worlds:
        for rank in range(world_size):
            lines = said(where[world_size], rank)
            assert [line[1] for line in lines] == digests
            assert [line[2] for line in lines] == [True, False, False, False, True, False]
        rows = {str(said(where[world_size], rank)[0][3]) for rank in range(world_size)}
        assert len(rows) == min(world_size, 2)  # the last one has fewer, or none
        assert same(await pulled(where[world_size]), right[-1])


@pytest.mark.slow
async def test_a_rank_that_is_killed_leaves_the_old_version_or_the_new_one_and_the_next_ranks_go_on(
    tmp_path: Path,
) -> None:
    points = [
        (1, "delta", 3),
        (1, "anchor", 5),
        (0, "manifest", 3),
        (0, "swap", 3),
        (0, "swapped", 3),
        (1, "advance", 3),
    ]
    runs: list[dict[str, Any]] = []
    for victim, point, last in points:
        both = {"directory": str(tmp_path / point), "world_size": 2}
        runs.append({**both, "incarnation": 1, "first": 0, "last": last, "victim": victim, "point": point})
        runs.append({**both, "incarnation": 2, "first": last - 1, "last": last + 1})
    codes = run(*runs)
    right = alone(8)
    for (victim, point, last), killed, again in zip(points, codes[::2], codes[1::2], strict=True):
        assert killed[victim] == -signal.SIGKILL
        assert killed[1 - victim] == (0 if point == "advance" else 3), point
        assert again == [0, 0]
        store = DirectoryStore(tmp_path / point / "store")
        head = decode_head(store.read(HEAD))
        told = [(ref.incarnation, ref.version) for ref in head.versions]
        new = point in ("swapped", "advance")
        assert ((1, last - 1) in told) == new, point
        assert same(await pulled(tmp_path / point), right[last])
        assert {key.rpartition("/")[0] for key in store.list("") if "/v/" in key} == {f"{i}/v/{v}" for i, v in told}
