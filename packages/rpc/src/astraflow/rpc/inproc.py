"""`inproc:NAME`: an object of this process, handed over as it is to whoever connects to its name.

Invariant: a name is one object's for as long as it is served, and only on its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from .address import InprocAddress
from .describe import Description
from .interface import InterfaceMismatch, Unavailable
from .schema import differences

LOOK = 0.01

_served: dict[str, Served] = {}


@dataclass(frozen=True, eq=False)
class Served:
    impl: object
    description: Description
    loop: asyncio.AbstractEventLoop


@contextmanager
def handed_over(address: InprocAddress, impl: object, description: Description) -> Iterator[None]:
    """Serve an object by name. Raises OSError if the name is taken."""
    if address.name in _served:
        raise OSError(f"cannot listen on {address}: another object is served there")
    _served[address.name] = Served(impl, description, asyncio.get_running_loop())
    try:
        yield
    finally:
        del _served[address.name]


async def find(address: InprocAddress, description: Description, timeout: float) -> object:
    """The object served at an address, which may yet have to begin.

    Raises:
        Unavailable: nobody did within `timeout` seconds, or on another event loop.
        InterfaceMismatch: it is served as another interface.
    """
    with anyio.move_on_after(timeout):
        while address.name not in _served:  # noqa: ASYNC110 (a deadline ends it)
            await anyio.sleep(LOOK)
    served = _served.get(address.name)
    if served is None:
        raise Unavailable(f"no connection within {timeout:g} s: nothing is served at {address} in this process")
    if served.loop is not asyncio.get_running_loop():
        raise Unavailable(f"{address} is served on another event loop; use unix:PATH between threads")
    if served.description.fingerprint != description.fingerprint:
        found = differences(description.table, served.description.table) or ["their structures are not the same"]
        lines = "".join(f"\n  {line}" for line in found)
        raise InterfaceMismatch(f"{description.name} is not the {served.description.name} at {address}:{lines}")
    return served.impl
