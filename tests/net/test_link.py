"""The emulated link is what it says: late, bounded, lossy where asked, and it counts what crosses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
while True:
    peer, _ = listener.accept()
    while data := peer.recv(1 << 20):
        peer.sendall(data)
    peer.close()
"""

CLIENT = """
import json, socket, sys, threading, time
address, size = sys.argv[1], int(sys.argv[2])
started = time.monotonic()
peer = socket.create_connection((address, 5000))
connected = time.monotonic()
sender = threading.Thread(target=lambda: (peer.sendall(bytes(size)), peer.shutdown(socket.SHUT_WR)))
sender.start()
got = 0
while data := peer.recv(1 << 20):
    got += len(data)
sender.join()
print(json.dumps({"connect_s": connected - started, "transfer_s": time.monotonic() - connected, "got": got}))
"""


def echo(link: Any, size: int) -> dict[str, float]:
    server = link.start("near", sys.executable, "-c", SERVER, link.near_address, stdout=subprocess.PIPE)
    assert server.stdout.readline()
    told: dict[str, float] = json.loads(link.run("far", sys.executable, "-c", CLIENT, link.near_address, str(size)))
    return told


def test_it_is_late_and_counts(long_link: Callable[..., Any]) -> None:
    with long_link(rate_bits=1e9, delay_s=0.1) as link:
        told = echo(link, 300_000)
        crossed = link.crossed()
    assert told["got"] == 300_000
    assert told["connect_s"] >= 0.2
    assert told["transfer_s"] >= 0.4, "a slow start of ten segments needs two round trips for this much"
    for direction in crossed.values():
        assert 300_000 < direction.bytes < 400_000
        assert direction.dropped == direction.lost == 0


def test_its_rate_and_its_queue_are_bounded(long_link: Callable[..., Any]) -> None:
    with long_link(rate_bits=40e6, delay_s=0.005, queue_s=0.02) as link:
        told = echo(link, 4_000_000)
        crossed = link.crossed()
    assert told["got"] == 4_000_000
    assert told["transfer_s"] >= 4_000_000 * 8 / 40e6
    assert crossed["to_near"].dropped > 0


def test_it_loses_packets(long_link: Callable[..., Any]) -> None:
    with long_link(rate_bits=1e9, delay_s=0.002, loss=0.1) as link:
        told = echo(link, 2_000_000)
        crossed = link.crossed()
    assert told["got"] == 2_000_000
    assert crossed["to_near"].lost + crossed["to_far"].lost > 0
