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
from typing import Any, Protocol

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
    def flow(self, request: Want, /) -> AsyncIterator[Piece]: ...


class BenchImpl:
    async def echo(self, request: Message, /) -> Message:
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


class GrpcEcho(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, handler_call_details: Any) -> Any:
        async def echo(request: Message, context: Any) -> Message:
            return request

        return grpc.unary_unary_rpc_method_handler(echo, request_deserializer=decode, response_serializer=encode)


async def serve_grpc(path: str) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((GrpcEcho(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    announce()
    await server.wait_for_termination()


@asynccontextmanager
async def grpc_call(path: str) -> AsyncIterator[Call]:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        echo = channel.unary_unary("/Bench/echo", request_serializer=encode, response_deserializer=decode)
        yield lambda: echo(MESSAGE, timeout=60)


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


def cpu_time(child: int) -> float:
    """Seconds of processor time of this process and a child."""
    clock_of_child = (~child << 3) | 2  # clock_getcpuclockid(3), which Python lacks
    return time.process_time() + time.clock_gettime(clock_of_child)


async def latency(call: Call) -> float:
    """Median seconds of calls one after the other."""
    times = []
    end = time.perf_counter() + ROUND
    while (begin := time.perf_counter()) < end:
        await call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


async def throughput(call: Call, server: int) -> tuple[float, float]:
    """Calls per second, CONCURRENT at a time, and the processor seconds each costs both sides together."""
    calls = 0
    begin, spent = time.perf_counter(), cpu_time(server)

    async def caller() -> None:
        nonlocal calls
        while time.perf_counter() < begin + ROUND:
            await call()
            calls += 1

    await asyncio.gather(*(caller() for _ in range(CONCURRENT)))
    return calls / (time.perf_counter() - begin), (cpu_time(server) - spent) / calls


async def unary(paths: dict[str, str], servers: dict[str, int]) -> tuple[Figures, Figures, Figures]:
    slow, fast, cpu = (defaultdict[str, list[float]](list) for _ in range(3))
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(connect(f"unix:{paths['rpc']}", Bench))
        calls: dict[str, Call] = {
            "rpc": lambda: proxy.echo(MESSAGE),
            "grpc.aio": await stack.enter_async_context(grpc_call(paths["grpc.aio"])),
            "echo": await stack.enter_async_context(echo_call(paths["echo"])),
        }
        for round_ in range(-1, ROUNDS):  # the first one warms up and does not count
            for name, call in calls.items():
                seconds = await latency(call)
                rate, work = await throughput(call, servers[name])
                if round_ >= 0:
                    slow[name].append(seconds)
                    fast[name].append(rate)
                    cpu[name].append(work)
    return slow, fast, cpu


async def streams(paths: dict[str, str], servers: dict[str, int], size: int) -> tuple[Figures, Figures]:
    """Bytes per second, and bytes per processor second of both sides together."""
    want = Want(STREAM_BYTES // size, size)
    fast, cheap = (defaultdict[str, list[float]](list) for _ in range(2))
    async with connect(f"unix:{paths['rpc']}", Bench) as proxy:
        for round_ in range(-1, STREAM_ROUNDS):
            for name in ("rpc", "raw"):
                begin, spent = time.perf_counter(), cpu_time(servers[name])
                if name == "rpc":
                    await read_rpc(proxy, want)
                else:
                    read_raw(paths["raw"], want)  # blocks the loop, which has nothing else to do
                if round_ >= 0:
                    fast[name].append(STREAM_BYTES / (time.perf_counter() - begin))
                    cheap[name].append(STREAM_BYTES / (cpu_time(servers[name]) - spent))
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


def report(slow: Figures, fast: Figures, cpu: Figures, flows: dict[int, tuple[Figures, Figures]], here: Figures) -> str:
    three = ("rpc", "grpc.aio", "echo")
    lines = [
        "# rpc: what a call costs",
        "",
        "Written by `uv run --group bench python benchmarks/rpc.py`; the script says what is measured.",
        f"Medians of {ROUNDS} rounds ({STREAM_ROUNDS} for streams) in which the contenders take turns.",
        "Ratios are taken within a round, lowest and highest in brackets.",
        f"Python {platform.python_version()}, uvloop {version('uvloop')}, grpcio {version('grpcio')}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "## Unary calls over a Unix socket",
        f"The same {len(encode(MESSAGE))} bytes of msgpack there and back; the echo decodes nothing.",
        "",
        "| | astraflow.rpc | grpc.aio | bare echo |",
        "|---|---:|---:|---:|",
        row("latency, µs", slow, three, 1e6, 0),
        row(f"calls/s, {CONCURRENT} at a time", fast, three, 1, 0),
        row("processor time per call then, both sides, µs", cpu, three, 1e6, 0),
        "",
        "| ratio | | bar |",
        "|---|---|---|",
        f"| latency, grpc.aio / rpc | {ratio(slow, 'grpc.aio', 'rpc')} | ≥ 5 |",
        f"| calls/s, rpc / grpc.aio | {ratio(fast, 'rpc', 'grpc.aio')} | ≥ 10 |",
        f"| processor time, grpc.aio / rpc | {ratio(cpu, 'grpc.aio', 'rpc')} | |",
        f"| latency, rpc / echo | {ratio(slow, 'rpc', 'echo')} | |",
        f"| calls/s, rpc / echo | {ratio(fast, 'rpc', 'echo')} | |",
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
    text = report(*calls, flows, here)
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
