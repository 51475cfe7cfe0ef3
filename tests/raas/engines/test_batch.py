"""One prompt of a group is computed once, and never from weights that are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astraflow.raas.engines.batch import Batch, Job, load_model
from astraflow.raas.interface import EngineError, EngineSpec, Generation


class Counted:
    """A batch whose model counts the tokens it is given."""

    def __init__(self, tiny: Any, **spec: Any) -> None:
        self.spec = EngineSpec(model_id="tiny", model=tiny.path, dtype="float32", **spec)
        self.model = load_model(self.spec)
        self.batch = Batch(self._forward, self.spec)
        self.shapes: list[tuple[int, int]] = []
        self.done: list[Generation | EngineError] = []

    @property
    def _forward(self) -> Any:
        class Model:
            config = self.model.config

            def __call__(_self, *, input_ids: torch.Tensor, **rest: Any) -> Any:  # noqa: N805
                self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
                return self.model(input_ids=input_ids, **rest)

        return Model()

    def steps(self, count: int, version: int = 0) -> None:
        for _ in range(count):
            self.batch.step(version)

    def add(self, request: Any) -> Job:
        job = Job(request, self.done.append)
        self.batch.waiting.append(job)
        return job


def test_a_group_computes_its_prompt_once(tiny: Any, request_of: Any) -> None:
    counted = Counted(tiny)
    prompt = list(range(20))
    for seed in range(8):
        counted.add(request_of(seed, prompt, budget=4))
    counted.steps(2)
    assert counted.shapes == [(1, 20), (8, 1)]
    counted.add(request_of(9, prompt, budget=4))  # comes later: the others still run
    counted.batch.step(0)
    assert counted.shapes[2:] == [(9, 1)]


def test_prompts_with_little_in_common_are_computed_together(tiny: Any, request_of: Any) -> None:
    counted = Counted(tiny)
    for seed in range(4):
        counted.add(request_of(seed, [1, 2, 3, *range(10 * seed, 10 * seed + 10)], budget=2))
    counted.steps(2)
    assert counted.shapes == [(4, 13), (4, 1)]


def test_after_new_weights_a_group_computes_its_prompt_once_more(tiny: Any, request_of: Any) -> None:
    counted = Counted(tiny)
    for seed in range(8):
        counted.add(request_of(seed, list(range(20)), budget=8))
    counted.steps(3)
    counted.shapes.clear()
    counted.batch.new_weights(recompute=True)
    counted.steps(4, version=1)
    # The first job alone, then what the others have of their own (some began with the same token).
    assert counted.shapes[0] == (1, 23)
    assert all(rows <= 8 and width <= 2 for rows, width in counted.shapes[1:])


def test_a_cache_of_old_weights_is_not_shared(tiny: Any, request_of: Any) -> None:
    counted = Counted(tiny, cache="keep")
    prompt = list(range(20))
    counted.add(request_of(0, prompt, budget=8))
    counted.batch.step(0)
    counted.batch.new_weights(recompute=False)
    counted.add(request_of(1, prompt, budget=8))
    counted.shapes.clear()
    counted.steps(2, version=1)
    assert counted.shapes == [(1, 20), (2, 1)]


def test_a_kept_cache_without_a_token_is_computed_again(tiny: Any, request_of: Any) -> None:
    counted = Counted(tiny, cache="keep")
    for seed in range(2):
        counted.add(request_of(seed, list(range(20)), budget=8))
    counted.steps(1)
    follower = counted.batch.running[1]
    follower.cached = 19  # as if copied from the first
    counted.batch.new_weights(recompute=False)
    counted.shapes.clear()
    counted.steps(2, version=1)
    assert counted.shapes == [(1, 20), (2, 1)]


def test_cancelled_jobs_leave_at_once_and_the_others_keep_their_cache(tiny: Any, request_of: Any) -> None:
    counted = Counted(tiny)
    jobs = [counted.add(request_of(seed, budget=6)) for seed in range(5)]
    counted.steps(2)
    jobs[0].cancelled = jobs[2].cancelled = True
    counted.steps(6)
    assert not counted.batch.busy
    assert len(counted.done) == 3
    for job in (jobs[1], jobs[3], jobs[4]):
        assert isinstance(job.outcome, Generation)
        expected = tiny.logprobs(job.ids, len(job.request.prompt), 1.0)
        assert torch.tensor(job.outcome.logprobs) == pytest.approx(expected, abs=1e-5)


def test_long_prompts_are_computed_in_several_passes(
    tiny: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.raas.engines.batch.PREFILL_TOKENS", 64)
    counted = Counted(tiny)
    jobs = [counted.add(request_of(seed, [seed, *range(30)], budget=2)) for seed in range(5)]
    counted.steps(4)
    assert counted.shapes[:3] == [(2, 31), (2, 31), (1, 31)]
    for job in jobs:
        expected = tiny.logprobs(job.ids, 31, 1.0)
        assert torch.tensor(job.logprobs) == pytest.approx(expected, abs=1e-5)


def test_sliding_windows_are_refused(tmp_path: Any) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    MistralForCausalLM(
        MistralConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            sliding_window=8,
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="full attention only"):
        load_model(EngineSpec(model_id="m", model=str(tmp_path)))
