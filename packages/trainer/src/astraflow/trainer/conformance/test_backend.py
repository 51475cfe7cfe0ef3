"""The contract of `TrainerBackend`, held against the backend named by --backend.

In fp32 on the CPU, on a Llama of 60 thousand parameters, with the default configuration but for the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from astraflow.dataflow import TrainBatch
from astraflow.trainer import REQUIRED_METRICS, BadBatch, PolicySpec, TrainerBackend, TrainerConfig, load_backend
from astraflow.trainer.conformance.toy import Engine, answered, make_batch, make_model, make_sample, on_policy

New = Callable[..., TrainerBackend]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def new(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> New:
    """A backend of the kind under test; keyword arguments are fields of its configuration."""
    name, lr = request.config.getoption("--backend"), request.config.getoption("--backend-lr")
    if not name:
        pytest.skip("the conformance kit needs --backend NAME")
    kind = load_backend(name)
    spec = PolicySpec(model_id="p", model=str(model), directory=str(tmp_path / "checkpoints"))

    def make(**fields: Any) -> TrainerBackend:
        return kind(spec, TrainerConfig(**{"backend": name, "dtype": "float32", "lr": lr} | fields))

    return make


def weights(backend: TrainerBackend) -> dict[str, torch.Tensor]:
    """Copies of the published weights."""
    return {name: torch.as_tensor(tensor).clone() for name, tensor in backend.weights().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), f"{name} differs"


def test_it_learns_a_toy_preference(new: New, model: Path) -> None:
    backend, engine = new(minibatches=2), Engine(model)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for version in range(16):
        engine.load(dict(backend.weights()))
        batch, reward = answered(engine, version, generator)
        backend.step(batch)
        rewards.append(reward)
    assert rewards[0] < 0.6
    assert np.mean(rewards[-5:]) > 0.9, f"mean rewards by version: {rewards}"


def test_it_publishes_what_it_trained(new: New, model: Path) -> None:
    """Log-probabilities of the published weights are those the next step starts from, at every temperature."""
    backend, engine = new(), Engine(model)
    published = weights(backend)
    assert all(tensor.dtype == torch.float32 for tensor in published.values())
    for version in range(2):
        metrics = backend.step(on_policy(engine, make_batch(version))).metrics
        assert metrics["mismatch_max"] < 1e-3
        now = weights(backend)
        assert all(not torch.equal(now[name], published[name]) for name in now), "a tensor did not change"
        published = now
        engine.load(dict(now))


def test_bf16_is_published_as_bf16(new: New) -> None:
    backend = new(dtype="bfloat16")
    backend.step(make_batch())
    assert {tensor.dtype for tensor in weights(backend).values()} == {torch.bfloat16}


@pytest.mark.parametrize("micro_tokens", [4096, 64, 1])
def test_the_step_does_not_depend_on_how_it_is_split(new: New, micro_tokens: int) -> None:
    whole, split = new(micro_tokens=1 << 16, minibatches=1), new(micro_tokens=micro_tokens, minibatches=1)
    before = weights(whole)
    loss, other = (backend.step(make_batch()).metrics["loss"] for backend in (whole, split))
    assert other == pytest.approx(loss, rel=1e-3, abs=1e-5)
    left, right = weights(whole), weights(split)
    moved = sum(float((left[name] - before[name]).abs().sum()) for name in before)
    apart = sum(float((left[name] - right[name]).abs().sum()) for name in before)
    assert apart < 0.01 * moved


def test_it_resumes_exactly(new: New, tmp_path: Path) -> None:
    through, directory = new(warmup_steps=10), tmp_path / "saved"
    directory.mkdir()
    for version in range(2):
        through.step(make_batch(version))
    through.save(directory)
    again = new(warmup_steps=10)
    again.load(directory)
    assert_equal(weights(through), weights(again))
    for version in range(2, 4):
        left, right = through.step(make_batch(version)).metrics, again.step(make_batch(version)).metrics
        assert left["loss"] == right["loss"]
    assert_equal(weights(through), weights(again))


def test_it_exports_a_directory_that_transformers_loads(new: New, tmp_path: Path) -> None:
    backend = new()
    backend.step(make_batch())
    backend.export(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    state = loaded.state_dict()
    for name, tensor in weights(backend).items():
        assert torch.equal(state[name], tensor), name


def test_it_reports_the_required_metrics(new: New) -> None:
    metrics = new().step(make_batch()).metrics
    assert not REQUIRED_METRICS - metrics.keys(), "missing"
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["skipped"] == 0
    assert metrics["tokens"] == sum(int(s.sequence.loss_mask.numpy().sum()) for s in make_batch().samples)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [3], "completion": [61]},
        {"logprob": 0.5},
        {"logprob": math.nan},
        {"temperature": 0.0},
        {"std": math.nan},
        {"reward": None},
        {"completion": []},
        {"model_id": "another"},
    ],
    ids=lambda change: "-".join(change),
)
def test_it_refuses_a_bad_batch_and_changes_nothing(new: New, change: dict[str, Any]) -> None:
    backend = new()
    before = weights(backend)
    sample = make_sample(**({"prompt": [3, 4], "completion": [5, 2]} | change))
    batch = TrainBatch(batch_id="bad", model_id=change.get("model_id", "p"), version=0, samples=(sample,))
    with pytest.raises(BadBatch, match="bad"):
        backend.step(batch)
    assert_equal(before, weights(backend))


def test_a_sample_without_a_reward_is_left_out(new: New) -> None:
    batch = make_batch()
    masked = [make_sample([9, 9], [8, 8], reward=None, name=f"masked{i}") for i in range(3)]
    left, right = new(minibatches=1), new(minibatches=1)
    left.step(batch)
    right.step(msgspec.structs.replace(batch, samples=(masked[0], *batch.samples, *masked[1:])))
    assert_equal(weights(left), weights(right))


def test_a_step_with_non_finite_gradients_changes_nothing_and_is_counted(new: New) -> None:
    backend = new(minibatches=1)
    backend.step(make_batch())
    before = weights(backend)
    batch = make_batch(1)
    huge = [msgspec.structs.replace(sample, weight=3e38) for sample in batch.samples]
    metrics = backend.step(msgspec.structs.replace(batch, samples=tuple(huge))).metrics
    assert metrics["skipped"] >= 1
    assert_equal(before, weights(backend))
    assert backend.step(make_batch(2)).metrics["skipped"] == 0
