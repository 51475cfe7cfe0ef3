"""Every test of the transport runs on both event loops it may meet, and leaves no task behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

ONE_LOOP = {"test_connection.py", "test_fuzz.py", "test_soak.py", "test_compatibility.py", "test_unkind_peers.py"}

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    if item.path.name in ONE_LOOP:  # what matters there is not the loop's
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0"


@pytest_asyncio.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    for _ in range(100):
        left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"tasks left behind: {left}")
