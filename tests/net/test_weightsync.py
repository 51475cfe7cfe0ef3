"""Weights over a long link: what several connections bring, and what a mirror saves."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import trustme

from astraflow.weightsync import DirectoryStore, Publisher

WEIGHTSYNC = [sys.executable, "-m", "astraflow.weightsync"]
MEGABYTES = 96
PORT = 8600


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A store whose newest version is an anchor of MEGABYTES, which nothing compresses."""
    tensors = {
        f"layer{n}": np.random.default_rng(n).integers(0, 256, 8_000_000, np.uint8) for n in range(MEGABYTES // 8)
    }

    async def publish() -> None:
        await Publisher(DirectoryStore(tmp_path / "source"), stream="policy", incarnation=1).publish(tensors, 0)

    anyio.run(publish)
    return tmp_path / "source"


class Region:
    """A source served at the near end of a long link, and commands at the far end."""

    def __init__(self, link: Any, source: Path, directory: Path) -> None:
        self.link = link
        self.directory = directory
        authority = trustme.CA()
        certificate = authority.issue_cert(link.near_address)
        self.ca, self.token = directory / "ca.pem", directory / "token"
        cert, key = directory / "cert.pem", directory / "key.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        certificate.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        self.token.write_text("a-token-of-some-length")
        self.url = f"https://{link.near_address}:{PORT}"
        listen = ["--listen", f"{link.near_address}:{PORT}", "--cert", str(cert), "--key", str(key)]
        link.start("near", *WEIGHTSYNC, "serve", str(source), *listen, "--require-token-file", str(self.token))
        link.wait_for_port("near", link.near_address, PORT)

    @property
    def access(self) -> list[str]:
        return ["--ca-file", str(self.ca), "--token-file", str(self.token)]

    def crossed(self) -> int:
        """Bytes that came over the link."""
        return int(self.link.crossed()["to_far"].bytes)

    def pull(self, name: str, *args: str) -> Any:
        """A puller at the far end that stays; its first line of output is its report."""
        command = [*WEIGHTSYNC, "pull", *args, str(self.directory / name), "--json", "--follow"]
        return self.link.start("far", *command, stdout=-1)


def first_report(puller: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(puller.stdout.readline())
    puller.terminate()
    return report


def seconds(report: dict[str, Any]) -> float:
    return float(report["stage_s"] + report["commit_s"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_connections_fill_what_one_cannot(
    long_link: Callable[..., Any], source: Path, tmp_path: Path, report: Any
) -> None:
    with long_link() as link:
        region = Region(link, source, tmp_path)
        took: dict[int, float] = {}
        for connections in (1, 16, 32):
            before = region.crossed()
            found = first_report(
                region.pull(f"by{connections}", region.url, *region.access, "--connections", str(connections))
            )
            took[connections] = seconds(found)
            crossed = region.crossed() - before
            assert MEGABYTES * 1e6 < crossed < 1.3 * MEGABYTES * 1e6
            report.add(
                f"One puller, {MEGABYTES} MB, cold connections",
                connections=str(connections),
                seconds=f"{took[connections]:.1f}",
                Gbit_per_s=f"{MEGABYTES * 8 / 1000 / took[connections]:.2f}",
                of_one_connection=f"{took[1] / took[connections]:.1f}x",
                MB_over_the_link=f"{crossed / 1e6:.0f}",
            )
    assert took[1] > 4 * took[16]
    assert took[1] > 4 * took[32]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mirrored", [False, True])
def test_four_pullers(long_link: Callable[..., Any], source: Path, tmp_path: Path, report: Any, mirrored: bool) -> None:
    with long_link() as link:
        region = Region(link, source, tmp_path)
        before, started = region.crossed(), time.monotonic()
        if mirrored:
            serve = ["--serve", f"127.0.0.1:{PORT}", "--cut-through", "--connections", "32"]
            link.start("far", *WEIGHTSYNC, "mirror", region.url, str(tmp_path / "mirror"), *region.access, *serve)
            link.wait_for_port("far", "127.0.0.1", PORT)
            pullers = [region.pull(f"puller{n}", f"http://127.0.0.1:{PORT}") for n in range(4)]
        else:
            pullers = [region.pull(f"puller{n}", region.url, *region.access, "--connections", "32") for n in range(4)]
        reports = [first_report(puller) for puller in pullers]
        elapsed, crossed = time.monotonic() - started, region.crossed() - before
    assert all(found["version"] == 0 for found in reports)
    share = crossed / (MEGABYTES * 1e6)
    report.add(
        f"Four pullers, {MEGABYTES} MB each, 32 connections, started at once",
        through="a mirror, cut-through" if mirrored else "the link, each by itself",
        MB_over_the_link=f"{crossed / 1e6:.0f}",
        copies_over_the_link=f"{share:.2f}",
        slowest_pull_s=f"{max(map(seconds, reports)):.1f}",
        with_the_programs_start_s=f"{elapsed:.1f}",
    )
    if mirrored:
        assert share < 1.25
    else:
        assert share > 3.9
