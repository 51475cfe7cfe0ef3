"""What of a group is trained: every filter by itself, the chain, and what the trainer gets."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.dataflow import Context, Empty, Filter, PolicyFeed, PolicyGroup
from astraflow.dataflow.algorithms.catalogue import FILTERS
from astraflow.dataflow.algorithms.overlong import OverlongPenalty
from astraflow.dataflow.filters import FilterChain

CONTEXT = Context(model_id="a", n_samples=4)


def build(line: str) -> Filter:
    return FILTERS.build(line, CONTEXT)


def group_of(kit: Any, *rows: tuple[float, int, str]) -> PolicyGroup:
    """A group of one sample for each (reward, trained tokens, finish reason)."""
    samples = []
    for index, (reward, tokens, finish) in enumerate(rows):
        (sample,) = kit.samples(reward)
        sequence = msgspec.structs.replace(kit.sequence(reward=reward, length=2 * tokens), finish_reason=finish)
        samples.append(msgspec.structs.replace(sample, sample_id=f"t/{index}.0", sequence=sequence))
    return PolicyGroup(prompt=kit.prompts(1)[0]).keeping(samples)


def rewards(group: PolicyGroup) -> list[float]:
    return [sample.sequence.reward or 0.0 for sample in group.samples]


def test_dynamic_sampling_drops_groups_of_equal_rewards(kit: Any) -> None:
    zero = build("zero_advantage")
    (prompt,) = kit.prompts(1)
    for equal in ((0.0,) * 4, (1.0,) * 4, (0.1,) * 7, (0.5,)):
        assert zero.apply(kit.group(prompt, *equal)).samples == ()
    mixed = kit.group(prompt, 0.0, 1.0, 1.0)
    assert zero.apply(mixed) is mixed
    with pytest.raises(ValueError, match="with n_samples 1 every group is constant"):
        FILTERS.build("zero_advantage", Context(n_samples=1))


def test_reward_bounds_are_on_the_groups_mean(kit: Any) -> None:
    bounds = build("reward_bounds(low=0.25, high=0.75)")
    (prompt,) = kit.prompts(1)
    kept = [bool(bounds.apply(kit.group(prompt, *[1.0] * n, *[0.0] * (4 - n))).samples) for n in range(5)]
    assert kept == [False, True, True, True, False]
    with pytest.raises(ValueError, match="nothing would be kept"):
        build("reward_bounds(low=1, high=0)")


def test_length_bounds_are_on_trained_tokens(kit: Any) -> None:
    group = group_of(kit, (0.0, 2, "stop"), (1.0, 3, "stop"), (0.0, 5, "stop"), (1.0, 6, "stop"))
    left = build("length_bounds(least=3, most=5)").apply(group)
    assert [s.sample_id for s in left.samples] == ["t/1.0", "t/2.0"]
    assert {(s.group_mean, s.group_std, s.group_size) for s in left.samples} == {(0.5, math.sqrt(0.5), 2)}
    assert build("length_bounds(most=9)").apply(group) is group


def test_the_overlong_penalty_is_dapos(kit: Any) -> None:
    """DAPO, eq. 13 with L_max 10 and L_cache 4."""
    shaping = OverlongPenalty(longest=10, cushion=4)
    assert [shaping.penalty(n) for n in (1, 6, 7, 8, 10, 11, 99)] == [0, 0, -0.25, -0.5, -1, -1, -1]
    left = shaping.apply(group_of(kit, (1.0, 6, "stop"), (1.0, 8, "stop"), (0.0, 10, "length")))
    assert rewards(left) == [1.0, 0.5, -1.0]
    assert left.rewards == (1.0, 0.5, -1.0)
    (spread,) = {s.group_std for s in left.samples}
    assert spread == pytest.approx(statistics.stdev([1.0, 0.5, -1.0]))
    assert shaping.stats() == {"punished": pytest.approx(2 / 3)}
    short = group_of(kit, (1.0, 2, "stop"))
    assert shaping.apply(short) is short
    other = OverlongPenalty(longest=10, cushion=4)
    other.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(shaping.state())))
    assert other.stats() == shaping.stats()
    for wrong in ("longest=4, cushion=0", "longest=4, cushion=5"):
        with pytest.raises(ValueError, match="cushion is"):
            build(f"overlong_penalty({wrong})")


def test_truncated_trajectories_are_rejected_whole(kit: Any) -> None:
    group = group_of(kit, (1.0, 2, "stop"), (0.0, 3, "length"), (0.0, 3, "stop"), (1.0, 3, "stop"))
    second = msgspec.structs.replace(group.samples[2], sample_id="t/1.1")  # a later turn of the truncated one
    group = group.keeping((*group.samples, second))
    left = build("drop_truncated").apply(group)
    assert [s.sample_id for s in left.samples] == ["t/0.0", "t/2.0", "t/3.0"]
    assert {s.group_size for s in left.samples} == {3}


def test_filters_run_in_order_and_count_what_they_took(kit: Any) -> None:
    lines = ["overlong_penalty(longest=4, cushion=2)", "zero_advantage", "length_bounds(most=3)"]
    rows = ((1.0, 2, "stop"), (1.0, 3, "stop"), (1.0, 4, "length"))
    chain = FilterChain(lines, CONTEXT)
    left, dropped = chain.apply(group_of(kit, *rows))
    assert rewards(left) == [1.0, 0.5]
    assert dropped == {"length_bounds": ["t/2.0"]}
    left, dropped = FilterChain([lines[1], lines[0]], CONTEXT).apply(group_of(kit, *rows))
    assert (left.samples, dropped) == ((), {"zero_advantage": ["t/0.0", "t/1.0", "t/2.0"]}), (
        "before shaping, the rewards are equal"
    )
    chain.apply(group_of(kit, (1.0, 2, "stop"), (1.0, 2, "stop")))
    assert chain.stats() == {
        "overlong_penalty": {"seen": 5.0, "dropped": 0.0, "punished": 0.4},
        "zero_advantage": {"seen": 5.0, "dropped": 2.0},
        "length_bounds": {"seen": 3.0, "dropped": 1.0},
    }


def test_a_group_with_nothing_in_it_passes_by_every_filter(kit: Any) -> None:
    (prompt,) = kit.prompts(1)
    left, dropped = FilterChain(["zero_advantage"], CONTEXT).apply(kit.group(prompt))
    assert (left.samples, dropped) == ((), {})


async def test_a_policy_may_have_filters_of_its_own(kit: Any) -> None:
    feeds = [
        PolicyFeed(model_id="solver", batch_size=4, filters=("reward_bounds(high=0.5)",)),
        PolicyFeed(model_id="judge", batch_size=4),
    ]
    dataflow = kit.dataflow(feeds)
    await kit.start(dataflow, policies=("solver", "judge"))
    (task,) = await kit.lease(dataflow)
    await kit.submit(dataflow, task, [{"solver": 1.0, "judge": 1.0}] * 4)
    solver, judge = (await dataflow.status(Empty())).policies
    assert (solver.dropped, judge.dropped) == ({"reward_bounds": 4}, {"zero_advantage": 4})
    assert solver.data["reward_bounds"] == {"seen": 4.0, "dropped": 4.0}


async def test_the_trainer_gets_shaped_rewards_with_their_statistics(kit: Any) -> None:
    """The kit's sequences have three trained tokens: at a budget of 4 with a cushion of 2, half a penalty."""
    dataflow = kit.dataflow(
        [PolicyFeed(model_id="solver", batch_size=4)],
        filters=("overlong_penalty(longest=4, cushion=2)", "zero_advantage"),
    )
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    (task,) = await kit.lease(dataflow)
    await kit.mixed(dataflow, task)
    batch = (await kit.ask(dataflow, incarnation, 0)).batch
    assert sorted(s.sequence.reward for s in batch.samples) == [-0.5, -0.5, 0.5, 0.5]
    assert {s.group_mean for s in batch.samples} == {0.0}


