"""Tasks that carry calls, one after the other, and the first step of a call without waiting for a task's turn.

A task, a cancel scope and a timer of its own cost several times what a small call costs. So a task that has nothing to
do lends its name and its scope to a call's first step, which is run where the call arrived; a call that ends there has
cost nothing more, and one that waits keeps the task until its end. Either way the handler finds what it would find in
a task of its own: `asyncio.current_task()`, a cancel scope with its deadline, a context that nobody else sees.

Invariant: a task carries one call at a time, and one that was cancelled carries no other.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task  # documented for other makers of tasks ("Extending asyncio")
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from types import CoroutineType
from typing import Any, Protocol

import anyio

KEPT = 64
EARLY = 0.001
"""The part of a call's time by which a scope's deadline may come early, so that not every call must move it."""
IDLE = "waits for a call"
NOTHING: Any = object()

Handler = Callable[..., Awaitable[Any]]


class Work(Protocol):
    """A call, as the task sees it that carries it."""

    name: str

    async def run(self, cancelled: asyncio.CancelledError | None) -> None:
        """To the end, in the host's scope. `cancelled` came before the task had its turn."""

    async def cut_short(self) -> None:
        """run() was cancelled; the host's scope has been left."""


class Steps:
    """The steps of a coroutine, in a context of its own; awaiting them runs those that are left.

    Args:
        waits_for: what the last step gave; NOTHING before the first.
    """

    __slots__ = ("_context", "_coroutine", "_waits_for", "interrupt")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: Context, waits_for: Any = NOTHING) -> None:
        self._coroutine = coroutine
        self._context = context
        self._waits_for = waits_for
        self.interrupt: BaseException | None = None
        """To be raised where the coroutine waits now."""

    def __await__(self) -> Generator[Any, Any, Any]:
        run, send, throw = self._context.run, self._coroutine.send, self._coroutine.throw
        waits_for, thrown = self._waits_for, self.interrupt
        try:
            while True:
                if thrown is not None:
                    waits_for = run(throw, thrown)
                elif waits_for is NOTHING:
                    waits_for = run(send, None)
                thrown = None
                try:
                    yield waits_for
                except GeneratorExit:
                    self._coroutine.close()
                    raise
                except BaseException as error:
                    thrown = error
                waits_for = NOTHING
        except StopIteration as stop:
            return stop.value


def _first(function: Handler, arguments: tuple[Any, ...]) -> tuple[Coroutine[Any, Any, Any], Any]:
    found = function(*arguments)
    coroutine = found if isinstance(found, CoroutineType) else _awaited(found)
    return coroutine, coroutine.send(None)


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


class Host:
    """A task with a cancel scope, for a call at a time."""

    __slots__ = ("_given", "_hosts", "_work", "scope", "task")

    def __init__(self, hosts: Hosts, work: Work, deadline: float) -> None:
        self.scope = anyio.CancelScope(deadline=deadline)
        self._hosts = hosts
        self._given: asyncio.Future[None] | None = None
        self._work: Work | None = work
        self.task = hosts.loop.create_task(self._main(), name=work.name)

    def is_free(self) -> bool:
        return self._given is not None and not self._given.done()

    def set_deadline(self, deadline: float, early: float) -> None:
        if not deadline - early <= self.scope.deadline <= deadline:
            self.scope.deadline = deadline

    def first_step(
        self, function: Handler, arguments: tuple[Any, ...], context: Context
    ) -> tuple[Steps, None] | tuple[None, Any]:
        """Run the first step of a call in the name of this idle task, here and now.

        Gives the steps that are left, which are for this task to `take()`, or else the result. Raises what the call
        raises.
        """
        loop, task = self._hosts.loop, self.task
        _enter_task(loop, task)
        try:
            coroutine, waits_for = context.run(_first, function, arguments)
        except StopIteration as stop:
            return None, stop.value
        finally:
            _leave_task(loop, task)
        return Steps(coroutine, context, waits_for), None

    def take(self, work: Work) -> None:
        """Give this idle task a call."""
        assert self._work is None, "a task carries one call at a time"
        self._work = work
        last = self._hosts.idle.pop()
        assert last is self, "free() gives the last one"
        self.task.set_name(work.name)
        if self._given is not None and not self._given.done():
            self._given.set_result(None)

    async def _main(self) -> None:
        try:
            with self.scope:
                while await self._carry():
                    pass
        except asyncio.CancelledError:
            if self._work is None:
                raise
        if self._work is not None:
            await self._work.cut_short()

    async def _carry(self) -> bool:
        """Carry a call, and wait for one if there is none; whether this task may carry another."""
        cancelled = None
        work = self._work
        if work is None:
            try:
                await self._wait()
            except asyncio.CancelledError as error:
                cancelled = error
            work = self._work
            if work is None:
                assert cancelled is not None, "nothing but work ends the wait"
                raise cancelled
        await work.run(cancelled)
        self._work = None
        return self._hosts.wants(self)

    async def _wait(self) -> None:
        idle = self._hosts.idle
        self.task.set_name(IDLE)
        self._given = self._hosts.loop.create_future()
        idle.append(self)
        try:
            await self._given
        finally:
            if self._work is None:
                idle.remove(self)


class Hosts:
    """The tasks of a server. Those that are `idle` wait for calls; all are cancelled at the end of the `async with`.

    Calls run in copies of the context in which this was made.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.idle: list[Host] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = copy_context()
        self._closed = False

    def context(self) -> Context:
        return self._context.copy()

    def free(self) -> Host | None:
        """An idle task, if there is one."""
        return self.idle[-1] if self.idle and self.idle[-1].is_free() else None

    def carry(self, work: Work, deadline: float) -> Host:
        """Give a call to a task, which begins it at its next turn."""
        host = self.free()
        if host is not None:
            host.set_deadline(deadline, early=0)
            host.take(work)
            return host
        host = Host(self, work, deadline)
        self._tasks.add(host.task)
        host.task.add_done_callback(self._tasks.discard)
        return host

    def wants(self, host: Host) -> bool:
        """Whether a task that has ended its call shall wait for another."""
        spent = host.scope.cancel_called or host.task.cancelling()
        return not spent and not self._closed and len(self.idle) < KEPT

    async def __aenter__(self) -> Hosts:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(self._tasks)
