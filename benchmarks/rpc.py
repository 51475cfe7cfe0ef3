"""What a call costs: astraflow.rpc beside grpc.aio, a bare uvloop echo and a raw socket, all over Unix sockets.

    uv run --group bench python benchmarks/rpc.py

Every server is a process of its own, the client is this one, and all run on uvloop. Contenders take turns in short
rounds and a figure is the median of its rounds, so that a machine that is busy meanwhile slows all of them alike.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio
import msgspec
import uvloop

from astraflow.rpc import connect, serve

ROUNDS = 11
ROUND = 0.15
"""Seconds for each contender's latency, and again for its throughput."""
CONCURRENT = 64
STREAM_BYTES = 256 << 20
STREAM_ROUNDS = 9
LOCAL_CALLS = 2000
LOAD = os.getloadavg()[0]
REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "rpc.md"


class Message(msgspec.Struct, frozen=True):
    """What every contender sends and gets back: about 150 bytes of msgpack."""

    id: int
    text: str
    scores: list[float]


class Want(msgspec.Struct, frozen=True):
    count: int
    size: int


class Piece(msgspec.Struct, frozen=True):
    data: memoryview


class Bench(Protocol):
    async def echo(self, request: Message, /) -> Message: ...
    async def wait(self, request: Message, /) -> Message: ...
    def flow(self, request: Want, /) -> AsyncIterator[Piece]: ...


class BenchImpl:
    async def echo(self, request: Message, /) -> Message:
        return request

    async def wait(self, request: Message, /) -> Message:
        await asyncio.sleep(0)
        return request

    async def flow(self, request: Want, /) -> AsyncIterator[Piece]:
        piece = Piece(memoryview(bytes(request.size)))
        for _ in range(request.count):
            yield piece


MESSAGE = Message(7, "the quick brown fox jumps over the lazy dog " * 2, [0.5, 0.25, 0.125, 1.5])
Call = Callable[[], Awaitable[object]]

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode

# --- grpc.aio: generic handlers, the same msgpack as messages --------------------------------------------------------

GRPC_OPTIONS = (("grpc.minimal_stack", 1),)
"""The filters that nobody needs here are left out; of the options that we tried the one that makes it faster."""


class GrpcEcho(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, handler_call_details: Any) -> Any:
        async def echo(request: Message, context: Any) -> Message:
            return request

        async def wait(request: Message, context: Any) -> Message:
            await asyncio.sleep(0)
            return request

        handler = wait if handler_call_details.method == "/Bench/wait" else echo
        return grpc.unary_unary_rpc_method_handler(handler, request_deserializer=decode, response_serializer=encode)


