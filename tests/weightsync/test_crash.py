"""SIGKILL at any point of a pull or a publish: what is served is whole, and the next one needs no full pull.

A process forks a child for every point. The child's calls of `os` are counted, and it dies before, in the middle of or
after the one it is told to; a write dies half written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from astraflow.weightsync import DirectoryStore, Publisher, Puller, SafetensorsSink

Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays, int], None]
Same = Callable[[Arrays, Arrays], bool]

POINTS = 54

HARNESS = """
import json, os, shutil, signal, sys
import anyio
import structlog
from safetensors.numpy import load_file
import astraflow.weightsync.workers, astraflow.weightsync.publisher
from astraflow.weightsync import Publisher, Puller, SafetensorsSink, open_store

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
astraflow.weightsync.workers.WORKERS = 1          # the same calls in the same order each time
astraflow.weightsync.publisher.FRAME_BYTES = 4096
CALLS = ("open", "close", "pwrite", "preadv", "pread", "fsync", "fdatasync", "truncate", "ftruncate", "rename",
         "replace", "unlink", "remove", "mkdir", "rmdir", "symlink", "link", "sendfile", "copy_file_range", "utime")
real = {name: getattr(os, name) for name in CALLS}

def die_at(step):
    # Step 3n: before the n-th call, 3n + 1: in the middle of it, 3n + 2: after it. -1: count only.
    made = 0
    def wrap(name):
        def call(*arguments, **options):
            nonlocal made
            number, made = made, made + 1
            if step >= 0 and number == step // 3:
                if step % 3 == 1 and name == "pwrite":
                    real["pwrite"](arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2], arguments[2])
                if step % 3 == 2:
                    real[name](*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*arguments, **options)
        return call
    for name in CALLS:
        setattr(os, name, wrap(name))
    return lambda: made

async def publish(url, incarnation, path, version):
    publisher = Publisher(open_store(url), stream="s", incarnation=incarnation, anchor_every=2)
    await publisher.publish(path, version)

async def pull(url, directory):
    return (await Puller(open_store(url), SafetensorsSink(directory)).pull()).kind

def child(job, step):
    counted = die_at(step)
    anyio.run(job)
    for name, function in real.items():
        setattr(os, name, function)
    if step < 0:
        print(counted(), flush=True)
    os._exit(0)

def count(job):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(writing, 1)
        child(job, -1)
    os.close(writing)
    with os.fdopen(reading) as told:
        number = int(told.read())
    os.wait()
    return number

def each_point(job, points, before, after):
    before()
    steps = 3 * count(job)
    assert steps >= points, steps
    for point in range(points):
        step = point * steps // points
        before()
        if os.fork() == 0:
            child(job, step)
        ended = os.waitstatus_to_exitcode(os.wait()[1])
        print(json.dumps([step, ended, after()]), flush=True)
"""

PULLS = (
    HARNESS
    + """
url, start, directory, points = sys.argv[1:]

def before():
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(start, directory, symlinks=True)

def after():
    served = load_file(directory + "/current/model.safetensors")["bias"].item()
    recovered = SafetensorsSink(directory).state().version
    kind = anyio.run(pull, url, directory) if recovered < 2 else None
    right = load_file(directory + "/current/model.safetensors")
    return [served, recovered, kind, right["bias"].item(), sorted(os.listdir(directory))]

each_point(lambda: pull(url, directory), int(points), before, after)
"""
)

PUBLISHES = (
    HARNESS
    + """
start, directory, points = sys.argv[1:4]
models = sys.argv[4:]
url = "file://" + directory

def before():
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(start, directory)

def after():
    from astraflow.weightsync.manifest import decode_head
    read = lambda: decode_head(open_store(url).read("HEAD"))
    head = read()
    shutil.rmtree(directory + "-served", ignore_errors=True)
    anyio.run(pull, url, directory + "-served")
    served = load_file(directory + "-served/current/model.safetensors")["bias"].item()
    anyio.run(publish, url, 2, models[1], 3)
    kind = anyio.run(pull, url, directory + "-served")
    right = load_file(directory + "-served/current/model.safetensors")["bias"].item()
    named = {f"{ref.incarnation}/v/{ref.version}" for ref in read().versions}
    # What a lease's writer left ends with the lease, a minute later.
    keys = [key for key in open_store(url).list("") if not key.startswith("leases/")]
    found = {key.rpartition("/")[0] for key in keys if "/v/" in key}
    hidden = [key for key in keys if key.rpartition("/")[2].startswith(".") and "lock" not in key]
    return [head.newest.version, served, kind, right, sorted(found ^ named), hidden]

each_point(lambda: publish(url, 1, models[0], 2), int(points), before, after)
"""
)


def run(script: str, *arguments: object) -> list[Any]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, timeout=110, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(lines) == POINTS
    assert sum(code == -9 for _, code, _ in lines) >= 50  # the number of calls varies a little
    return lines


@pytest.mark.parametrize("behind", ["a delta", pytest.param("a chain", marks=pytest.mark.slow)])
async def test_a_pull_that_is_killed_anywhere(
    tmp_path: Path, small_frames: int, model: Arrays, change: Change, behind: str
) -> None:
    store, start = DirectoryStore(tmp_path / "store"), tmp_path / "start"
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, SafetensorsSink(start))
    for version in range(3):
        model["bias"] = np.array(version, np.float32)
        await publisher.publish(model, version)
        if version == 0 or (version == 1 and behind == "a delta"):
            await puller.pull()
        change(model, version)
    old, kind = (1, "delta") if behind == "a delta" else (0, "chain")
    outcomes = set()
    for step, _, (served, recovered, how, right, files) in run(PULLS, store.url, start, tmp_path / "served", POINTS):
        assert served == recovered, step
        assert (recovered, how) in ((old, kind), (2, None)), step
        assert right == 2, step
        assert set(files) <= {"a", "b", "current", ".next", ".current.tmp"}, step
        outcomes.add(recovered)
    assert outcomes == {old, 2}


@pytest.mark.slow
async def test_a_publish_that_is_killed_anywhere(
    tmp_path: Path, small_frames: int, model: Arrays, change: Change
) -> None:
    """The next trainer goes on with a delta; what the killed one left is gone with its first version."""
    start = tmp_path / "start"
    publisher = Publisher(DirectoryStore(start), stream="s", incarnation=1)
    files = []
    for version in range(4):
        model["bias"] = np.array(version, np.float32)
        if version < 2:
            await publisher.publish(model, version)
        else:
            files.append(tmp_path / f"{version}.safetensors")
            save_file(model, files[-1])
        change(model, version)
    outcomes = set()
    for step, _, (head, served, kind, right, leaked, hidden) in run(
        PUBLISHES, start, tmp_path / "store", POINTS, *files
    ):
        assert served == head in (1, 2), step
        assert (kind, right) == ("delta", 3), step
        assert (leaked, hidden) == ([], []), step
        outcomes.add(head)
    assert outcomes == {1, 2}
