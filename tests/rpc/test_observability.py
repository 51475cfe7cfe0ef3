"""What can be seen of the calls: figures by method, as Prometheus text, and the trace that a call is part of."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
import pytest
import structlog

from astraflow.rpc import BUCKETS, MethodStats, RemoteError, connect, prometheus, serve, statistics, trace_id
from astraflow.rpc import frames as wire

log = structlog.get_logger("test")


class Note(msgspec.Struct):
    text: str = ""


class Desk(Protocol):
    async def nap(self, request: Note, /) -> Note: ...
    async def trace(self, request: Note, /) -> Note: ...
    def speak(self, request: Note, /) -> AsyncIterator[Note]: ...


class DeskImpl:
    def __init__(self, next_desk: Desk | None = None) -> None:
        self._next = next_desk

    async def nap(self, request: Note, /) -> Note:
        await anyio.sleep(float(request.text))
        return request

    async def trace(self, request: Note, /) -> Note:
        log.info("handled", desk="last" if self._next is None else "first")
        return Note(trace_id.get()) if self._next is None else await self._next.trace(request)

    async def speak(self, request: Note, /) -> AsyncIterator[Note]:
        for word in request.text.split():
            yield Note(word)


@asynccontextmanager
async def desk(path: Path) -> AsyncIterator[Desk]:
    async with (
        serve(DeskImpl(), Desk, f"unix:{path}/last") as last,
        connect(last.address, Desk) as behind,
        serve(DeskImpl(behind), Desk, f"unix:{path}/first") as first,
        connect(first.address, Desk) as front,
    ):
        yield front


async def test_both_sides_count_calls_and_their_durations(tmp_path: Path) -> None:
    async with serve(DeskImpl(), Desk, f"unix:{tmp_path}/s") as server, connect(server.address, Desk) as proxy:
        await proxy.nap(Note("0.03"))
        with pytest.raises(RemoteError):
            await proxy.nap(Note("soon"))
        assert [item.text async for item in proxy.speak(Note("to be"))] == ["to", "be"]
        for figures in (server.statistics(), statistics(proxy)):
            nap = figures["nap"]
            assert (nap.calls, nap.failures, nap.in_flight) == (2, 1, 0)
            assert nap.latency.count == 2
            assert nap.latency.counts[BUCKETS.index(0.05)] + nap.latency.counts[BUCKETS.index(0.1)] == 1
            assert 0.03 <= nap.latency.total < 0.5
            assert figures["speak"].latency.count == 1
            assert figures["trace"] == MethodStats()


async def test_queue_time_is_what_a_call_waits_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.rpc.server.MAX_CALLS", 1)
    async with serve(DeskImpl(), Desk, f"unix:{tmp_path}/s") as server, connect(server.address, Desk) as proxy:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(proxy.nap, Note("0.1"))
        assert 0.08 < statistics(proxy)["nap"].queue_seconds < 0.5
        assert server.statistics()["nap"].queue_seconds < 0.08


def test_buckets_are_closed_above_and_the_last_is_open() -> None:
    stats = MethodStats()
    for seconds in (0.0, BUCKETS[0], BUCKETS[0] * 1.01, BUCKETS[-1], 1e9):
        stats.end(seconds, failed=False)
    assert stats.latency.counts[:2] == [2, 1]
    assert stats.latency.counts[-2:] == [1, 1]


def test_prometheus_text_is_cumulative_escaped_and_whole() -> None:
    stats = MethodStats(calls=3, bytes_sent=5, bytes_received=7, queue_seconds=0.25)
    for seconds in (0.00005, 0.002, 100.0):
        stats.end(seconds, failed=seconds > 1)
    text = prometheus({"nap": stats}, "client", {"service": 'a "quoted\\name"'})
    labels = r'service="a \"quoted\\name\"",method="nap"'
    for line in (
        f"astraflow_rpc_client_calls_total{{{labels}}} 3",
        f"astraflow_rpc_client_failures_total{{{labels}}} 1",
        f"astraflow_rpc_client_queue_seconds_total{{{labels}}} 0.25",
        f"astraflow_rpc_client_sent_bytes_total{{{labels}}} 5",
        f"astraflow_rpc_client_received_bytes_total{{{labels}}} 7",
        f'astraflow_rpc_client_latency_seconds_bucket{{{labels},le="0.0025"}} 2',
        f'astraflow_rpc_client_latency_seconds_bucket{{{labels},le="+Inf"}} 3',
        f"astraflow_rpc_client_latency_seconds_count{{{labels}}} 3",
    ):
        assert line in text.splitlines()
    assert text.endswith("\n")
    sample = re.compile(r'[a-z_]+\{([a-z]+="([^"\\]|\\.)*",?)+\} -?[0-9.e+-]+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in text.splitlines())


async def test_a_trace_goes_from_the_caller_through_every_handler_into_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with desk(tmp_path) as front:

        async def call(name: str) -> None:
            trace_id.set(name)
            assert (await front.trace(Note())).text == name

        async with anyio.create_task_group() as tasks:
            for name in ("run-7", "run-8"):
                tasks.start_soon(call, name)
        lines = [line for line in capsys.readouterr().out.splitlines() if "handled" in line]
        assert sorted(re.findall(r"desk=(\w+).*trace_id=([\w-]+)", "\n".join(lines))) == [
            ("first", "run-7"),
            ("first", "run-8"),
            ("last", "run-7"),
            ("last", "run-8"),
        ]
        one, two = (await front.trace(Note())).text, (await front.trace(Note())).text
        assert one
        assert one != two
        assert trace_id.get() == ""


async def test_a_client_that_knows_no_traces_is_served_and_a_long_one_is_cut(tmp_path: Path) -> None:
    async with serve(DeskImpl(), Desk, f"unix:{tmp_path}/s") as server, connect(server.address, Desk) as proxy:
        structlog.contextvars.clear_contextvars()
        assert (await proxy.trace(Note())).text
        trace_id.set("x" * 1000)
        assert (await proxy.trace(Note())).text == "x" * 128
    old = msgspec.msgpack.encode([4, 1, "trace", None])
    assert msgspec.msgpack.decode(old, type=wire.Call) == wire.Call(1, "trace")