async def serve_grpc(path: str) -> None:
    server = grpc.aio.server(options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((GrpcEcho(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    announce()
    await server.wait_for_termination()


@asynccontextmanager
async def grpc_calls(path: str) -> AsyncIterator[tuple[Call, Call]]:
    async with grpc.aio.insecure_channel(f"unix:{path}", options=GRPC_OPTIONS) as channel:
        echo, wait = (
            channel.unary_unary(f"/Bench/{name}", request_serializer=encode, response_deserializer=decode)
            for name in ("echo", "wait")
        )
        yield lambda: echo(MESSAGE, timeout=60), lambda: wait(MESSAGE, timeout=60)


# --- a bare echo: bytes there and back, in order, nothing else -------------------------------------------------------


class EchoServer(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class EchoClient(asyncio.Protocol):
    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.message = encode(MESSAGE)
        self.received = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        while self.received >= len(self.message):
            self.received -= len(self.message)
            self.waiting.popleft().set_result(None)

    def call(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        self.transport.write(self.message)
        return future


async def serve_echo(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(EchoServer, path)
    announce()
    await server.serve_forever()


@asynccontextmanager
async def echo_call(path: str) -> AsyncIterator[Call]:
    transport, client = await asyncio.get_running_loop().create_unix_connection(EchoClient, path)
    yield client.call
    transport.close()


# --- a raw socket: the same bytes in a loop of blocking calls --------------------------------------------------------


def serve_raw(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        announce()
        while True:
            connection, _ = listener.accept()
            with connection:
                want = msgspec.msgpack.decode(connection.recv(64), type=Want)
                item = bytes(want.size)
                for _ in range(want.count):
                    connection.sendall(item)


def read_raw(path: str, want: Want) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(encode(want))
        for _ in range(want.count):
            item = memoryview(bytearray(want.size))  # the reader keeps what it has read, as a caller does
            filled = 0
            while filled < want.size:
                filled += connection.recv_into(item[filled:])


# --- astraflow.rpc ---------------------------------------------------------------------------------------------------


async def serve_rpc(path: str) -> None:
    async with serve(BenchImpl(), Bench, f"unix:{path}"):
        announce()
        await asyncio.Event().wait()


async def read_rpc(proxy: Bench, want: Want) -> None:
    async for piece in proxy.flow(want):
        assert len(piece.data) == want.size


# --- the run ---------------------------------------------------------------------------------------------------------

SERVERS: dict[str, Callable[[str], Any]] = {
    "rpc": serve_rpc,
    "grpc.aio": serve_grpc,
    "echo": serve_echo,
    "raw": serve_raw,
}
Figures = dict[str, list[float]]


def announce() -> None:
    print("ready", flush=True)


@contextmanager
def process(kind: str, path: str) -> Iterator[int]:
    command = [sys.executable, __file__, kind, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n", f"{kind} did not start"
        try:
            yield child.pid
        finally:
            child.terminate()


def cpu_times(child: int) -> tuple[float, float]:
    """Seconds of processor time of this process, and of a child."""
    clock_of_child = (~child << 3) | 2  # clock_getcpuclockid(3), which Python lacks
    return time.process_time(), time.clock_gettime(clock_of_child)


async def latency(call: Call) -> float:
    """Median seconds of calls one after the other."""
    times = []
    end = time.perf_counter() + ROUND
    while (begin := time.perf_counter()) < end:
        await call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


async def throughput(call: Call, server: int) -> tuple[float, float, float]:
    """Calls per second, CONCURRENT at a time, and the processor seconds each costs the client and the server."""
    calls = 0
    begin, before = time.perf_counter(), cpu_times(server)

    async def caller() -> None:
        nonlocal calls
        while time.perf_counter() < begin + ROUND:
            await call()
            calls += 1

    await asyncio.gather(*(caller() for _ in range(CONCURRENT)))
    client, served = (now - then for now, then in zip(cpu_times(server), before, strict=True))
    return calls / (time.perf_counter() - begin), client / calls, served / calls


class Unary(NamedTuple):
    """By contender, a figure a round. Names with "waits" are of handlers that do, once."""

    latency: Figures
    rate: Figures
    client: Figures
    server: Figures

    @property
    def both(self) -> Figures:
        """Processor seconds of a call, both ends together."""
        return {name: [a + b for a, b in zip(self.client[name], self.server[name], strict=True)] for name in self.rate}


async def unary(paths: dict[str, str], servers: dict[str, int]) -> Unary:
    found = Unary(*(defaultdict[str, list[float]](list) for _ in range(4)))
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(connect(f"unix:{paths['rpc']}", Bench))
        grpc_echo, grpc_wait = await stack.enter_async_context(grpc_calls(paths["grpc.aio"]))
        calls: dict[str, Call] = {
            "rpc": lambda: proxy.echo(MESSAGE),
            "grpc.aio": grpc_echo,
            "echo": await stack.enter_async_context(echo_call(paths["echo"])),
            "rpc waits": lambda: proxy.wait(MESSAGE),
            "grpc.aio waits": grpc_wait,
        }
        for round_ in range(-1, ROUNDS):  # the first one warms up and does not count
            for name, call in calls.items():
                figures = (await latency(call), *await throughput(call, servers[name.split()[0]]))
                if round_ >= 0:
                    for where, figure in zip(found, figures, strict=True):
                        where[name].append(figure)
    return found


async def streams(paths: dict[str, str], servers: dict[str, int], size: int) -> tuple[Figures, Figures]:
    """Bytes per second, and bytes per processor second of both sides together."""
    want = Want(STREAM_BYTES // size, size)
    fast, cheap = (defaultdict[str, list[float]](list) for _ in range(2))
    async with connect(f"unix:{paths['rpc']}", Bench) as proxy:
        for round_ in range(-1, STREAM_ROUNDS):
            for name in ("rpc", "raw"):
                begin, spent = time.perf_counter(), sum(cpu_times(servers[name]))
                if name == "rpc":
                    await read_rpc(proxy, want)
                else:
                    read_raw(paths["raw"], want)  # blocks the loop, which has nothing else to do
                if round_ >= 0:
                    fast[name].append(STREAM_BYTES / (time.perf_counter() - begin))
                    cheap[name].append(STREAM_BYTES / (sum(cpu_times(servers[name])) - spent))
    return fast, cheap


async def local() -> Figures:
    """Seconds per call in this process."""
    impl = BenchImpl()
    found = defaultdict[str, list[float]](list)
    async with (
        serve(impl, Bench, "inproc:bench"),
        connect("inproc:bench", Bench) as handed,
        connect("inproc:bench", Bench, strict=True) as strict,
    ):
        calls: dict[str, Call] = {
            "object": lambda: impl.echo(MESSAGE),
            "inproc": lambda: handed.echo(MESSAGE),
            "strict": lambda: strict.echo(MESSAGE),
        }
        for _ in range(ROUNDS):
            for name, call in calls.items():
                begin = time.perf_counter()
                for _ in range(LOCAL_CALLS):
                    await call()
                found[name].append((time.perf_counter() - begin) / LOCAL_CALLS)
    return found


def ratio(figures: Figures, one: str, other: str) -> str:
    """The median of the rounds' ratios, and their range."""
    ratios = sorted(a / b for a, b in zip(figures[one], figures[other], strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def row(name: str, figures: Figures, contenders: tuple[str, ...], scale: float, digits: int) -> str:
    cells = (f"{statistics.median(figures[key]) * scale:,.{digits}f}" for key in contenders)
    return f"| {name} | {' | '.join(cells)} |"


def stream_rows(name: str, fast: Figures, cheap: Figures) -> Iterator[str]:
    for unit, figures, bar in (("second", fast, "≥ 0.60"), ("processor second, both sides", cheap, "")):
        cells = row(f"{name}, per {unit}", figures, ("rpc", "raw"), 1 / (1 << 20), 0)
        yield f"{cells} {ratio(figures, 'rpc', 'raw')} | {bar} |"


def report(calls: Unary, flows: dict[int, tuple[Figures, Figures]], here: Figures) -> str:
    all_ = ("rpc", "grpc.aio", "echo", "rpc waits", "grpc.aio waits")
    both = calls.both
    lines = [
        "# rpc: what a call costs",
        "",
        "Written by `uv run --group bench python benchmarks/rpc.py`; the script says what is measured.",
        f"Medians of {ROUNDS} rounds ({STREAM_ROUNDS} for streams) in which the contenders take turns.",
        "Ratios are taken within a round, lowest and highest in brackets.",
        f"Python {platform.python_version()}, uvloop {version('uvloop')}, grpcio {version('grpcio')}, "
        f"{os.cpu_count()} cores, load {LOAD:.1f} before and {os.getloadavg()[0]:.1f} at the end.",
        "Where the load exceeds the cores, rates tell of the scheduler as well as of the contenders, processor times "
        "do not.",
        "",
        "## Unary calls over a Unix socket",
        f"The same {len(encode(MESSAGE))} bytes of msgpack there and back; the echo decodes nothing and shows what the "
        "script costs. A handler that waits does so once, `asyncio.sleep(0)`.",
        "",
        "| | astraflow.rpc | grpc.aio | bare echo | astraflow.rpc, waits | grpc.aio, waits |",
        "|---|---:|---:|---:|---:|---:|",
        row("latency, µs", calls.latency, all_, 1e6, 0),
        row(f"calls/s, {CONCURRENT} at a time", calls.rate, all_, 1, 0),
        row("processor time per call then, client, µs", calls.client, all_, 1e6, 1),
        row("processor time per call then, server, µs", calls.server, all_, 1e6, 1),
        "",
        "| ratio | | a handler that waits | bar |",
        "|---|---|---|---|",
        *(
            f"| {name} | {ratio(figures, *of)} | {ratio(figures, *(f'{one} waits' for one in of))} | {bar} |"
            for name, figures, of, bar in (
                ("latency, grpc.aio / rpc", calls.latency, ("grpc.aio", "rpc"), "≥ 5"),
                ("calls/s, rpc / grpc.aio", calls.rate, ("rpc", "grpc.aio"), "≥ 10"),
                ("processor time, both ends, grpc.aio / rpc", both, ("grpc.aio", "rpc"), ""),
                ("processor time, client, grpc.aio / rpc", calls.client, ("grpc.aio", "rpc"), ""),
                ("processor time, server, grpc.aio / rpc", calls.server, ("grpc.aio", "rpc"), ""),
            )
        ),
        f"| latency, rpc / echo | {ratio(calls.latency, 'rpc', 'echo')} | | |",
        f"| calls/s, rpc / echo | {ratio(calls.rate, 'rpc', 'echo')} | | |",
        "",
        "## Streams over a Unix socket",
        f"{STREAM_BYTES >> 20} MiB in items; the raw socket is a loop of blocking `sendall` and `recv_into`.",
        "",
        "| MiB | astraflow.rpc | raw socket | ratio | bar |",
        "|---|---:|---:|---|---|",
        *(line for size, figures in flows.items() for line in stream_rows(f"items of {size >> 20} MiB", *figures)),
        "",
        "## In process",
        "",
        "| µs per call | |",
        "|---|---:|",
        row("the object itself", here, ("object",), 1e6, 2),
        row("`inproc:`", here, ("inproc",), 1e6, 2),
        row("`inproc:` with `strict=True`, both messages through msgspec", here, ("strict",), 1e6, 2),
        "",
    ]
    return "\n".join(lines)


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        paths = {kind: f"{directory}/{kind}" for kind in SERVERS}
        with ExitStack() as stack:
            servers = {kind: stack.enter_context(process(kind, path)) for kind, path in paths.items()}
            calls = await unary(paths, servers)
            flows = {size: await streams(paths, servers, size) for size in (1 << 20, 8 << 20)}
        here = await local()
    text = report(calls, flows, here)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        uvloop.run(main())
    elif sys.argv[1] == "raw":
        serve_raw(sys.argv[2])
    else:
        uvloop.run(SERVERS[sys.argv[1]](sys.argv[2]))