@pytest.mark.parametrize("reward", [0.0, 1.0])
async def test_nothing_but_equal_rewards_fails_with_the_histogram(kit: Any, reward: float) -> None:
    from astraflow.dataflow import RunFailed

    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=4)], max_dropped_batches=3)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for task in await kit.lease(dataflow, 3):
        await kit.submit(dataflow, task, [{"solver": reward}] * 4)
    with pytest.raises(
        RunFailed, match=rf"3 groups \(12 samples\) in a row.*12 zero_advantage.*rewards: {reward:g} x 12"
    ):
        await kit.ask(dataflow, incarnation, 0)


async def test_a_group_of_one_can_be_trained_without_dynamic_sampling(kit: Any) -> None:
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=2)], n_samples=1, filters=())
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for task in await kit.lease(dataflow, 2):
        await kit.submit(dataflow, task, [{"solver": 1.0}])
    batch = (await kit.ask(dataflow, incarnation, 0)).batch
    assert {(s.group_mean, s.group_std, s.group_size) for s in batch.samples} == {(1.0, 0.0, 1)}


async def test_rewards_that_are_no_numbers_reach_no_filter_and_no_selector(kit: Any) -> None:
    """Fault 13: NaN is malformed and counted as failed, None is masked; the rest of the group is used."""
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=2)], selectors=("greso",))
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    (task,) = await kit.lease(dataflow)
    reply = await kit.submit(dataflow, task, [{"solver": r} for r in (math.nan, None, 0.0, 1.0)])
    assert len(reply.rejected) == 1
    batch = (await kit.ask(dataflow, incarnation, 0)).batch
    assert [(s.sequence.reward, s.group_size) for s in batch.samples] == [(0.0, 2), (1.0, 2)]
    (policy,) = (await dataflow.status(Empty())).policies
    assert policy.dropped == {"failed": 1, "masked": 1}


