"""Which prompts are rolled out: every rule by itself, its state, and several policies together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from astraflow.dataflow import Context, DataflowConfig, Dice, PolicyFeed, Prompt, Sampling, Selector
from astraflow.dataflow.algorithms.catalogue import SELECTORS
from astraflow.dataflow.algorithms.greso import Greso
from astraflow.dataflow.algorithms.table import PromptTable
from astraflow.dataflow.selection import FORCED_AFTER, Selection

CONTEXT = Context(seed=7, model_id="a", n_samples=4)
EASY, HARD, MIXED = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


def build(line: str) -> Selector:
    return SELECTORS.build(line, CONTEXT)


def share(selector: Selector, prompt: Prompt, draws: int = 4000) -> float:
    return sum(selector.admits(prompt) for _ in range(draws)) / draws


def selection(*lines: str, policies: tuple[str, ...] = ("a",)) -> Selection:
    return Selection(
        DataflowConfig(
            policies=tuple(PolicyFeed(model_id=name, batch_size=4) for name in policies),
            workflow="w",
            n_samples=4,
            sampling={name: Sampling() for name in policies},
            selectors=lines,
        )
    )


# --- GRESO -------------------------------------------------------------------------------------------------------


def test_greso_counts_consecutive_results_without_variance(kit: Any) -> None:
    greso, (prompt, other) = Greso(CONTEXT), kit.prompts(2)
    expected = {EASY: [0.5, 0.25, 0.125, 0.10, 0.10], HARD: [0.5, 0.40, 0.40]}
    for rewards, probabilities in expected.items():
        assert greso.probability(prompt) == 1.0
        for probability in probabilities:
            greso.outcome(kit.group(prompt, *rewards))
            assert greso.probability(prompt) == pytest.approx(probability)
        greso.outcome(kit.group(prompt, *MIXED))
    assert greso.probability(prompt) == greso.probability(other) == 1.0


def test_greso_a_change_of_kind_restarts_at_one(kit: Any) -> None:
    greso, (prompt,) = Greso(CONTEXT), kit.prompts(1)
    for rewards in (EASY, EASY, EASY, HARD):
        greso.outcome(kit.group(prompt, *rewards))
    assert greso.probability(prompt) == 0.5
    greso.outcome(kit.group(prompt, 0.5, 0.5))
    assert greso.probability(prompt) == 0.40, "equal rewards of 0.5 are hard: easy is above 0.5"


def test_greso_submits_with_its_probability(kit: Any) -> None:
    greso, (prompt,) = Greso(CONTEXT), kit.prompts(1)
    for _ in range(2):
        greso.outcome(kit.group(prompt, *EASY))
    deviation = math.sqrt(0.25 * 0.75 / 4000)
    assert abs(share(greso, prompt) - 0.25) < 4 * deviation


@pytest.mark.parametrize(
    ("easy", "hard", "groups", "expected"),
    [
        (1, 2, 12, {"p_easy": 0.49, "p_hard": 0.51}),  # 1/12 >= 0.083, 2/12 < 0.167
        (0, 3, 12, {"p_easy": 0.51, "p_hard": 0.49}),
        (12, 0, 12, {"p_easy": 0.49, "p_hard": 0.51}),
        (0, 0, 12, {"p_easy": 0.51, "p_hard": 0.51}),
        (0, 0, 0, {"p_easy": 0.50, "p_hard": 0.50}),
    ],
)
def test_greso_moves_its_probabilities_once_a_version(
    kit: Any, easy: int, hard: int, groups: int, expected: dict[str, float]
) -> None:
    greso, (prompt,) = Greso(CONTEXT), kit.prompts(1)
    results = [EASY] * easy + [HARD] * hard + [MIXED] * (groups - easy - hard)
    for rewards in results:
        greso.outcome(kit.group(prompt, *rewards))
    greso.advance(1, 1)
    assert greso.stats() | expected == pytest.approx(greso.stats())
    greso.advance(1, 1)
    greso.advance(2, 1)
    assert greso.stats() | expected == pytest.approx(greso.stats()), "no groups since the last version"


def test_greso_warms_up_for_an_epoch_and_stays_in_its_bounds(kit: Any) -> None:
    greso, (prompt,) = Greso(CONTEXT), kit.prompts(1)
    greso.outcome(kit.group(prompt, *EASY))
    greso.advance(1, 0)
    assert greso.stats()["p_easy"] == 0.5
    for version in range(2, 120):
        greso.outcome(kit.group(prompt, *EASY))
        greso.advance(version, 1)
    assert (greso.stats()["p_easy"], greso.stats()["p_hard"]) == (0.01, 0.99)
    greso.advance(3, 1)
    greso.outcome(kit.group(prompt, *MIXED))
    greso.advance(4, 1)
    assert greso.stats()["p_easy"] == pytest.approx(0.02), "the clock goes on from where a rollback put it"


# --- the others --------------------------------------------------------------------------------------------------


def test_filter_solved_stops_at_its_threshold(kit: Any) -> None:
    solved, (prompt,) = build("filter_solved"), kit.prompts(1)
    results = 0
    while solved.admits(prompt):
        solved.outcome(kit.group(prompt, 1.0, 1.0))
        results += 1
    assert results == math.ceil(math.log(0.05) / math.log(0.9)), "1 - 0.9^n >= 0.95"
    assert solved.stats() == {"known": 1.0, "solved": 1.0}
    solved.outcome(kit.group(prompt, 0.0, 0.0))
    assert solved.admits(prompt)


def test_curriculum_aims_at_its_target(kit: Any) -> None:
    curriculum, prompts = build("curriculum(target=0.5, width=0.25, floor=0.05, decay=0.5)"), kit.prompts(4)
    for prompt, rate in zip(prompts, (0.0, 0.25, 0.5), strict=False):
        curriculum.outcome(kit.group(prompt, rate, rate))
    wanted = [math.exp(-2), math.exp(-0.5), 1.0, 1.0]
    for prompt, probability in zip(prompts, wanted, strict=True):
        assert abs(share(curriculum, prompt) - probability) <= 4 * math.sqrt(0.25 / 4000)
    curriculum.outcome(kit.group(prompts[0], 1.0, 1.0))
    assert share(curriculum, prompts[0]) == 1.0, "half of 0 and half of 1 is on target"
    for _ in range(20):
        curriculum.outcome(kit.group(prompts[0], 3.0, 3.0))
    assert 0.03 < share(curriculum, prompts[0]) < 0.07, "the floor keeps it in sight"


def test_stages_open_one_after_another(kit: Any) -> None:
    stages = build("stages(levels=['easy', 'medium', 'hard'], threshold=0.7, window=4)")
    easy, medium, hard, other = (
        msgspec.structs.replace(prompt, metadata={"level": level})
        for prompt, level in zip(kit.prompts(4), ("easy", "medium", "hard", "no such"), strict=True)
    )
    assert [stages.admits(p) for p in (easy, medium, hard, other)] == [True, False, False, False]
    for rewards in (MIXED, EASY, EASY):
        stages.outcome(kit.group(easy, *rewards))
    stages.outcome(kit.group(medium, *EASY))
    assert not stages.admits(medium), "three of four are in, and the result of another level does not count"
    stages.outcome(kit.group(easy, *EASY))
    assert [stages.admits(p) for p in (easy, medium, hard)] == [True, True, False]
    for _ in range(8):
        stages.outcome(kit.group(easy, *EASY))
    assert not stages.admits(hard)
    for _ in range(12):
        stages.outcome(kit.group(medium, *EASY))
    assert [stages.admits(p) for p in (easy, medium, hard, other)] == [True, True, True, False]


def test_a_prompt_cools_down(kit: Any) -> None:
    rest, (prompt, other) = build("cool_down(versions=3)"), kit.prompts(2)
    rest.advance(5, 0)
    assert rest.admits(prompt)
    rest.chosen(prompt)
    admitted = []
    for version in (5, 6, 7, 8):
        rest.advance(version, 0)
        admitted.append(rest.admits(prompt))
    assert admitted == [False, False, False, True]
    assert rest.admits(other)
    rest.advance(2, 0)
    assert not rest.admits(prompt), "after a rollback it rests until the trainer has come that far again"


# --- state -------------------------------------------------------------------------------------------------------

STATEFUL = [
    "greso",
    "filter_solved(decay=0.5, threshold=0.7)",
    "curriculum",
    "stages(levels=[0, 1, 2], threshold=0.84, window=4)",
    "cool_down(versions=2)",
    "accept_all",
]


@pytest.mark.parametrize("line", STATEFUL)
def test_a_restored_selector_decides_as_if_it_had_never_stopped(kit: Any, line: str) -> None:
    prompts = [msgspec.structs.replace(p, metadata={"level": i % 3}) for i, p in enumerate(kit.prompts(6))]
    dice = Dice(11)

    def live(selector: Selector, roll: Callable[[], float], first: int, last: int) -> list[bool]:
        decisions = []
        for step in range(first, last):
            prompt = prompts[int(roll() * len(prompts))]
            decisions.append(selector.admits(prompt))
            if decisions[-1] or roll() < 0.3:
                selector.chosen(prompt)
                selector.outcome(kit.group(prompt, *(EASY, HARD, MIXED)[int(roll() * 3)]))
            if step % 5 == 0:
                selector.advance(step // 5, step // 50)
        return decisions

    one = build(line)
    live(one, dice.roll, 0, 60)
    other = build(line)
    other.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(one.state())))
    rolled = [dice.roll() for _ in range(2000)]
    decided = live(one, iter(rolled).__next__, 60, 400)
    assert live(other, iter(rolled).__next__, 60, 400) == decided
    assert other.stats() == one.stats()
    if line != "accept_all":
        assert len(set(decided)) == 2, "otherwise this test shows nothing"
        with pytest.raises(ValueError, match="the state is no"):
            other.restore({"of": "another"})


def test_dice_are_fair_and_their_state_is_a_number() -> None:
    dice = Dice(3)
    rolls = [dice.roll() for _ in range(4000)]
    assert 0.48 < sum(rolls) / 4000 < 0.52
    assert min(rolls) >= 0.0
    assert max(rolls) < 1.0
    again = Dice(3)
    again.drawn = 100
    assert again.roll() == rolls[100]


def test_what_is_known_of_prompts_is_bounded() -> None:
    table: PromptTable[int] = PromptTable(limit=3)
    for key in "abca":
        table.set(key, 1)
    table.set("d", 1)
    assert sorted(table.copy()) == ["a", "c", "d"], "the one not set for longest is forgotten"


# --- several policies --------------------------------------------------------------------------------------------


def test_a_prompt_goes_if_any_policy_that_trains_wants_it(kit: Any) -> None:
    chosen = selection("filter_solved(decay=0, threshold=0.9)", policies=("a", "b"))
    (prompt,) = kit.prompts(1)
    chosen.outcome("a", kit.group(prompt, *EASY))
    assert chosen.admits(prompt, ["a", "b"])
    assert not chosen.admits(prompt, ["a"]), "b needs nothing more"
    chosen.outcome("b", kit.group(prompt, *EASY))
    assert not chosen.admits(prompt, ["a", "b"])
    assert chosen.stats() == {"prompts": 3.0, "rejected": 2.0, "forced": 0.0}
    assert chosen.stats_of("a")["filter_solved"]["refused"] == 3.0


def test_greso_keeps_a_clock_for_each_policy(kit: Any) -> None:
    chosen = selection("greso", policies=("a", "b"))
    (prompt,) = kit.prompts(1)
    for name in ("a", "b"):
        chosen.outcome(name, kit.group(prompt, *EASY))
    chosen.advance("a", 1, 1)
    assert [chosen.stats_of(name)["greso"]["p_easy"] for name in ("a", "b")] == [0.49, 0.5]


def test_a_group_without_rewards_is_no_result(kit: Any) -> None:
    chosen = selection("greso")
    (prompt,) = kit.prompts(1)
    chosen.outcome("a", kit.group(prompt))
    assert chosen.stats_of("a")["greso"]["hard"] == 0.0


def test_a_run_of_rejects_forces_one_through(kit: Any) -> None:
    chosen = selection("filter_solved(decay=0, threshold=0.5)")
    (prompt,) = kit.prompts(1)
    chosen.outcome("a", kit.group(prompt, *EASY))
    decisions = [chosen.admits(prompt, ["a"]) for _ in range(2 * FORCED_AFTER)]
    assert [i for i, admitted in enumerate(decisions) if admitted] == [FORCED_AFTER - 1, 2 * FORCED_AFTER - 1]
    assert chosen.stats()["forced"] == 2.0
    again = selection("filter_solved(decay=0, threshold=0.5)")
    chosen.admits(prompt, ["a"])
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(chosen.state())))
    assert again.stats() == chosen.stats()


async def test_selectors_steer_what_is_leased(kit: Any) -> None:
    """Through the whole dataflow: a prompt that is solved comes no more, and the figures say so."""
    from astraflow.dataflow import Empty, ListSource

    dataflow = kit.dataflow(
        [PolicyFeed(model_id="solver", batch_size=4, steps=50, max_staleness=50)],
        source=ListSource(kit.prompts(2), seed=0),
        selectors=("filter_solved(decay=0, threshold=0.9)",),
        filters=(),
    )
    await kit.start(dataflow)
    await kit.attach(dataflow)
    (first,) = await kit.lease(dataflow)
    await kit.submit(dataflow, first, [{"solver": 1.0}] * 4)
    later = [task.prompt.id for task in await kit.lease(dataflow, 8)]
    assert first.prompt.id not in later
    assert len(later) == 8
    status = await dataflow.status(Empty())
    assert status.data["selection"]["rejected"] > 0
    assert status.policies[0].data["filter_solved"]["solved"] == 1.0
