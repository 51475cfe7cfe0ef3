from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.trainer.batch import Example
from astraflow.trainer.packing import MicroBatch, micro_batches, minibatches


def example(tokens: list[int], trained: list[int] | None = None, group: str = "g", temperature: float = 1.0) -> Example:
    positions = np.array(trained if trained is not None else [len(tokens) - 1])
    size = positions.size
    return Example(
        np.array(tokens), positions, np.zeros(size, np.float32), np.zeros(size, np.int32), temperature, 1.0, 0.5, 0.5,
        8, 1.0, group,
    )  # fmt: skip


def seen_by(micro: MicroBatch) -> list[tuple[int, ...]]:
    """For each node of a micro-batch, the tokens it attends to, in order of position: its row."""
    rows = []
    for tree in micro.trees:
        n = tree.tokens.size
        visible = np.tri(n, dtype=bool) if tree.visible is None else tree.visible
        for node in range(n):
            keys = np.flatnonzero(visible[node])
            keys = keys[np.argsort(tree.positions[keys], kind="stable")]
            assert tree.positions[keys].tolist() == list(range(keys.size)), "ancestors have one token a position"
            assert keys[-1] == node
            rows.append(tuple(tree.tokens[keys].tolist()))
    return rows


def check(samples: list[Example], micros: list[MicroBatch], budget: int) -> None:
    """Every trained token is predicted once, from exactly the tokens before it, at its temperature."""
    wanted = [
        (tuple(s.tokens[:i].tolist()), s.temperature, int(s.tokens[i])) for s in samples for i in s.trained.tolist()
    ]
    got: dict[int, tuple[tuple[int, ...], float, int]] = {}
    for micro in micros:
        rows = seen_by(micro)
        assert micro.size <= budget or len(micro.trees) == 1
        assert np.all(np.diff(micro.pair_heads) >= 0)
        for copy, index in zip(micro.copies, micro.index, strict=True):
            head = micro.pair_heads[copy]
            assert int(index) not in got
            row = rows[micro.heads[head]]
            got[int(index)] = (row, float(micro.temperatures[head]), int(micro.pair_targets[copy]))
    assert [got[i] for i in range(len(wanted))] == wanted


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=12), min_size=1, max_size=20),
    data=st.data(),
    budget=st.integers(1, 40),
    share=st.booleans(),
)
def test_any_rows_in_any_budget(rows: list[list[int]], data: st.DataObject, budget: int, share: bool) -> None:
    samples = []
    for row in rows:
        positions = data.draw(st.sets(st.integers(1, len(row) - 1), min_size=1))
        samples.append(example(row, sorted(positions), temperature=data.draw(st.sampled_from([1.0, 0.5]))))
    check(samples, micro_batches(samples, budget, share=share), budget)


def test_a_group_costs_its_prompt_once_and_no_last_tokens() -> None:
    prompt = list(range(100, 150))
    answers = [[7, 8, 2], [7, 8, 2], [7, 9, 2], [5, 2]]
    samples = [example(prompt + a, list(range(50, 50 + len(a)))) for a in answers]
    (micro,) = micro_batches(samples, 1000)
    # 50 of the prompt; "7", "8", "9" and "5" once each; end tokens predict nothing.
    assert micro.size == 54
    assert micro.heads.size == 5
    assert micro.pair_heads.size == 7
    assert micro.copies.size == 11


def test_groups_share_their_template() -> None:
    template = list(range(100, 130))
    samples = [example([*template, g, g, 5, 2], [32, 33], group=str(g)) for g in range(6) for _ in range(8)]
    (micro,) = micro_batches(samples, 1000)
    assert micro.size == 30 + 6 * 3


def test_long_answers_do_not_share_a_short_prompt() -> None:
    rng = np.random.default_rng(0)
    samples = [example([1, 2, *rng.integers(3, 90, 1000).tolist()], [500, 1001]) for _ in range(4)]
    micros = micro_batches(samples, 8000)
    assert all(tree.visible is None for micro in micros for tree in micro.trees)


def test_equal_rows_need_no_mask() -> None:
    (micro,) = micro_batches([example([1, 2, 3, 4])] * 3, 100)
    assert len(micro.trees) == 1
    assert micro.trees[0].visible is None


def test_minibatches_keep_whole_groups_and_balance_sequences() -> None:
    samples = [example([1, 2], group=str(g)) for g in range(12) for _ in range(8)]
    parts = minibatches(samples, 4)
    assert [len(part) for part in parts] == [24] * 4
    assert [len({e.group_id for e in part}) for part in parts] == [3] * 4
    assert [e for part in parts for e in part] == samples


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=15), count=st.integers(1, 8))
def test_minibatches_lose_nothing_and_none_is_empty(sizes: list[int], count: int) -> None:
    samples = [example([1, 2], group=str(g)) for g, size in enumerate(sizes) for _ in range(size)]
    parts = minibatches(samples, count)
    assert all(parts)
    assert len(parts) == min(count, len(samples))
    assert [id(e) for part in parts for e in part] == [id(e) for e in samples]
    assert max(len(part) for part in parts) <= 2 * len(samples) / len(parts) + 1


def test_one_group_is_split_when_it_must() -> None:
    assert [len(part) for part in minibatches([example([1, 2])] * 8, 4)] == [2] * 4