BROKEN = """
import msgspec

def fails(group):
    return 1 / 0

def nothing(group):
    replace = msgspec.structs.replace
    nan = float("nan")
    return group.keeping(replace(s, sequence=replace(s.sequence, reward=nan)) for s in group.samples)

class Forgetful:
    def admits(self, prompt):
        return True
    def chosen(self, prompt):
        pass
    def outcome(self, group):
        raise KeyError(group.prompt.id)
    def advance(self, version, epoch):
        pass
    def state(self):
        return None
    def restore(self, state):
        pass
    def stats(self):
        return {}

def refuses(prompt):
    raise LookupError(prompt.id)
"""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"filters": ("broken_algorithms:fails",)}, r"the filter fails failed on group sums/0: ZeroDivisionError"),
        ({"filters": ("broken_algorithms:nothing",)}, r"the filter nothing gave group sums/0 rewards \(nan"),
        (
            {"selectors": ("broken_algorithms:Forgetful",)},
            r"the selector Forgetful of policy 'solver' failed: KeyError",
        ),
        ({"selectors": ("broken_algorithms:refuses",)}, r"the selector refuses of policy 'solver' failed: LookupError"),
    ],
)
async def test_an_algorithm_that_fails_ends_the_run_and_no_worker(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    """Leases and submits go on as if nothing was; the trainer that waits hears which algorithm it was."""
    from astraflow.dataflow import RunFailed

    (tmp_path / "broken_algorithms.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_algorithms", raising=False)
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=8)], **fields)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for task in await kit.lease(dataflow):
        assert (await kit.mixed(dataflow, task)).accepted == 4
    assert await kit.lease(dataflow) == ()
    with pytest.raises(RunFailed, match=says):
        await kit.ask(dataflow, incarnation, 0)
