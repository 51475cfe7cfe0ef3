"""Figures per method, counted where the frames pass, as structures and as Prometheus text.

Counting is a few additions a call: fixed buckets, nothing allocated, nothing locked (all on the event loop's thread).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Literal

import msgspec

BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds in seconds; a last bucket takes what is longer."""

FAMILIES = {
    "calls_total": ("counter", "Calls begun."),
    "failures_total": ("counter", "Calls that ended in an error."),
    "in_flight": ("gauge", "Calls begun and not ended."),
    "sent_bytes_total": ("counter", "Payload bytes sent."),
    "received_bytes_total": ("counter", "Payload bytes received."),
    "latency_seconds": ("histogram", "From the beginning of a call to its final frame."),
    "queue_seconds_total": ("counter", "What calls waited before they began."),
}


class Histogram(msgspec.Struct):
    """`counts[i]` durations lay above `BUCKETS[i - 1]` and not above `BUCKETS[i]`; `total` is their sum in seconds."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class MethodStats(msgspec.Struct):
    """Since the start: calls begun, those that ended in an error, payload bytes either way; `in_flight` is of now.

    `latency` is of ended calls, from begin to final frame, a stream's to its end. `queue_seconds` is what all calls
    together waited before that: on the client for a place on the connection, on the server for the handler to start.
    """

    calls: int = 0
    failures: int = 0
    in_flight: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    latency: Histogram = msgspec.field(default_factory=Histogram)
    queue_seconds: float = 0.0

    def begin(self, waited: float) -> None:
        self.calls += 1
        self.in_flight += 1
        self.queue_seconds += waited

    def end(self, seconds: float, failed: bool) -> None:
        self.in_flight -= 1
        self.failures += failed
        latency = self.latency
        latency.counts[bisect_left(BUCKETS, seconds)] += 1
        latency.total += seconds


def prometheus(
    statistics: Mapping[str, MethodStats],
    side: Literal["server", "client"] = "server",
    labels: Mapping[str, str] | None = None,
) -> str:
    """The figures in Prometheus' text format, version 0.0.4: `astraflow_rpc_SIDE_…{method="…"}`.

    `labels` are added to every line, as {"service": "dataflow"}. The texts of both sides may be joined; those of
    several services are two scrapes.
    """
    lines: list[str] = []
    for family, (kind, meaning) in FAMILIES.items():
        name = f"astraflow_rpc_{side}_{family}"
        lines += (f"# HELP {name} {meaning}", f"# TYPE {name} {kind}")
        for method, figures in statistics.items():
            lines += _samples(name, family, {**(labels or {}), "method": method}, figures)
    return "\n".join(lines) + "\n"


def _samples(name: str, family: str, labels: Mapping[str, str], figures: MethodStats) -> Iterator[str]:
    match family:
        case "latency_seconds":
            yield from _buckets(name, labels, figures.latency)
        case "sent_bytes_total":
            yield f"{name}{_braces(labels)} {figures.bytes_sent}"
        case "received_bytes_total":
            yield f"{name}{_braces(labels)} {figures.bytes_received}"
        case _:
            yield f"{name}{_braces(labels)} {getattr(figures, family.removesuffix('_total'))}"


def _buckets(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    bounds = [*map(str, BUCKETS), "+Inf"]
    for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
        yield f"{name}_bucket{_braces({**labels, 'le': bound})} {count}"
    yield f"{name}_sum{_braces(labels)} {histogram.total}"
    yield f"{name}_count{_braces(labels)} {histogram.count}"


def _braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
