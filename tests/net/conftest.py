"""A long link between two network namespaces, for tests of what crosses regions; see `relay.py`.

`long_link()` starts one and gives a `LongLink`. It needs Linux, iproute2 and util-linux, and root or user namespaces
that may open /dev/net/tun; where that is missing, the tests that ask for it are skipped and say why.

`pytest -m slow tests/net --report FILE` writes what the tests measured as a page.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NamedTuple

import pytest

REPORT = pytest.StashKey["Report"]()
RELAY = Path(__file__).with_name("relay.py")

End = Literal["near", "far"]

HEADING = """# weightsync over a long link

Two network namespaces on one machine, joined by a relay over TUN devices (`tests/net/relay.py`): 4 Gbit/s, 150 ms each
way, a queue of 200 ms, no loss, TCP with its buffers as the system has them. Everything runs on the same two cores:
server, TLS, relay, pullers. By itself the relay carries 6 to 9 Gbit/s here. Made by

```bash
uv run pytest -m slow tests/net --report docs/benchmarks/weightsync-net.md
```
"""


class Crossed(NamedTuple):
    """One direction of a link so far; `bytes` with headers and retransmissions, `dropped` by its full queue."""

    packets: int
    bytes: int
    dropped: int
    lost: int


class LongLink:
    """Two namespaces, `near` and `far`, and the link between them. Ends with `close`, and everything in it."""

    near_address = "10.77.0.1"
    far_address = "10.77.0.2"

    def __init__(self, *, rate_bits: float, delay_s: float, queue_s: float, loss: float) -> None:
        figures = [str(value) for value in (rate_bits, delay_s, queue_s, loss)]
        relay = [sys.executable, str(RELAY), self.near_address, self.far_address, *figures]
        self._enter = ["nsenter"]
        if os.geteuid():
            relay = ["unshare", "--user", "--map-root-user", *relay]
        self._programs: list[subprocess.Popen[bytes]] = []
        self._relay = subprocess.Popen(
            relay, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        told = self._relay.stdout.readline() if self._relay.stdout else ""
        if not told:
            _, error = self._relay.communicate(timeout=10)
            raise OSError((error.strip() or "the relay ended at once").splitlines()[-1])
        self._namespaces = json.loads(told)
        if os.geteuid():
            self._enter += ["--user", "--preserve-credentials", f"--target={self._namespaces['pid']}"]

    def command(self, end: End, *argv: str) -> list[str]:
        """`argv` as a command that runs at this end."""
        return [*self._enter, f"--net=/proc/{self._namespaces['pid']}/fd/{self._namespaces[end]}", *argv]

    def start(self, end: End, *argv: str, stdout: int | IO[Any] | None = None) -> subprocess.Popen[bytes]:
        """A program at this end, killed with the link."""
        program = subprocess.Popen(self.command(end, *argv), stdout=stdout)
        self._programs.append(program)
        return program

    def run(self, end: End, *argv: str, timeout: float = 60) -> str:
        """What a program at this end prints; raises CalledProcessError if it fails."""
        return subprocess.run(
            self.command(end, *argv), check=True, stdout=subprocess.PIPE, text=True, timeout=timeout
        ).stdout

    def wait_for_port(self, end: End, address: str, port: int, timeout: float = 30) -> None:
        """Until something at this end listens; asked at this end, so nothing crosses the link."""
        probe = f"import socket; socket.create_connection(({address!r}, {port}), 1).close()"
        deadline = time.monotonic() + timeout
        while subprocess.run(
            self.command(end, sys.executable, "-c", probe), stderr=subprocess.DEVNULL, check=False
        ).returncode:
            assert time.monotonic() < deadline, f"nothing listens at {address}:{port} after {timeout:.0f} s"
            time.sleep(0.05)

    def crossed(self) -> dict[str, Crossed]:
        """`to_far` and `to_near`, since the link was made."""
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write("\n")
        self._relay.stdin.flush()
        assert select.select([self._relay.stdout], [], [], 10)[0], "the relay does not answer"
        return {name: Crossed(**values) for name, values in json.loads(self._relay.stdout.readline()).items()}

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.wait(10)
        self._relay.communicate(timeout=10)

    def __enter__(self) -> LongLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Report:
    """Tables by title: rows that tests add, written as Markdown."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, str]]] = {}

    def add(self, title: str, **row: str) -> None:
        self.tables.setdefault(title, []).append({name.replace("_", " "): value for name, value in row.items()})

    def page(self) -> str:
        lines = [HEADING, f"Load average of the machine when these were measured: {os.getloadavg()[1]:.0f}.", ""]
        for title, rows in self.tables.items():
            lines += [f"## {title}", "", "| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
            lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
            lines.append("")
        return "\n".join(lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, help="write what the tests of tests/net measured to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report()


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--report", None)
    if path is not None and session.config.stash[REPORT].tables:
        path.write_text(session.config.stash[REPORT].page(), "utf-8")


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    if REPORT not in request.config.stash:  # where all tests are run, this conftest is loaded late
        request.config.stash[REPORT] = Report()
    return request.config.stash[REPORT]


@pytest.fixture
def long_link() -> Iterator[Callable[..., LongLink]]:
    """Makes links: by default 4 Gbit/s, 150 ms each way, a queue of 200 ms, no loss."""
    missing = [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]
    if sys.platform != "linux" or missing or not Path("/dev/net/tun").exists():
        pytest.skip(f"no network namespaces here: missing {', '.join(missing) or '/dev/net/tun'}")

    with ExitStack() as links:

        def make(*, rate_bits: float = 4e9, delay_s: float = 0.15, queue_s: float = 0.2, loss: float = 0.0) -> LongLink:
            try:
                link = LongLink(rate_bits=rate_bits, delay_s=delay_s, queue_s=queue_s, loss=loss)
            except OSError as error:
                pytest.skip(f"network namespaces or TUN devices are not allowed here: {error}")
            return links.enter_context(link)

        yield make
