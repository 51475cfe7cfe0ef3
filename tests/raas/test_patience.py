"""Calls are repeated while the service is away, for as long as the patience lasts."""

from __future__ import annotations

import time

import anyio
import pytest

from astraflow.raas.patience import persist
from astraflow.rpc import Unavailable


async def test_a_call_is_repeated_until_it_answers() -> None:
    tries = 0

    async def call() -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise Unavailable("away")
        if tries == 2:
            await anyio.sleep_forever()
        return tries

    assert await persist("call", call, timeout_s=0.05, patience_s=10) == 3


async def test_other_errors_surface_at_once() -> None:
    async def call() -> int:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        await persist("call", call, timeout_s=1, patience_s=10)


async def test_a_process_that_stood_still_tries_again() -> None:
    tries = 0

    async def call() -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            time.sleep(0.3)  # noqa: ASYNC251
            await anyio.sleep(0.1)
        return tries

    assert await persist("call", call, timeout_s=0.1, patience_s=0.2) == 2
