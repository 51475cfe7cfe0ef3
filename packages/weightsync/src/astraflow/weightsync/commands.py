"""What each command of `weightsync` does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from . import cli, tables
from .directory_store import DirectoryStore
from .inspection import inspect
from .interface import PullReport, Store, WeightSyncError
from .mirror import Mirror, MirrorStatus
from .puller import Puller
from .safetensors_sink import SafetensorsSink
from .server import Tls, serve
from .stores import open_store, token_from_environment
from .verification import verify

log = structlog.get_logger(__name__)

SPOOL = ".spool"
LOOK_S = 60.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0


async def run(request: Any) -> int:
    """Raises ValueError, WeightSyncError, OSError."""
    log_to_stderr()
    match request:
        case cli.Serve():
            return await run_serve(request)
        case cli.Pull():
            return await run_pull(request)
        case cli.Mirror():
            return await run_mirror(request)
        case cli.Inspect():
            return await run_inspect(request)
        case cli.Verify():
            return await run_verify(request)
        case _:
            raise NotImplementedError(type(request).__name__)


async def run_serve(request: cli.Serve) -> int:
    await serve_at(directory(request.directory), request.listen, request.listening)
    return cli.DONE


async def serve_at(store: Any, address: str, listening: cli.Listening) -> None:
    """Serve until cancelled; says where."""
    host, port = host_and_port(address)
    tls = tls_of(listening)
    token = read_token(listening.require_token_file)
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(partial(serve, store, host=host, port=port, token=token, tls=tls))
        print(f"serving {store.url} at {url}", flush=True)


async def run_pull(request: cli.Pull) -> int:
    """What arrived of a pull that is killed is kept in DIR/.spool, for the next one."""
    store, sink = open_source(request.source, request.access), SafetensorsSink(request.directory)
    spool = request.directory / SPOOL
    with bytes_bar("pulling") as (bar, task):
        puller = Puller(
            store,
            sink,
            mode=request.mode,
            connections=request.connections,
            spool=spool,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        if request.follow:
            await follow(puller, store, request)
        report = await puller.pull()
    if report is not None:
        show(report, request)
    elif sink.state().version < 0:
        raise FileNotFoundError(f"{store.url}: nothing has been published there, it has no HEAD")
    else:
        note(f"{request.directory} holds version {sink.state().version}, the newest", request.json)
    return cli.DONE


async def follow(puller: Puller, store: Store, request: cli.Pull) -> None:
    """Bring each version until cancelled; what fails is tried again."""
    pause = FIRST_WAIT_S
    while True:
        try:
            report = await puller.pull() if await puller.wait(LOOK_S) else None
            pause = FIRST_WAIT_S
        except (OSError, WeightSyncError) as error:
            log.warning("pull failed; trying again", source=store.url, error=str(error), seconds=round(pause, 1))
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT_S)
            continue
        if report is not None:
            show(report, request)


def show(report: PullReport, request: cli.Pull) -> None:
    if request.json:
        print_json(report)
    else:
        print(f"{tables.pulled(report)}, in {request.directory}/current/model.safetensors", flush=True)


async def run_mirror(request: cli.Mirror) -> int:
    if request.cut_through and not request.serve:
        raise cli.UsageError("--cut-through needs --serve HOST:PORT: what is still arriving is only had through it")
    store = open_source(request.source, request.access)
    mirror = Mirror(
        store,
        request.directory,
        cut_through=request.cut_through,
        connections=request.connections,
        interval=request.interval,
    )
    async with anyio.create_task_group() as tasks, mirror:
        if request.serve:
            tasks.start_soon(serve_at, mirror, request.serve, request.listening)
        tasks.start_soon(watch, mirror, request.json)
        if request.once:
            print_status(await mirror.caught_up(), request.json)
            tasks.cancel_scope.cancel()
        else:
            await anyio.sleep_forever()
    return cli.DONE


async def watch(mirror: Mirror, as_json: bool) -> None:
    """Show how far it is."""
    before = MirrorStatus()
    with bytes_bar("waiting") as (progress, task):
        while True:
            status = mirror.status
            total = status.arrived_bytes + status.missing_bytes
            told = f"version {status.version}" + (f" of {status.source_version}" if status.missing_bytes else "")
            progress.update(task, completed=status.arrived_bytes, total=total or None, description=told)
            if as_json and (status.version, status.incarnation, status.fault) != (
                before.version,
                before.incarnation,
                before.fault,
            ):
                print_json(status)
            before = status
            await anyio.sleep(0.2)


def print_status(status: MirrorStatus, as_json: bool) -> None:
    if as_json:
        print_json(status)
    else:
        print(f"version {status.version} (incarnation {status.incarnation}), {status.arrived_bytes} bytes fetched")


async def run_inspect(request: cli.Inspect) -> int:
    inspection = await inspect(open_source(request.source, request.access))
    if request.json:
        print_json(inspection)
    else:
        tables.show_inspection(inspection, console())
    return cli.DONE


async def run_verify(request: cli.Verify) -> int:
    store = open_source(request.source, request.access)
    with bytes_bar("verifying") as (progress, task):
        found = await verify(store, lambda done, total: progress.update(task, completed=done, total=total))
    if request.json:
        print_json(found)
    elif not found.damage:
        print(tables.verified(found))
    if not found.damage:
        return cli.DONE
    more = f" (and {len(found.damage) - 1} more; --json shows all)" if len(found.damage) > 1 else ""
    raise WeightSyncError(f"{store.url}: {found.damage[0]}{more}")


def open_source(address: str, access: cli.Access) -> Store:
    """The store that a directory or URL names. Raises ValueError, OSError."""
    if "://" not in address:
        return directory(Path(address))
    if address.startswith(("http:", "https:")):
        token = read_token(access.token_file)
        return open_store(address, token=token, ca_file=str(access.ca_file) if access.ca_file else None)
    if address.startswith("file:"):
        return directory(Path.from_uri(address)) if hasattr(Path, "from_uri") else open_store(address)
    return open_store(address)


def directory(path: Path) -> DirectoryStore:
    """Raises NotADirectoryError: a reader makes none."""
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory; give one that a publisher or a mirror writes, or a URL")
    return DirectoryStore(path)


def read_token(path: Path | None) -> str | None:
    return path.read_text().strip() if path is not None else token_from_environment()


def tls_of(listening: cli.Listening) -> Tls | None:
    if listening.cert is None or listening.key is None:
        if listening.cert is not listening.key:
            raise cli.UsageError("--cert and --key go together")
        return None
    for path in (listening.cert, listening.key):
        path.open("rb").close()
    return Tls(listening.cert, listening.key)


def host_and_port(address: str) -> tuple[str, int]:
    """`HOST:PORT`, `[v6]:PORT`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise cli.UsageError(f"{address!r} is not HOST:PORT, as in 127.0.0.1:8600 or [::]:8600")
    return host.removeprefix("[").removesuffix("]"), int(port)


def log_to_stderr() -> None:
    """Warnings and worse, for people."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


@contextmanager
def bytes_bar(told: str) -> Iterator[tuple[Progress, Any]]:
    """A bar of bytes on stderr, where a person looks at it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        yield progress, progress.add_task(told, total=None)


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=160)


def print_json(value: msgspec.Struct) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


def note(message: str, as_json: bool) -> None:
    print(message, file=sys.stderr if as_json else sys.stdout, flush=True)
