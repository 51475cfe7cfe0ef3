"""Weights over a long link: what several connections bring, and what a mirror saves."""

from __future__ import annotations

import json
import select
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
PORT = 8600


@pytest.fixture
def published(tmp_path: Path) -> Callable[[int], Path]:
    """Makes a store whose one version is an anchor of so many MB, which nothing compresses."""

    def make(megabytes: int) -> Path:
        place = tmp_path / f"{megabytes}MB"
        layers = range(megabytes // 8)
        tensors = {f"layer{n}": np.random.default_rng(n).integers(0, 256, 8_000_000, np.uint8) for n in layers}

        async def publish() -> None:
            await Publisher(DirectoryStore(place), stream="policy", incarnation=1).publish(tensors, 0)

        anyio.run(publish)
        return place

    return make


class Region:
    """A source served at the near end of a long link, and commands at the far end."""

    def __init__(self, link: Any, source: Path, directory: Path, port: int = PORT) -> None:
        self.link = link
        self.directory = directory = directory / str(port)
        directory.mkdir()
        authority = trustme.CA()
        certificate = authority.issue_cert(link.near_address)
        self.ca, self.token = directory / "ca.pem", directory / "token"
        cert, key = directory / "cert.pem", directory / "key.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        certificate.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        self.token.write_text("a-token-of-some-length")
        self.url = f"https://{link.near_address}:{port}"
        listen = ["--listen", f"{link.near_address}:{port}", "--cert", str(cert), "--key", str(key)]
        link.start("near", *WEIGHTSYNC, "serve", str(source), *listen, "--require-token-file", str(self.token))
        link.wait_for_port("near", link.near_address, port)

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
    assert select.select([puller.stdout], [], [], 120)[0], "a puller brings nothing"
    report: dict[str, Any] = json.loads(puller.stdout.readline())
    puller.terminate()
    return report


def seconds(report: dict[str, Any]) -> float:
    return float(report["stage_s"] + report["commit_s"])


GET = """
import json, ssl, sys, time, urllib.request
url, authority, token = sys.argv[1:]
started = time.monotonic()
asked = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
with urllib.request.urlopen(asked, context=ssl.create_default_context(cafile=authority)) as answer:
    while answer.read(1 << 20):
        pass
print(time.monotonic() - started)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_connections_fill_what_one_cannot(
    long_link: Callable[..., Any], published: Callable[[int], Path], tmp_path: Path, report: Any
) -> None:
    """By rate, each over a transfer that is long enough for it: one connection brings the small store's anchor, in one
    answer."""
    with long_link() as link:
        small, large = (Region(link, published(size), tmp_path, port) for size, port in ((32, 8601), (256, 8602)))
        rates: dict[int, float] = {}
        for connections, megabytes, region in ((1, 32, small), (16, 256, large), (32, 256, large)):
            before = region.crossed()
            if connections == 1:
                anchor = f"{region.url}/1/v/0/model.safetensors"
                program = [sys.executable, "-c", GET, anchor, str(region.ca), region.token.read_text()]
                took = float(link.run("far", *program, timeout=120))
            else:
                at = [region.url, *region.access, "--connections", str(connections)]
                took = seconds(first_report(region.pull(f"by{connections}", *at)))
            rates[connections] = megabytes / took
            crossed = region.crossed() - before
            assert megabytes * 1e6 < crossed < 1.3 * megabytes * 1e6
            report.add(
                "Connections: opened, the whole model fetched",
                connections="1: a plain GET" if connections == 1 else f"{connections}: a pull, verified and written",
                MB=str(megabytes),
                seconds=f"{took:.1f}",
                Gbit_per_s=f"{rates[connections] * 8 / 1000:.3f}",
                of_one_connection=f"{rates[connections] / rates[1]:.1f}x",
                MB_over_the_link=f"{crossed / 1e6:.0f}",
            )
    assert min(rates[16], rates[32]) > 3 * rates[1]
    assert max(rates[16], rates[32]) > 4 * rates[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mirrored", [False, True])
def test_four_pullers(
    long_link: Callable[..., Any], published: Callable[[int], Path], tmp_path: Path, report: Any, mirrored: bool
) -> None:
    megabytes = 96
    with long_link() as link:
        region = Region(link, published(megabytes), tmp_path)
        before, started = region.crossed(), time.monotonic()
        if mirrored:
            serve = ["--serve", f"127.0.0.1:{PORT}", "--cut-through", "--connections", "32"]
            link.start("far", *WEIGHTSYNC, "mirror", region.url, str(tmp_path / "mirror"), *region.access, *serve)
            link.wait_for_port("far", "127.0.0.1", PORT)
            at = [f"http://127.0.0.1:{PORT}"]
        else:
            at = [region.url, *region.access, "--connections", "32"]
        reports = [first_report(puller) for puller in [region.pull(f"puller{n}", *at) for n in range(4)]]
        elapsed, crossed = time.monotonic() - started, region.crossed() - before
    assert all(found["version"] == 0 for found in reports)
    copies = crossed / (megabytes * 1e6)
    report.add(
        f"Four pullers of {megabytes} MB, started at once, 32 connections over the link each or for the mirror",
        through="a mirror, cut-through" if mirrored else "the link, each by itself",
        MB_over_the_link=f"{crossed / 1e6:.0f}",
        copies=f"{copies:.2f}",
        slowest_pull_s=f"{max(map(seconds, reports)):.1f}",
        with_the_start_of_all_programs_s=f"{elapsed:.1f}",
    )
    if mirrored:
        assert copies < 1.25
    else:
        assert copies > 3.9
