"""The pure pieces by themselves: admission, leases, group statistics, buffer, balance, intervals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from astraflow.dataflow import Array, Context, RolloutGroup, RolloutTask, Sampling, TrainSample, Trajectory, pool_target
from astraflow.dataflow import wait_fraction as waiting
from astraflow.dataflow.admission import YieldAverage, has_room
from astraflow.dataflow.algorithms.catalogue import ORDERS
from astraflow.dataflow.buffer import PolicyBuffer
from astraflow.dataflow.estimates import average, pass_at, passes
from astraflow.dataflow.filters import FilterChain
from astraflow.dataflow.ingest import malformed, policy_group
from astraflow.dataflow.leases import LeaseBook
from astraflow.dataflow.policy import histogram

NUMBERS = itertools.count()


def a_task(kit: Any, n: int) -> RolloutTask:
    (prompt,) = kit.prompts(1)
    return RolloutTask(
        task_id="t", prompt=prompt, workflow="w", n_samples=n, sampling={"a": Sampling()}, seed=0, deadline_s=1.0
    )


def a_sample(kit: Any, version: int, name: str = "") -> TrainSample:
    return TrainSample(
        sequence=kit.sequence(version=version),
        sample_id=name or f"s{next(NUMBERS)}",
        group_id="g",
        group_mean=0.0,
        group_std=1.0,
        group_size=2,
    )


def a_buffer(order: str = "edf", bound: int = 99) -> PolicyBuffer:
    return PolicyBuffer(ORDERS.build(order, Context()), "samples", bound)


def dynamic_sampling() -> FilterChain:
    return FilterChain(["zero_advantage"], Context(n_samples=2))


def group_of(kit: Any, *trajectories: Trajectory | None) -> RolloutGroup:
    return RolloutGroup(task=a_task(kit, len(trajectories)), trajectories=trajectories)


def test_admission_counts_sequences() -> None:
    average = YieldAverage(8)
    assert average.value == 8
    for _ in range(100):
        average.add(0)
    assert average.value == 1.0, "groups that are filtered away do not open the gate without bound"
    for _ in range(100):
        average.add(16)
    assert average.value == pytest.approx(16, abs=0.01)
    assert has_room(running=2, average=8, buffered=8, cut=7, horizon=32)
    assert not has_room(running=2, average=8, buffered=8, cut=8, horizon=32)
    assert has_room(running=1, average=8, buffered=0, cut=0, horizon=12), "a batch must be reachable at staleness 0"


def test_leases_end_by_deadline_silence_or_not_being_named() -> None:
    book = LeaseBook()
    assert book.next_deadline() == math.inf
    book.grant("a", "w0", 0.0, 10.0)
    book.grant("b", "w0", 5.0, 10.0)
    book.grant("c", "w1", 5.0, 99.0)
    assert book.next_deadline() == 10.0
    assert book.of("w0") == ("a", "b")
    assert book.lost(9.9, ()) == ()
    assert book.lost(10.0, ()) == ("a",)
    assert book.lost(9.9, {"w1"}) == ("c",)
    book.name("w0", ("a", "c"), 8.0)
    assert book.unnamed("w0", before=6.0) == ("b",)
    assert book.unnamed("w1", before=6.0) == ("c",), "a name from another worker counts nothing"
    book.end("a")
    book.end("a")
    assert book.holder("a") is None
    assert book.holder("b") == "w0"
    book.grant("b", "w1", 6.0, 10.0)
    assert book.of("w0") == ()
    assert len(book) == 2


def test_group_statistics_are_over_trajectories(kit: Any) -> None:
    """Two sequences in one trajectory count once; the deviation is unbiased."""
    twice = Trajectory(sequences=(kit.sequence("a", 1.0), kit.sequence("a", 0.0), kit.sequence("b", 5.0)))
    once = kit.trajectory({"a": 1.0})
    masked = kit.trajectory({"a": None})
    made = policy_group(group_of(kit, twice, once, masked, None), "a")
    assert made.rewards == (0.5, 1.0)
    assert made.masked == 1
    assert [s.sample_id for s in made.samples] == ["t/0.0", "t/0.1", "t/1.0"]
    assert {(s.group_mean, s.group_std, s.group_size) for s in made.samples} == {(0.75, math.sqrt(0.125), 2)}


def test_a_group_of_one_has_no_spread(kit: Any) -> None:
    (sample,) = policy_group(group_of(kit, kit.trajectory({"a": 0.7})), "a").samples
    assert (sample.group_mean, sample.group_std, sample.group_size) == (0.7, 0.0, 1)


def test_equal_rewards_have_exactly_no_spread(kit: Any) -> None:
    made = policy_group(group_of(kit, *(kit.trajectory({"a": 0.1}) for _ in range(7))), "a")
    assert {s.group_std for s in made.samples} == {0.0}
    left, dropped = dynamic_sampling().apply(made)
    assert (left.samples, dropped) == ((), {"zero_advantage": [f"t/{index}.0" for index in range(7)]})


def test_the_zero_advantage_filter_is_per_policy(kit: Any) -> None:
    group = group_of(kit, kit.trajectory({"a": 0.0, "b": 1.0}), kit.trajectory({"a": 1.0, "b": 1.0}))
    chain = dynamic_sampling()
    assert chain.apply(policy_group(group, "a")) == (policy_group(group, "a"), {})
    assert chain.apply(policy_group(group, "b"))[1] == {"zero_advantage": ["t/0.1", "t/1.1"]}
    assert policy_group(group, "c").samples == ()


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_malformed(kit: Any, reward: float) -> None:
    problem = malformed(kit.result(a_task(kit, 1), 0, kit.trajectory({"a": reward})))
    assert problem is not None
    assert "task t sample 0 from w0" in problem
    assert "not finite" in problem
    assert malformed(kit.result(a_task(kit, 1), 0, kit.trajectory({"a": None}))) is None
    assert "metric 'm'" in str(malformed(kit.result(a_task(kit, 1), 0, Trajectory(metrics={"m": reward}))))


@pytest.mark.parametrize(("order", "first"), [("edf", "bd"), ("fifo", "ab"), ("lifo", "ed")])
def test_order(kit: Any, order: Any, first: str) -> None:
    buffer = a_buffer(order)
    for name, version in zip("abcde", (4, 2, 5, 3, 4), strict=True):
        assert buffer.add(a_sample(kit, version, name), 9)[1] == []
    assert "".join(entry.sample.sample_id for entry in buffer.take(2)) == first
    assert len(buffer) == 3


def test_staleness_at_its_bound(kit: Any) -> None:
    buffer = a_buffer()
    for version in (0, 1, 2, 3):
        buffer.add(a_sample(kit, version), 9)
    assert not buffer.drop_stale(2 - 2), "version 0 counts like any other"
    assert [entry.oldest for entry in buffer.drop_stale(4 - 2)] == [0, 1]
    assert [entry.oldest for entry in buffer.take(9)] == [2, 3]


def test_a_full_buffer_drops_its_oldest(kit: Any) -> None:
    buffer = a_buffer(bound=6)
    dropped = [buffer.add(a_sample(kit, version, str(version)), 99)[1] for version in range(10)]
    assert [entry.oldest for gone in dropped for entry in gone] == [0, 1, 2, 3]
    assert len(buffer) == 6
    assert [entry.sample.sample_id for entry in buffer.take(2)] == ["4", "5"]


def test_abandoned_versions_count_as_the_point_gone_back_to(kit: Any) -> None:
    buffer = a_buffer()
    for version in (1, 7, 9):
        buffer.add(a_sample(kit, version), 9)
    buffer.rebase(5)
    buffer.add(a_sample(kit, 8), 5)
    assert len(buffer.drop_stale(7 - 1)) == 4


def test_the_published_pool_rule() -> None:
    assert pool_target(6, 0.269, 100, 100) == math.ceil(6 / 0.731)
    assert pool_target(6, 0.10, 100, 10) == 6
    assert pool_target(6, 0.05, 100, 10) == 6
    assert pool_target(10, 0.0, 100, 50) == 6
    assert pool_target(10, 0.0, 100, 100) == 10, "never more than now without waiting"
    assert pool_target(10, 0.0, 0, 0) == 10
    assert pool_target(1, 0.99, 1, 1) == 20
    assert pool_target(0, 0.5, 1, 1) == 1
    assert waiting([(1.0, 3.0), (0.0, 4.0)]) == 0.125
    assert waiting([(9.0, 0.0)]) == 0.95
    assert waiting([]) == 0.0


def test_intervals_of_single_samples_are_wilsons() -> None:
    summary = average([(1.0, 1), (0.0, 1)] * 50, binary=True)
    assert (summary.mean, summary.n) == (0.5, 100)
    assert summary.low == pytest.approx(0.4038, abs=1e-3)
    assert summary.high == pytest.approx(0.5962, abs=1e-3)
    missing = average([(1.0, 1), (0.0, 1)] * 50 + [(0.0, 1)] * 100, binary=True)
    assert missing.mean == 0.25, "what never came back counts as 0"
    graded = average([(0.0, 1), (0.5, 1), (1.0, 1)], binary=False)
    assert graded.high - graded.mean == pytest.approx(1.96 * 0.5 / math.sqrt(3), rel=1e-3)
    perfect = average([(1.0, 1)], binary=True)
    assert perfect.high == 1.0
    assert 0 < perfect.low < 1


def test_samples_of_one_prompt_are_not_independent() -> None:
    """Prompts that are all right or all wrong say as much as one sample of each."""
    alike = average([(8.0, 8), (0.0, 8)] * 25, binary=True)
    single = average([(1.0, 1), (0.0, 1)] * 25, binary=True)
    assert (alike.mean, alike.n) == (0.5, 400)
    assert alike.high - alike.low == pytest.approx(single.high - single.low, rel=0.02)
    mixed = average([(4.0, 8)] * 50, binary=True)
    assert mixed.high - mixed.low < (single.high - single.low) / 2
    perfect = average([(8.0, 8)] * 20, binary=True)
    assert perfect.low == pytest.approx(average([(1.0, 1)] * 20, binary=True).low), "20 prompts, not 160 samples"


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Prompts of different difficulty, 4 samples each: 95 % of the intervals hold the true mean."""
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        correct = draw.binomial(4, draw.beta(0.6, 0.9, size=60))
        summary = average([(float(c), 4) for c in correct], binary=True)
        covered += summary.low <= 0.4 <= summary.high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 0, 2), (4, 1, 2), (4, 3, 2), (5, 2, 5), (6, 2, 4), (3, 1, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, correct: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at(k, n, correct) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_over_prompts() -> None:
    summary = passes(2, 4, [0, 1, 4, 4])
    assert summary.mean == pytest.approx((0 + 0.5 + 1 + 1) / 4)
    assert summary.n == 4
    assert 0.0 <= summary.low < summary.mean < summary.high <= 1.0
    none = passes(2, 4, [0, 0])
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high > 0.5, "two prompts prove little"


def test_histograms_show_values_or_ranges() -> None:
    assert histogram([0.0, 1.0, 0.0]) == "0 x 2, 1 x 1"
    assert histogram([]) == "none"
    assert histogram([i / 100 for i in range(100)]).count("x 10") == 10


def test_an_array_of_another_byte_order_cannot_travel() -> None:
    with pytest.raises(ValueError, match="dtype >i4 cannot travel"):
        Array.of(np.arange(3, dtype=">i4"))
    assert Array.of(np.arange(3, dtype=np.int32)).numpy().tolist() == [0, 1, 2]
