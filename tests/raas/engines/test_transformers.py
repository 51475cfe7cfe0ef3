"""The engine's promises: exact log-probabilities, versions and budgets, whatever happens beside a request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from astraflow.raas.engines.transformers import TransformersEngine
from astraflow.raas.interface import EngineError, EngineSpec, GenerateRequest, Generation
from astraflow.weightsync import MemoryStore, Publisher, Puller


def check(tiny: Any, request: GenerateRequest, generation: Generation) -> None:
    """Every log-probability is that of its version's weights given all tokens before it."""
    ids = [*request.prompt, *generation.tokens]
    assert len(generation.tokens) == len(generation.logprobs) == len(generation.versions)
    for version in set(generation.versions):
        expected = tiny.logprobs(ids, len(request.prompt), request.sampling.temperature, version)
        mine = [index for index, of in enumerate(generation.versions) if of == version]
        assert torch.tensor(generation.logprobs)[mine] == pytest.approx(expected[mine], abs=1e-5)


async def all_of(engine: TransformersEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


async def test_greedy_equals_generate_whoever_runs_beside(tiny: Any, engine: Any, request_of: Any) -> None:
    requests = [request_of(seed, budget=24, temperature=seed % 2) for seed in range(16)]
    async with engine() as made:
        results = await all_of(made, requests)
    for request, result in list(zip(requests, results, strict=True))[::2]:
        assert list(result.tokens) == tiny.greedy(request.prompt, 24)
        check(tiny, request, result)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_a_forward_pass(tiny: Any, engine: Any, request_of: Any, temperature: float) -> None:
    requests = [request_of(seed, budget=16, temperature=temperature) for seed in range(64)]
    async with engine() as made:
        results = await all_of(made, requests)
        assert made.stats().generated_tokens == 64 * 16
        assert made.stats().running == made.stats().waiting == 0
    for request, result in zip(requests, results, strict=True):
        assert len(result.tokens) == 16
        assert result.finish_reason == "length"
        check(tiny, request, result)


async def test_no_more_run_at_once_than_allowed(engine: Any, request_of: Any, until: Any) -> None:
    async with engine(max_running=4) as made:
        work = asyncio.gather(*(made.generate(request_of(seed, budget=100)) for seed in range(12)))
        await until(lambda: made.stats().running == 4 and made.stats().waiting == 8)
        assert {len(result.tokens) for result in await work} == {100}


async def test_the_stop_token_is_kept_and_ends(engine: Any, request_of: Any) -> None:
    async with engine() as made:
        free = await made.generate(request_of(3, budget=20))
        stop = free.tokens[7]
        first = free.tokens.index(stop)
        stopped = await made.generate(request_of(3, budget=20, stop=stop))
        last = await made.generate(request_of(3, budget=first + 1, stop=stop))
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.finish_reason == last.finish_reason == "stop"
    assert free.finish_reason == "length"


async def test_groups_of_equal_prompts_differ_by_seed_and_are_exact(tiny: Any, engine: Any, request_of: Any) -> None:
    requests = [request_of(seed, list(range(seed // 8, 30)), budget=4 + seed % 5) for seed in range(48)]
    async with engine() as made:
        results = await all_of(made, requests)
    assert len({result.tokens for result in results}) > 40
    for request, result in zip(requests, results, strict=True):
        check(tiny, request, result)


async def test_swaps_under_load_lose_nothing_and_stay_exact(
    tiny: Any, engine: Any, request_of: Any, commit: Any, until: Any
) -> None:
    shared = list(range(12))
    requests = [request_of(seed, shared if seed % 3 else None, budget=10 + seed, temperature=1.0 - 0.3 * (seed % 2))
                for seed in range(40)]  # fmt: skip
    async with engine() as made:
        work = asyncio.gather(*(made.generate(request) for request in requests))
        for version in range(1, 7):
            await until(lambda seen=version: made.stats().generated_tokens > 150 * seen)
            pause = await made.swap(commit(made, version), version)
            assert 0 <= pause < 1
            assert made.version == version
        results = await work
    for request, result in zip(requests, results, strict=True):
        assert len(result.tokens) == request.sampling.max_new_tokens
        assert list(result.versions) == sorted(result.versions)
        check(tiny, request, result)
    assert {version for result in results for version in result.versions} == set(range(7))
    assert sum(len(set(result.versions)) > 1 for result in results) >= 8
    assert max(len(set(result.versions)) for result in results) >= 3


async def test_kept_caches_go_on_but_never_serve_a_new_request(
    tiny: Any, engine: Any, request_of: Any, commit: Any, until: Any
) -> None:
    prompt = list(range(25))
    long = request_of(0, prompt, budget=100)
    async with engine(cache="keep") as made:
        running = asyncio.create_task(made.generate(long))
        await until(lambda: made.stats().generated_tokens > 10)
        await made.swap(commit(made, 1), 1)
        fresh = await made.generate(request_of(1, prompt))
        old = await running
    check(tiny, request_of(1, prompt), fresh)
    assert set(fresh.versions) == {1}
    assert len(old.tokens) == 100
    assert set(old.versions) == {0, 1}
    before = old.versions.count(0)
    expected = tiny.logprobs([*prompt, *old.tokens], 25, 1.0)
    assert torch.tensor(old.logprobs)[:before] == pytest.approx(expected[:before], abs=1e-5)


async def test_the_same_prompt_after_a_swap_is_exact(tiny: Any, engine: Any, request_of: Any, commit: Any) -> None:
    request = request_of(0, list(range(25)), temperature=0)
    async with engine() as made:
        for version in (0, 1, 2):
            if version:
                await made.swap(commit(made, version), version)
            result = await made.generate(request)
            assert set(result.versions) == {version}
            check(tiny, request, result)


async def test_a_failed_commit_changes_nothing(tiny: Any, engine: Any, request_of: Any, until: Any) -> None:
    def broken() -> None:
        raise ValueError("torn read")

    requests = [request_of(seed, budget=80) for seed in range(8)]
    async with engine() as made:
        work = asyncio.gather(*(made.generate(request) for request in requests))
        await until(lambda: made.stats().generated_tokens > 20)
        with pytest.raises(ValueError, match="torn read"):
            await made.swap(broken, 1)
        assert made.version == 0
        results = await work
    for request, result in zip(requests, results, strict=True):
        assert set(result.versions) == {0}
        check(tiny, request, result)


async def test_swaps_at_once_run_one_after_the_other(engine: Any) -> None:
    inside: list[str] = []

    def slow(name: str) -> Any:
        def run() -> None:
            inside.append(f"{name} in")
            threading.Event().wait(0.02)
            inside.append(f"{name} out")

        return run

    async with engine() as made:
        pauses = await asyncio.gather(made.swap(slow("a"), 1), made.swap(slow("b"), 2))
        assert made.version == 2
    assert inside == ["a in", "a out", "b in", "b out"]
    assert min(pauses) >= 0.02


async def test_cancelling_frees_the_slot(engine: Any, request_of: Any, until: Any) -> None:
    async with engine(max_running=2) as made:
        long = [asyncio.create_task(made.generate(request_of(seed, budget=110))) for seed in range(2)]
        await until(lambda: made.stats().running == 2)
        waiting = asyncio.create_task(made.generate(request_of(5, budget=100)))
        for task in (*long, waiting):
            task.cancel()
        assert len((await made.generate(request_of(2, budget=3))).tokens) == 3
        await until(lambda: made.stats().running == 0 and made.stats().waiting == 0)
        assert made.stats().generated_tokens < 200
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*long, return_exceptions=True)
        )


@pytest.mark.parametrize(
    ("prompt", "budget", "temperature", "says"),
    [
        ((), 4, 1.0, "empty"),
        ((1,) * 120, 9, 1.0, "max_context 128"),
        ((1, 61), 4, 1.0, "vocabulary of 61"),
        ((1, -1), 4, 1.0, "vocabulary of 61"),
        ((1,), 0, 1.0, "at least 1"),
        ((1,), 4, -0.5, "temperature"),
        ((1,), 4, float("nan"), "temperature"),
    ],
)
async def test_a_bad_request_fails_alone(
    engine: Any, request_of: Any, prompt: tuple[int, ...], budget: int, temperature: float, says: str
) -> None:
    import msgspec

    good = request_of(0, budget=30)
    bad = msgspec.structs.replace(request_of(1, budget=budget, temperature=temperature), prompt=prompt)
    async with engine() as made:
        beside = asyncio.create_task(made.generate(good))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match=says):
            await made.generate(bad)
        assert len((await beside).tokens) == 30


async def test_weights_that_are_not_finite_fail_requests_and_spoil_no_later_one(
    tiny: Any, engine: Any, request_of: Any, commit: Any, until: Any
) -> None:
    long = [request_of(seed, list(range(seed, 40)), budget=80) for seed in range(4)]
    short = request_of(9, [5, 6])
    async with engine() as made:
        await made.swap(lambda: made._model.model.layers[0].input_layernorm.weight.fill_(float("nan")), 1)
        for failure in await asyncio.gather(*(made.generate(request) for request in long), return_exceptions=True):
            with pytest.raises(EngineError, match=r"version 1.*not finite"):
                raise failure
        await made.swap(commit(made, 0), 0)
        beside = asyncio.gather(*(made.generate(request) for request in long[:3]))
        await until(lambda: made.stats().running == 3)
        # It comes to the fourth slot, which held more, and is masked to the length of the others.
        check(tiny, short, await made.generate(short))
        for request, result in zip(long, await beside, strict=False):
            check(tiny, request, result)


async def test_when_the_thread_dies_everyone_hears_why(
    engine: Any, request_of: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(max_running=2) as made:
        work = [asyncio.create_task(made.generate(request_of(seed, budget=100))) for seed in range(4)]
        await until(lambda: made.stats().generated_tokens > 5)

        def broken(_version: int) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(made._batch, "step", broken)
        for task in work:
            with pytest.raises(EngineError, match="died of RuntimeError: out of memory") as failure:
                await task
            assert isinstance(failure.value.__cause__, RuntimeError)
        with pytest.raises(EngineError, match="out of memory"):
            await made.generate(request_of(9))
        with pytest.raises(EngineError, match="out of memory"):
            await made.swap(lambda: None, 1)


async def test_closing_fails_what_runs_and_leaves_no_thread(engine: Any, request_of: Any, until: Any) -> None:
    before = set(threading.enumerate())
    async with engine(max_running=2) as made:
        work = [asyncio.create_task(made.generate(request_of(seed, budget=110))) for seed in range(6)]
        await until(lambda: made.stats().running == 2)
        await made.aclose()
        for task in work:
            with pytest.raises(EngineError, match="closed"):
                await task
        with pytest.raises(EngineError, match="closed"):
            await made.generate(request_of(0))
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("engine-")]
    assert not left


async def test_a_start_that_fails_says_where_and_leaves_no_thread(tmp_path: Any) -> None:
    made = TransformersEngine(EngineSpec(model_id="lost", model=str(tmp_path / "none")))
    with pytest.raises(EngineError, match=r"cannot load .*none for lost"):
        await made.start()
    await made.aclose()
    with pytest.raises(EngineError, match="not started"):
        await made.swap(lambda: None, 1)
    assert "engine-lost" not in {thread.name for thread in threading.enumerate()}


async def test_deterministic_depends_on_the_request_alone(tiny: Any, engine: Any, request_of: Any) -> None:
    requests = [request_of(seed, budget=20) for seed in range(6)]
    async with engine(deterministic=True) as made:
        first = await all_of(made, requests)
    async with engine(deterministic=True) as made:
        await all_of(made, [request_of(seed, budget=60) for seed in range(20, 25)])
        second = await all_of(made, list(reversed(requests)))
    assert first == list(reversed(second))
    check(tiny, requests[0], first[0])


async def test_published_weights_reach_the_model(tiny: Any, engine: Any, request_of: Any, until: Any) -> None:
    store = MemoryStore("engine-test")
    publisher = Publisher(store, stream="tiny", incarnation=1)
    request = request_of(0, budget=110)
    async with engine() as made:
        puller = Puller(store, made.sink())
        assert made.sink() is made.sink()
        work = asyncio.create_task(made.generate(request))
        for version in (1, 2):
            await until(lambda seen=version: made.stats().generated_tokens > 20 * seen)
            await publisher.publish(tiny.weights(version), version)
            staged = await puller.stage()
            assert staged is not None
            await made.swap(staged.commit, staged.version)
        result = await work
    assert set(result.versions) == {0, 1, 2}
    check(tiny, request, result)


@pytest.mark.slow
def test_an_exception_in_main_does_not_hang_the_interpreter(tiny: Any) -> None:
    script = textwrap.dedent(f"""
        import asyncio
        from astraflow.raas.engines.transformers import TransformersEngine
        from astraflow.raas.interface import EngineSpec

        async def main():
            engine = TransformersEngine(EngineSpec(model_id="tiny", model={tiny.path!r}))
            await engine.start()
            raise SystemExit(3)

        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "Loading weights" not in done.stderr
