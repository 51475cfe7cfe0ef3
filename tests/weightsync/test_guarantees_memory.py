"""Guarantee 7, peak memory: a publisher holds one copy of the model and a few frames; a pull into a directory a few
frames; a pull into live tensors what it stages. Measured in a process with a model of 300 MB."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MODEL_MB = 300
FRAMES_MB = 200
"""Two threads and who writes: at most six frames of 16 MiB under way, and what encoding one takes besides."""

MEASURE = """
import gc, json, sys, threading
from pathlib import Path
import anyio
import numpy as np
import structlog
import astraflow.weightsync.workers
from astraflow.weightsync import DirectoryStore, Publisher, Puller, SafetensorsSink, TensorSink

astraflow.weightsync.workers.WORKERS = 2
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
what, root, values = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) * 500_000
figures = {}

def held():
    # Memory of its own, in MB: not the pages of files that are mapped.
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1000

async def measure(name, work):
    gc.collect()
    done, before = threading.Event(), held()
    peak = before
    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, held())
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        await work()
    finally:
        done.set()
        watcher.join()
    figures[name] = [round(peak - before), round(held() - before)]

def step(model, share):
    rng = np.random.default_rng(0)
    for tensor in model.values():
        flat = tensor.view(np.uint16)
        for start in range(0, flat.size, 1 << 20):
            part = flat[start : start + (1 << 20)]
            at = slice(None) if share == 1 else rng.integers(0, part.size, int(share * part.size))
            part[at] += 1

def make():
    block = np.random.default_rng(0).normal(scale=0.02, size=1 << 20).astype(np.float16)
    return {f"t{n}": np.resize(block, size) for n, size in enumerate([values // 2, values // 4, *[values // 80] * 20])}

async def publisher():
    model, store = make(), DirectoryStore(root / "store")
    publisher = Publisher(store, stream="s", incarnation=1)
    await measure("publish an anchor", lambda: publisher.publish(model, 0))
    for version, share in ((1, 0.01), (2, 1)):
        step(model, share)
        await measure(f"publish a delta of {share:.0%}", lambda: publisher.publish(model, version))
    del publisher
    again = Publisher(store, stream="s", incarnation=2)
    await measure("publish after a restart", lambda: again.publish(model, 0))

async def sinks():
    model, store = make(), DirectoryStore(root / "store")
    publisher = Publisher(store, stream="s", incarnation=1)
    live = {name: np.ones_like(tensor) for name, tensor in model.items()}
    pullers = {"files": Puller(store, SafetensorsSink(root / "served")), "tensors": Puller(store, TensorSink(live))}
    for version, share in ((0, 0), (1, 0.01)):
        step(model, share)
        await publisher.publish(model, version)
        for name, puller in pullers.items():
            await measure(f"pull {'a delta of 1%' if version else 'an anchor'} into {name}", puller.pull)
    assert all(live[name].tobytes() == model[name].tobytes() for name in model)

anyio.run({"publisher": publisher, "sinks": sinks}[what])
print(json.dumps(figures))
"""


@pytest.fixture
def shared_memory(tmp_path: Path) -> Iterator[Path]:
    """Where a gigabyte is written fast; its pages are not those of the process."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield Path(directory)


def measure(what: str, directory: Path) -> dict[str, tuple[int, int]]:
    """Peak and rest, MB above what was there before."""
    command = [sys.executable, "-c", MEASURE, what, str(directory), str(MODEL_MB)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    figures: dict[str, tuple[int, int]] = json.loads(ended.stdout)
    print(json.dumps(figures))
    return figures


@pytest.mark.slow
def test_7_a_publisher_holds_one_copy_and_a_few_frames(shared_memory: Path) -> None:
    figures = measure("publisher", shared_memory)
    peaks = {name: peak for name, (peak, _) in figures.items()}
    assert figures["publish an anchor"][1] > 0.9 * MODEL_MB  # the snapshot
    assert peaks["publish an anchor"] < MODEL_MB + FRAMES_MB
    assert peaks["publish a delta of 1%"] < FRAMES_MB
    assert (
        peaks["publish a delta of 100%"] < 4 * FRAMES_MB
    )  # positions of eight million changes a frame, in two threads
    assert peaks["publish after a restart"] < MODEL_MB + FRAMES_MB


@pytest.mark.slow
def test_7_a_pull_holds_a_few_frames_and_what_it_stages(shared_memory: Path) -> None:
    peaks = {name: peak for name, (peak, _) in measure("sinks", shared_memory).items()}
    assert peaks["pull an anchor into files"] < FRAMES_MB
    assert peaks["pull a delta of 1% into files"] < FRAMES_MB
    assert peaks["pull a delta of 1% into tensors"] < FRAMES_MB
    assert peaks["pull an anchor into tensors"] < 2 * MODEL_MB + FRAMES_MB  # all of it, and what it replaces
