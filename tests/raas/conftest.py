"""What the tests of raas share: an engine that samples from a script, a tokenizer of characters, a scripted dataflow.

They are handed out by fixtures: `kit` is this module as an object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from astraflow.dataflow import (
    Empty,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Message,
    Policies,
    PolicyVersion,
    Prompt,
    Registration,
    RolloutTask,
    SampleResult,
    Sampling,
    SubmitReply,
    SubmitRequest,
    WatchRequest,
)
from astraflow.raas import EngineSpec, EngineStats, GenerateRequest, Generation, Progress, Worker, WorkerConfig
from astraflow.rpc import Unavailable
from astraflow.weightsync import Sink, SinkState, TensorSpec

STOP = 0
START = 1
MERGED = 2
SPECIAL = {"</s>": STOP, "<s>": START}


class CharTokenizer:
    """One id a character, but "zz" is one id of its own: ids [z, z] decode to text that encodes to another id."""

    def __init__(self, opening: str = "<s>{role}:{content}</s>") -> None:
        self._opening = opening
        self.encoded: list[str] = []

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (STOP,)

    def render(self, messages: Sequence[Message], /) -> str:
        said = "".join(self._opening.format(role=m.role, content=m.content) for m in messages)
        return said + "<s>assistant:"

    def encode(self, text: str, /) -> tuple[int, ...]:
        self.encoded.append(text)
        ids: list[int] = []
        while text:
            for piece, token in (*SPECIAL.items(), ("zz", MERGED)):
                if text.startswith(piece):
                    ids.append(token)
                    text = text[len(piece) :]
                    break
            else:
                ids.append(ord(text[0]))
                text = text[1:]
        return tuple(ids)

    def decode(self, ids: Sequence[int], /, *, special: bool) -> str:
        names = {token: piece if special else "" for piece, token in SPECIAL.items()} | {MERGED: "zz"}
        return "".join(names.get(token, chr(token)) for token in ids)


class ArraySink:
    """One float32 array as a sink."""

    whole_frames = False

    def __init__(self) -> None:
        self.values = np.zeros(8, dtype=np.float32)
        self._staged: NDArray[np.float32] | None = None
        self._state = SinkState()

    def state(self) -> SinkState:
        return self._state

    def read(self, name: str, offset: int, into: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return self.values.view(np.uint8)[offset : offset + into.size]

    def begin(self, layout: Sequence[TensorSpec]) -> None:
        self._staged = self.values.copy()

    def room(self, name: str, offset: int, length: int) -> NDArray[np.uint8] | None:
        return None

    def stage_dense(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        assert self._staged is not None
        self._staged.view(np.uint8)[offset : offset + data.size] = data

    def stage_sparse(
        self, name: str, offset: int, itemsize: int, index: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> None:
        assert self._staged is not None
        view = self._staged.view(np.uint8).reshape(-1, itemsize)
        view[offset // itemsize + index] = data.reshape(-1, itemsize)

    def seal(self) -> None:
        pass

    def commit(self, state: SinkState) -> None:
        assert self._staged is not None
        self.values, self._staged, self._state = self._staged, None, state

    def abort(self) -> None:
        self._staged = None


def letters(request: GenerateRequest) -> tuple[int, ...]:
    """An answer that depends on prompt and seed alone."""
    draw = np.random.default_rng([request.seed, *request.prompt])
    count = int(draw.integers(1, max(2, request.sampling.max_new_tokens)))
    return (*(int(token) for token in draw.integers(97, 123, count)), STOP)[: request.sampling.max_new_tokens]


class ScriptedEngine:
    """An honest engine without a model: tokens from `answer`, one version a token, standing still during a swap."""

    def __init__(
        self,
        spec: EngineSpec | None = None,
        *,
        answer: Callable[[GenerateRequest], tuple[int, ...]] = letters,
        token_s: float = 0.0,
    ) -> None:
        self._answer = answer
        self._token_s = token_s
        self._version = 0
        self._sink = ArraySink()
        self._still = anyio.Lock()
        self.requests: list[GenerateRequest] = []
        self.running = self.most_running = self.generated = self.aborted = 0
        self.started = self.closed = False
        self.sampled: dict[str, list[int]] = {}
        self.swaps: list[tuple[float, int]] = []

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        self.started = True

    async def aclose(self) -> None:
        self.closed = True

    async def generate(self, request: GenerateRequest, /) -> Generation:
        assert self.started
        assert not self.closed
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        versions = self.sampled[request.request_id] = []
        tokens = self._answer(request)
        try:
            for _ in tokens:
                await anyio.sleep(self._token_s)
                async with self._still:
                    versions.append(self._version)
                    self.generated += 1
        except anyio.get_cancelled_exc_class():
            self.aborted += 1
            raise
        finally:
            self.running -= 1
            del self.sampled[request.request_id]
        return Generation(
            tokens=tokens,
            logprobs=tuple(-(1 + token % 7) / 8 for token in tokens),
            versions=tuple(versions),
            finish_reason="stop" if tokens[-1] == STOP else "length",
        )

    def sink(self) -> Sink:
        return self._sink

    async def swap(self, commit: Callable[[], None], version: int, /) -> float:
        async with self._still:
            begun = anyio.current_time()
            await anyio.to_thread.run_sync(commit)
            self._version = version
            self.swaps.append((anyio.current_time(), version))
            return anyio.current_time() - begun

    def progress(self, request_id: str, /) -> Progress:
        versions = self.sampled.get(request_id, [])
        return Progress(len(versions), versions[0]) if versions else Progress()

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running, waiting=0, generated_tokens=self.generated)


@dataclass
class ListDataflow:
    """The worker's side of a dataflow: hands out `tasks`, keeps what is submitted; `away` makes it unreachable."""

    tasks: list[RolloutTask] = field(default_factory=list)
    policies: list[PolicyVersion] = field(default_factory=list)
    away: bool = False
    finished: bool = False
    known: bool = True
    cancel: tuple[str, ...] = ()
    results: list[SampleResult] = field(default_factory=list)
    submits: list[int] = field(default_factory=list)
    registrations: list[Registration] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    most_leased: int = 0

    def _reach(self) -> None:
        if self.away:
            raise Unavailable("the dataflow is away")

    async def register(self, request: Registration, /) -> Empty:
        self._reach()
        self.known = True
        self.registrations.append(request)
        return Empty()

    async def lease(self, request: LeaseRequest, /) -> LeaseReply:
        self._reach()
        end = anyio.current_time() + request.wait_s
        while not self.tasks and not self.finished and anyio.current_time() < end:
            await anyio.sleep(0.01)
            self._reach()
        given: list[RolloutTask] = []
        while self.tasks and len(given) < request.max_tasks:
            if given and sum(task.n_samples for task in [*given, self.tasks[0]]) > request.max_samples:
                break
            given.append(self.tasks.pop(0))
        return LeaseReply(tasks=tuple(given), finished=self.finished)

    async def submit(self, request: SubmitRequest, /) -> SubmitReply:
        await anyio.sleep(0.001)
        self._reach()
        self.submits.append(len(request.results))
        self.results += request.results
        return SubmitReply(accepted=len(request.results))

    async def heartbeat(self, request: Heartbeat, /) -> HeartbeatReply:
        self._reach()
        self.heartbeats.append(request)
        cancel, self.cancel = self.cancel, ()
        return HeartbeatReply(known=self.known, cancel=cancel, finished=self.finished)

    async def watch(self, request: WatchRequest, /) -> Policies:
        self._reach()
        end = anyio.current_time() + request.wait_s
        while anyio.current_time() < end and all(request.known.get(p.model_id) == p.version for p in self.policies):
            await anyio.sleep(0.01)
            self._reach()
        return Policies(versions=tuple(self.policies))

    async def until(self, results: int, timeout_s: float = 10.0) -> list[SampleResult]:
        """Wait for so many results."""
        with anyio.fail_after(timeout_s):
            while len(self.results) < results:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        return self.results


