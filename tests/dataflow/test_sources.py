"""Prompt sources: files and data sets, reasoning-gym, streams, mixtures; their order, their ends, their state."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from astraflow.dataflow import (
    Context,
    ListSource,
    Message,
    MixtureSource,
    PolicyFeed,
    Prompt,
    PromptSource,
    RunFailed,
    StreamSource,
    open_sources,
)
from astraflow.dataflow.data.rows import Columns, row_prompt

CONTEXT = Context(seed=4)
PATIENCE_S = 30.0


def prompt(number: int, source: str = "s") -> Prompt:
    return Prompt(id=str(number), source=source, messages=(Message("user", f"{number}?"),))


def drawn(source: PromptSource, most: int) -> list[Prompt]:
    """Up to `most` prompts: a source that waits for more is waited for."""
    made: list[Prompt] = []
    end = time.monotonic() + PATIENCE_S
    while len(made) < most and time.monotonic() < end:
        given = source.next()
        if given is not None:
            made.append(given)
        elif source.ended:
            return made
        else:
            time.sleep(0.002)
    return made


def ids(prompts: list[Prompt]) -> list[str]:
    return [given.id for given in prompts]


def through_msgpack(state: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps what it reads: here, and not in the home directory."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


@pytest.fixture
def jsonl(tmp_path: Path, cache: None) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{i} + 1", "answer": i + 1, "level": i % 3, "tags": ["sum", str(i)]} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def line(file: Path, **options: Any) -> str:
    given = {"path": str(file), "prompt_column": "question", "answer_column": "answer"} | options
    return f"dataset({', '.join(f'{name}={value!r}' for name, value in given.items())})"


# --- files -------------------------------------------------------------------------------------------------------


def test_json_lines_become_prompts(jsonl: Path) -> None:
    lines = {"sums": line(jsonl, epochs=2, metadata_columns=["level", "tags"], system="Be brief.")}
    source = open_sources(lines, seed=1)
    first, second = drawn(source, 30), drawn(source, 99)
    assert sorted(ids(first), key=int) == sorted(ids(second), key=int) == [str(i) for i in range(30)]
    assert ids(first) != ids(second)
    assert (source.ended, source.epoch) == (True, 1)
    (five,) = [given for given in first if given.id == "5"]
    assert five == Prompt(
        id="5",
        source="sums",
        messages=(Message("system", "Be brief."), Message("user", "5 + 1")),
        reference="6",
        metadata={"level": 2, "tags": '["sum","5"]'},
    )
    again = open_sources(
        {"sums": line(jsonl, epochs=2, metadata_columns=["level", "tags"], system="Be brief.")}, seed=1
    )
    assert drawn(again, 60) == first + second
    other = open_sources({"sums": line(jsonl)}, seed=2)
    assert ids(drawn(other, 30)) != ids(first)


def test_parquet_and_a_directory_and_the_first_rows(tmp_path: Path, cache: None) -> None:
    import datasets

    rows = [{"question": [{"role": "user", "content": f"{i}"}], "answer": str(i)} for i in range(10)]
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set" / "train.parquet")
    whole = open_sources({"a": line(tmp_path / "set", epochs=1)}, seed=0)
    assert len(drawn(whole, 99)) == 10
    some = open_sources({"a": line(tmp_path / "set" / "train.parquet", epochs=1, first=4)}, seed=0)
    made = drawn(some, 99)
    assert sorted(ids(made)) == ["0", "1", "2", "3"]
    assert {given.messages[0].content for given in made} == {"0", "1", "2", "3"}


def test_prompts_too_long_for_a_tokenizer_are_left_out(tmp_path: Path, cache: None) -> None:
    import importlib.resources

    from transformers import AutoTokenizer

    model = str(importlib.resources.files("astraflow.recipes").joinpath("tiny", "model"))
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1 " * n}) + "\n" for n in range(1, 11)))
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "1 " * n}], tokenize=False, add_generation_prompt=True
        )
        for n in range(1, 11)
    ]
    lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    for streaming in (False, True):
        options = f"path={str(path)!r}, tokenizer={model!r}, max_tokens={lengths[6]}, epochs=1, streaming={streaming}"
        source = open_sources({"a": f"dataset({options})"}, seed=0)
        assert len(drawn(source, 99)) == sum(n <= lengths[6] for n in lengths) < 10
        assert max(source.stats().get("too_long", 0), source.stats().get("passed_over", 0)) == 3.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_column": "quest"}, "has no column 'quest'; it has question, answer, level, tags"),
        ({"metadata_columns": ["lvl"]}, "has no column 'lvl'"),
        ({"id_column": "level"}, "two prompts have the id"),
        ({"prompt_column": "level"}, "row 0, column 'level': wanted a text or messages, not 0"),
        ({"prompt_column": "tags"}, "row 0, column 'tags': a message needs role and content"),
        ({"path": "no/such.jsonl"}, "the data set no/such.jsonl cannot be loaded"),
        ({"path": ["a.jsonl", "b.parquet"]}, "several paths must be files of one format"),
        ({"max_tokens": 5}, "name the tokenizer"),
        ({"first": "all"}, "option 'first': Expected `int`, got `str`"),
        ({"columns": "x"}, "unknown option 'columns'; did you mean 'id_column'"),
    ],
)
def test_what_is_wrong_with_a_data_set_is_said(jsonl: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="dataset") as caught:
        drawn(open_sources({"a": line(jsonl, **options)}, seed=0), 30)
    assert says in str(caught.value)


def test_a_broken_file_is_refused(tmp_path: Path, cache: None) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"the data set .*broken\.jsonl cannot be loaded"):
        open_sources({"a": f"dataset(path={str(path)!r})"}, seed=0)


def test_a_row_without_its_column_is_refused() -> None:
    with pytest.raises(ValueError, match="s, row 3, column 'prompt': wanted a text or messages, not None"):
        row_prompt({"other": 1}, "s", Columns(), 3)


# --- streams -----------------------------------------------------------------------------------------------------


def test_a_streamed_data_set_gives_every_row_each_epoch(jsonl: Path) -> None:
    source = open_sources({"sums": line(jsonl, streaming=True, epochs=2, window=8)}, seed=1)
    made = drawn(source, 99)
    assert len(made) == 60
    assert source.ended
    assert sorted(ids(made[:30])) == sorted(ids(made[30:]))
    assert ids(made[:30]) != ids(made[30:]), "each epoch has an order of its own"
    again = open_sources({"sums": line(jsonl, streaming=True, epochs=2, window=8)}, seed=1)
    assert drawn(again, 99) == made


def test_a_stream_never_makes_its_caller_wait() -> None:
    gate = threading.Event()

    def slow(epoch: int) -> Iterator[Prompt]:
        gate.wait(PATIENCE_S)
        yield from map(prompt, range(3))

    source = StreamSource(slow)
    began = time.thread_time()
    for _ in range(50):
        assert source.next() is None
        assert not source.ended
    assert time.thread_time() - began < 1.0
    gate.set()
    assert ids(drawn(source, 9)) == ["0", "1", "2"]
    assert source.ended
    assert source.next() is None


def test_a_stream_without_end_is_read_ahead_within_bounds() -> None:
    read = 0

    def endless(epoch: int) -> Iterator[Prompt]:
        nonlocal read
        for number in count():
            read += 1
            yield prompt(number)

    source = StreamSource(endless)
    assert len(drawn(source, 1000)) == 1000
    time.sleep(0.05)
    assert read < 1000 + 4 * 128
    assert source.epoch == 0


def test_duplicates_in_a_stream_are_passed_over_and_counted() -> None:
    source = StreamSource(lambda epoch: map(prompt, (1, 2, 1, 3, 2)), epochs=2)
    assert ids(drawn(source, 99)) == ["1", "2", "3"] * 2
    assert source.stats() == {"epoch": 1.0, "given": 3.0, "passed_over": 4.0}


@pytest.mark.parametrize("taken", [0, 1, 127, 300, 301, 500, 600])
def test_a_restored_stream_goes_on_where_it_was(taken: int) -> None:
    def read(epoch: int) -> Iterator[Prompt]:
        return (prompt((number * 7 + epoch) % 311) for number in range(400))  # 311 different ones

    one, other = StreamSource(read, epochs=2), StreamSource(read, epochs=2)
    drawn(one, taken)
    other.restore(through_msgpack(one.state()))
    assert ids(drawn(other, 999)) == ids(drawn(one, 999))
    assert other.ended


def broken(epoch: int) -> Iterator[Prompt]:
    yield from map(prompt, range(200))
    raise OSError("the disk is gone")


@pytest.mark.parametrize(("read", "batches"), [(broken, 128), (lambda epoch: iter(()), 0)])
async def test_a_stream_that_fails_ends_the_run_with_the_cause(kit: Any, read: Any, batches: int) -> None:
    """Whoever waits hears of it; what was read before the failure is rolled out and trained."""
    source = StreamSource(read, epochs=None)
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=4, steps=999)], source=source, real_time=True)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    made: list[str] = []

    async def train() -> None:
        while True:
            for task in await kit.lease(dataflow, 4):
                await kit.mixed(dataflow, task, versions={"solver": len(made)})
            batch = (await kit.ask(dataflow, incarnation, len(made), wait_s=0.01)).batch
            if batch is not None:
                made.append(batch.batch_id)
                await kit.publish(dataflow, incarnation, len(made))

    with anyio.fail_after(PATIENCE_S), pytest.raises(RunFailed, match="no more prompts can be had") as caught:
        await train()
    assert "the disk is gone" in str(caught.value) if batches else "has no prompt" in str(caught.value)
    assert len(made) == batches


async def test_a_lease_waits_for_a_stream(kit: Any) -> None:
    gate = threading.Event()

    def slow(epoch: int) -> Iterator[Prompt]:
        gate.wait(PATIENCE_S)
        yield prompt(0)

    dataflow = kit.dataflow(source=StreamSource(slow), real_time=True)
    await kit.start(dataflow)
    await kit.attach(dataflow)
    assert await kit.lease(dataflow) == ()
    gate.set()
    from astraflow.dataflow import LeaseRequest

    with anyio.fail_after(PATIENCE_S):
        reply = await dataflow.lease(LeaseRequest(worker_id="w0", max_tasks=1, wait_s=PATIENCE_S))
    assert [task.prompt.id for task in reply.tasks] == ["0"]


# --- mixtures ----------------------------------------------------------------------------------------------------


def three(epochs: int | None = None) -> dict[str, PromptSource]:
    sizes = {"a": 5, "b": 7, "c": 11}
    return {
        name: ListSource([prompt(i, name) for i in range(size)], seed=0, epochs=epochs) for name, size in sizes.items()
    }


def test_by_weight_prompts_are_drawn_in_proportion() -> None:
    source = MixtureSource(CONTEXT, three(), {"a": 6, "b": 3})
    counts = Counter(given.source for given in drawn(source, 4000))
    for name, share in (("a", 0.6), ("b", 0.3), ("c", 0.1)):
        assert abs(counts[name] - 4000 * share) < 4 * (4000 * share * (1 - share)) ** 0.5
    assert source.stats()["given_a"] == counts["a"]


def test_by_ratio_every_prefix_has_its_shares() -> None:
    source = MixtureSource(CONTEXT, three(), {"a": 5, "b": 3, "c": 2}, "ratio")
    counts = Counter[str]()
    for n, given in enumerate(drawn(source, 500), start=1):
        counts[given.source] += 1
        for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(counts[name] - n * share) <= 1
    assert [given.source for given in drawn(MixtureSource(CONTEXT, three(), {}, "ratio"), 6)] == list("abcabc")


@pytest.mark.parametrize("by", ["weight", "ratio"])
def test_a_source_that_ends_leaves_the_others_going(by: Any) -> None:
    source = MixtureSource(CONTEXT, three(epochs=2), {"a": 8}, by)
    made = drawn(source, 999)
    assert Counter(given.source for given in made) == {"a": 10, "b": 14, "c": 22}
    assert source.ended
    assert source.next() is None


def test_a_mixture_is_in_the_epoch_of_its_slowest() -> None:
    source = MixtureSource(CONTEXT, three(), {}, "ratio")
    epochs = []
    for _ in range(5):
        drawn(source, 9)
        epochs.append(source.epoch)
    assert epochs == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("by", ["weight", "ratio"])
@pytest.mark.parametrize("taken", [0, 1, 17, 40])
def test_a_restored_mixture_goes_on_where_it_was(by: Any, taken: int) -> None:
    one, other = (MixtureSource(CONTEXT, three(epochs=2), {"a": 3}, by) for _ in range(2))
    drawn(one, taken)
    other.restore(through_msgpack(one.state()))
    assert drawn(other, 999) == drawn(one, 999)
    with pytest.raises(ValueError, match="of a mixture of"):
        MixtureSource(CONTEXT, {"a": three()["a"]}, {}, by).restore(one.state())


def test_a_member_that_waits_gives_way() -> None:
    gate = threading.Event()

    def slow(epoch: int) -> Iterator[Prompt]:
        gate.wait(PATIENCE_S)
        return (prompt(number, "slow") for number in range(5))

    source = MixtureSource(CONTEXT, {"slow": StreamSource(slow), "list": three(epochs=1)["a"]}, {"slow": 99})
    assert [given.source for given in drawn(source, 5)] == ["a"] * 5
    assert not source.ended
    gate.set()
    assert [given.source for given in drawn(source, 99)] == ["slow"] * 5


@pytest.mark.parametrize(
    ("weights", "says"), [({"d": 1}, r"weights name \['d'\]"), ({"a": 0}, "not positive"), ({"a": -1}, "not positive")]
)
def test_impossible_weights_are_refused(weights: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MixtureSource(CONTEXT, three(), weights)


def test_sources_are_opened_by_name_and_mixed(jsonl: Path) -> None:
    lines = {"one": line(jsonl, first=3, epochs=1), "two": line(jsonl, first=6, epochs=1)}
    source = open_sources(lines, seed=0, weights={"two": 2}, by="ratio")
    assert Counter(given.source for given in drawn(source, 99)) == {"one": 3, "two": 6}
    assert source.ended
    with pytest.raises(ValueError, match="there is no PromptSource 'jsonl'"):
        open_sources({"a": "jsonl(path='x')"}, seed=0)


# --- a list ------------------------------------------------------------------------------------------------------


def test_a_million_prompts_are_shuffled_without_holding_up_the_loop() -> None:
    class Many(list[Prompt]):
        def __len__(self) -> int:
            return 1_000_000

    one = prompt(0)
    many = Many([one])
    many.__iter__ = lambda: iter([one])  # type: ignore[method-assign]
    source = ListSource(many, seed=0)
    began = time.thread_time()
    order = source._shuffled()
    assert time.thread_time() - began < 0.5, "Python's own shuffle takes about a second"
    assert len(set(order.tolist())) == 1_000_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_reasoning_gym_as_a_source() -> None:
    params = "{'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1, 'operators': ['+']}"
    gym = f"gym(dataset='basic_arithmetic', size=20, seed=5, epochs=1, params={params})"
    source = open_sources({"sums": gym}, seed=0)
    made = drawn(source, 99)
    assert len(made) == 20
    assert source.ended
    assert made == drawn(open_sources({"sums": gym}, seed=0), 99)
    assert {given.source for given in made} == {"sums"}
    assert set(msgspec.json.decode(str(made[0].metadata["entry"]))) >= {"expression"}
    endless = open_sources({"sums": f"gym(dataset='basic_arithmetic', size=0, params={params})"}, seed=0)
    assert len(set(ids(drawn(endless, 300)))) == 300
    with pytest.raises(ValueError, match="reasoning-gym data set 'basic_arithmetics'"):
        open_sources({"sums": "gym(dataset='basic_arithmetics')"}, seed=0)
