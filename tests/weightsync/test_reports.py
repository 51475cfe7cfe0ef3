"""What a publish and a pull say of themselves, and the codec that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from astraflow.weightsync import (
    MemoryStore,
    Publisher,
    Puller,
    PullReport,
    SafetensorsSink,
    Store,
    TensorSink,
    WrongBase,
)
from astraflow.weightsync.codecs import CODECS, Codec

Arrays = dict[str, NDArray[Any]]
Copy = Callable[[Arrays], Arrays]
Same = Callable[[Arrays, Arrays], bool]


def weights(step: int, elements: int = 300_000) -> Arrays:
    """After `step` steps, each of which moves every weight by about as much, as an optimiser does."""
    rng = np.random.default_rng(0)
    master = rng.normal(scale=0.02, size=elements).astype(np.float32)
    for number in range(step):
        master += (2e-7 * np.random.default_rng(number + 1).normal(size=elements)).astype(np.float32)
    return {"w": master.astype(np.float16).reshape(100, -1), "scale": np.ones(7, np.float32) + np.float32(step)}


async def pulled(puller: Puller) -> PullReport:
    report = await puller.pull()
    assert report is not None
    return report


async def test_a_publish_and_a_pull_account_for_themselves(store: Store, copy: Copy, same: Same) -> None:
    publisher = Publisher(store, stream="s", incarnation=1)
    live = copy(weights(0))
    puller = Puller(store, TensorSink(live))
    with capture_logs() as logs:
        first = await publisher.publish(weights(0), 0)
        full = await pulled(puller)
        second = await publisher.publish(weights(1), 1)
        delta = await pulled(puller)
    assert same(live, weights(1))

    assert (first.density, first.codecs, first.diff_s, first.encode_s) == (1.0, {}, 0.0, 0.0)
    assert first.write_s > 0
    assert 0.9 < first.ratio < 1
    assert second.codecs == {"l2": 1, "planes": 1}
    assert 0.005 < second.density < 0.1
    assert second.ratio == second.dense_bytes / second.delta_bytes > 10
    assert min(second.diff_s, second.encode_s, second.write_s) > 0

    assert (full.kind, full.density, full.codecs, full.decode_s) == ("full", 1.0, {}, 0.0)
    assert full.dense_bytes == delta.dense_bytes == second.dense_bytes
    assert (delta.kind, delta.density, delta.codecs) == ("delta", second.density, second.codecs)
    assert delta.ratio == second.ratio
    parts = (delta.transfer_s, delta.verify_s, delta.decode_s, delta.apply_s)
    assert min(parts) > 0
    assert delta.commit_s > 0

    events = [entry for entry in logs if entry["event"] in ("published", "pulled")]
    assert [entry["event"] for entry in events] == ["published", "pulled", "published", "pulled"]
    assert events[2]["delta_bytes"] == second.delta_bytes
    assert events[3]["decode_s"] == delta.decode_s


@pytest.mark.parametrize("codec", get_args(Codec))
async def test_the_codec_that_is_asked_for(
    memory: MemoryStore, codec: Codec, copy: Copy, same: Same, tmp_path: Path
) -> None:
    publisher = Publisher(memory, stream="s", incarnation=1, codec=codec)
    live = copy(weights(0))
    pullers = [Puller(memory, TensorSink(live)), Puller(memory, SafetensorsSink(tmp_path))]
    for version in range(3):
        report = await publisher.publish(weights(version), version)
        for puller in pullers:
            await pulled(puller)
        assert same(live, weights(version))
    assert ("l2" if codec == "auto" else codec) in report.codecs


def test_an_unknown_codec_is_named(memory: MemoryStore) -> None:
    with pytest.raises(ValueError, match=f"codec 'zip' is unknown; there are {', '.join(CODECS)}"):
        Publisher(memory, stream="s", incarnation=1, codec="zip")  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["little", "much"])
async def test_a_base_aware_delta_on_other_weights_is_a_wrong_base(
    memory: MemoryStore, change: str, copy: Copy, same: Same
) -> None:
    """Whether the decoder notices (a rank that its class has not), or the digest."""
    publisher = Publisher(memory, stream="s", incarnation=1, codec="l2")
    live = copy(weights(0))
    puller = Puller(memory, TensorSink(live))
    await publisher.publish(weights(0), 0)
    await pulled(puller)
    await publisher.publish(weights(1), 1)
    if change == "little":
        live["w"][50, 50] += np.float16(1)
    else:
        live["w"][:] = 1
    behind = copy(live)
    with pytest.raises(WrongBase):
        await puller.pull()
    assert same(live, behind)
    assert (await pulled(puller)).kind == "full"
    assert same(live, weights(1))


async def test_a_chain_that_comes_and_goes(memory: MemoryStore, copy: Copy, same: Same, tmp_path: Path) -> None:
    """Several versions behind, over values that change and change back, in a file and in memory."""
    publisher = Publisher(memory, stream="s", incarnation=1)
    live = copy(weights(0))
    pullers = [Puller(memory, TensorSink(live)), Puller(memory, SafetensorsSink(tmp_path))]
    await publisher.publish(weights(0), 0)
    for puller in pullers:
        await pulled(puller)
    for version, step in enumerate((1, 2, 1, 1, 3), start=1):
        await publisher.publish(weights(step), version)
    for puller in pullers:
        report = await pulled(puller)
        assert (report.kind, report.version) == ("chain", 5)
        assert report.codecs["l2"] == 4
    assert same(live, weights(3))