def make_task(task_id: str = "sums/0", **changes: Any) -> RolloutTask:
    fields: dict[str, Any] = {
        "task_id": task_id,
        "prompt": Prompt(id=task_id, source="sums", messages=(Message("user", "3 + 4"),), reference="7"),
        "workflow": "answer",
        "n_samples": 4,
        "sampling": {"solver": Sampling(max_new_tokens=8)},
        "seed": 11,
        "deadline_s": 30.0,
    }
    return RolloutTask(**(fields | changes))


def make_worker(dataflow: Any, workflows: dict[str, Any], engines: dict[str, Any], **config: Any) -> Worker:
    settings: dict[str, Any] = {"worker_id": "w0", "heartbeat_s": 0.05, "capacity": 8, "drain_s": 5.0}
    return Worker(
        WorkerConfig(**(settings | config)),
        dataflow,
        engines=engines,
        tokenizers={name: CharTokenizer() for name in engines},
        workflows=workflows,
    )


class Kit:
    """This module's names, for tests that cannot import it."""

    STOP, START, MERGED = STOP, START, MERGED
    CharTokenizer = CharTokenizer
    ScriptedEngine = ScriptedEngine
    ListDataflow = ListDataflow
    make_task = staticmethod(make_task)
    make_worker = staticmethod(make_worker)


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
