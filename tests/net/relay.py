"""A long link between two network namespaces: a relay that hands packets from one TUN device to another, late.

    relay.py NEAR_ADDRESS FAR_ADDRESS RATE_BITS DELAY_S QUEUE_S LOSS

Each direction has a rate in bits a second, a delay in seconds one way, a queue that holds QUEUE_S seconds of traffic
and drops what comes on top, and a share of packets lost. When both ends are up it prints one line of JSON: its pid and
the descriptors that hold the namespaces, for `nsenter --net=/proc/PID/fd/N`. After that it answers each line on stdin
with the counters of both directions, and ends, devices and namespaces with it, when stdin does.

TCP hands over segments in bundles of up to 64 KiB with their checksums still to be made (TSO) and takes them the same
way, so the congestion control sees an MTU of 1500 while Python handles a packet in about 10 us.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from typing import NamedTuple

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
VNET_HEADER = 10
LARGEST = VNET_HEADER + 65536
QUEUE_PACKETS = 50_000
BATCH = 256
TICK_S = 0.0005
"""Packets that are due within a tick go out together."""

COUNTERS = struct.Struct("4Q")
"""Packets, bytes delivered; packets dropped by the queue, lost at random."""


class Line(NamedTuple):
    rate_bits: float
    delay_s: float
    queue_s: float
    loss: float


def open_tun(name: str, own: str, peer: str) -> int:
    """A TUN device in this process's network namespace, with its address and a route to its peer."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    for command in (
        "ip link set lo up",
        f"ip address add {own} peer {peer} dev {name}",
        f"ip link set {name} mtu 1500 txqueuelen {QUEUE_PACKETS} up",
    ):
        subprocess.run(command.split(), check=True)
    return descriptor


def new_namespace() -> int:
    """Move this process into a network namespace of its own; a descriptor that holds it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"no network namespace: {os.strerror(number)}")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def carry(source: int, sink: int, line: Line, counters: memoryview, alive: int) -> None:
    """One direction, until `alive` is at its end."""
    waiting: deque[tuple[float, bytes]] = deque()
    free = 0.0
    packets = octets = dropped = lost = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            packet = waiting.popleft()[1]
            os.write(sink, packet)
            packets += 1
            octets += len(packet) - VNET_HEADER
        for _ in range(BATCH):
            try:
                packet = os.read(source, LARGEST)
            except BlockingIOError:
                break
            if max(free - now, 0) > line.queue_s:
                dropped += 1
            elif line.loss and random.random() < line.loss:
                lost += 1
            else:
                free = max(free, now) + (len(packet) - VNET_HEADER) * 8 / line.rate_bits
                waiting.append((free + line.delay_s, packet))
        COUNTERS.pack_into(counters, 0, packets, octets, dropped, lost)
        wait = max(TICK_S, waiting[0][0] - time.monotonic()) if waiting else 1.0
        if alive in select.select([source, alive], [], [], wait)[0]:
            return
        time.sleep(TICK_S)


def main() -> None:
    near_address, far_address, *figures = sys.argv[1:]
    line = Line(*map(float, figures))
    near_namespace = new_namespace()
    near = open_tun("long0", near_address, far_address)
    far_namespace = new_namespace()
    far = open_tun("long0", far_address, near_address)
    counters = memoryview(mmap.mmap(-1, 2 * COUNTERS.size))
    alive, held = os.pipe()
    for number, ends in enumerate(((near, far), (far, near))):
        if not os.fork():
            os.close(held)
            carry(*ends, line, counters[number * COUNTERS.size :], alive)
            os._exit(0)
    print(json.dumps({"pid": os.getpid(), "near": near_namespace, "far": far_namespace}), flush=True)
    for _ in sys.stdin:
        names = ("packets", "bytes", "dropped", "lost")
        told = [dict(zip(names, values, strict=True)) for values in COUNTERS.iter_unpack(counters)]
        print(json.dumps({"to_far": told[0], "to_near": told[1]}), flush=True)


if __name__ == "__main__":
    main()
