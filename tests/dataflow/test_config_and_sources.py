"""Configurations that cannot work are refused by field; sources are exact, repeatable and can go on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from astraflow.dataflow import DataflowConfig, EvalSuite, ListSource, PolicyFeed, Sampling, gym_dataset


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n_samples": 0}, "n_samples is 0"),
        ({"n_samples": 1}, "'zero_advantage': with n_samples 1"),
        ({"policies": []}, "policies is empty"),
        ({"policies": [{"model_id": "a", "batch_size": 1}] * 2}, "names one policy twice"),
        ({"policies": [{"model_id": "b", "batch_size": 1}]}, "sampling has no entry for the policy 'b'"),
        ({"policies": [{"model_id": "a", "batch_size": 0}]}, "batch_size is 0"),
        ({"policies": [{"model_id": "a", "batch_size": 1, "max_staleness": -1}]}, "max_staleness is -1"),
        ({"policies": [{"model_id": "a", "batch_size": 1, "order": "best"}]}, "best"),
        ({"sampling": {"a": {"temperature": 0.0}}}, "temperature 0 is greedy"),
        ({"task_deadline_s": 0}, "task_deadline_s is 0"),
        ({"worker_grace_s": 1.0}, "worker_grace_s 1.0 is shorter"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"max_dropped_batches": 0}, "max_dropped_batches is 0"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], says: str) -> None:
    possible = {
        "policies": [{"model_id": "a", "batch_size": 4}],
        "workflow": "w",
        "n_samples": 8,
        "sampling": {"a": {"temperature": 1.0}},
    }
    assert msgspec.convert(possible, DataflowConfig).policies[0].horizon == 36
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert(possible | fields, DataflowConfig)


def test_a_configuration_made_in_code_is_checked_too() -> None:
    with pytest.raises(ValueError, match="sampling has no entry"):
        DataflowConfig(policies=(PolicyFeed(model_id="a", batch_size=1),), workflow="w", n_samples=2, sampling={})


def test_every_epoch_has_each_prompt_once_in_another_order(kit: Any) -> None:
    source = ListSource(kit.prompts(20), seed=3, epochs=2)
    drawn = [source.next() for _ in range(43)]
    first, second = ([prompt.id for prompt in part if prompt] for part in (drawn[:20], drawn[20:40]))
    assert sorted(first) == sorted(second) == sorted(p.id for p in kit.prompts(20))
    assert first != second
    assert drawn[40:] == [None, None, None]
    again = ListSource(kit.prompts(20), seed=3, epochs=2)
    assert [again.next() for _ in range(43)] == drawn


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7, 10, 12])
def test_a_restored_source_goes_on_where_it_was(kit: Any, taken: int) -> None:
    one, other = (ListSource(kit.prompts(5), seed=1, epochs=2) for _ in range(2))
    for _ in range(taken):
        one.next()
    state = msgspec.json.decode(msgspec.json.encode(one.state()))
    other.restore(state)
    assert [other.next() for _ in range(11)] == [one.next() for _ in range(11)]


def test_a_source_refuses_what_would_be_wrong(kit: Any) -> None:
    with pytest.raises(ValueError, match="two prompts have the id 'p0'"):
        ListSource(kit.prompts(2) + kit.prompts(1), seed=0)
    with pytest.raises(ValueError, match="at least one prompt"):
        ListSource((), seed=0)
    with pytest.raises(ValueError, match="of another source"):
        ListSource(kit.prompts(2), seed=0).restore(ListSource(kit.prompts(3), seed=0).state())
    with pytest.raises(ValueError, match="is nothing"):
        EvalSuite(name="empty", prompts=(), workflow="w", sampling={"a": Sampling()})


def test_without_epochs_a_source_repeats(kit: Any) -> None:
    source = ListSource(kit.prompts(3), seed=0)
    assert all(source.next() is not None for _ in range(100))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_reasoning_gym_data_sets_repeat_by_seed() -> None:
    params: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "operators": ["+"]}
    one, other = (gym_dataset("basic_arithmetic", size=5, seed=9, **params) for _ in range(2))
    assert len(one) == 5
    assert [one[i] for i in range(5)] == [other[i] for i in range(5)]
    assert {"question", "answer"} <= set(one[0])
    with pytest.raises(ValueError, match=r"data set 'basic_arithmetic'.*no_such"):
        gym_dataset("basic_arithmetic", size=5, seed=9, no_such=1)
