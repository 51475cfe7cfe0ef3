"""Whoever runs something beside his own work hears at once that it has failed, and only then is he interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec
import pytest

from astraflow.rpc import serve
from astraflow.rpc.background import background


class Nothing(msgspec.Struct):
    pass


class Place(Protocol):
    async def go(self) -> Nothing: ...


class PlaceImpl:
    async def go(self) -> Nothing:
        return Nothing()


Body = Callable[[], Coroutine[Any, Any, None]]


async def breaks() -> None:
    await asyncio.sleep(0.01)
    raise OSError("the network is gone")


async def lives(main: Body, body: Body) -> None:
    async with background(main):
        await body()


def not_interrupted() -> bool:
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


async def test_a_server_that_dies_takes_its_body_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = asyncio.Event()

    async def no_accepting(*_: object) -> None:
        await go.wait()
        raise OSError("the network is gone")

    async def day() -> None:
        async with serve(PlaceImpl(), Place, f"unix:{tmp_path}/s"):
            go.set()
            await asyncio.sleep(60)

    monkeypatch.setattr("astraflow.rpc.server.accept_all", no_accepting)
    with anyio.fail_after(10), pytest.raises(ExceptionGroup) as caught:
        await day()
    assert "the network is gone" in str(caught.value.exceptions[0])
    assert not_interrupted()
    await asyncio.sleep(0.01)


async def test_a_body_is_interrupted_where_it_waits() -> None:
    async def body() -> None:
        await asyncio.sleep(60)

    with anyio.fail_after(10), pytest.raises(OSError, match="the network is gone"):
        await lives(breaks, body)
    assert not_interrupted()


async def test_a_body_that_does_not_heed_it_works_on_and_hears_of_it_at_its_end() -> None:
    done = []

    async def body() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(0.01)
        done.append("the rest")

    with anyio.fail_after(10), pytest.raises(OSError, match="the network is gone"):
        await lives(breaks, body)
    assert done == ["the rest"]
    assert not_interrupted()


async def test_the_bodys_own_error_is_the_one_that_counts() -> None:
    async def body() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise KeyError("mine") from None

    with anyio.fail_after(10), pytest.raises(KeyError, match="mine"):
        await lives(breaks, body)
    assert not_interrupted()


async def test_a_body_that_others_cancel_as_well_stays_cancelled() -> None:
    async def body() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await asyncio.sleep(60)
        finally:
            task.cancel()

    living = asyncio.create_task(lives(breaks, body))
    await asyncio.wait([living])
    assert living.cancelled()


async def test_a_body_that_is_left_by_another_task_is_not_interrupted() -> None:
    beside = background(breaks)
    await asyncio.create_task(beside.__aenter__())
    await asyncio.sleep(0.05)
    assert not_interrupted()
    with pytest.raises(OSError, match="the network is gone"):
        await beside.__aexit__(None, None, None)


async def test_nobody_is_interrupted_by_what_ends_well() -> None:
    async def ends() -> None:
        pass

    async def body() -> None:
        await asyncio.sleep(0.01)

    await lives(ends, body)
    assert not_interrupted()
