from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from astraflow.dataflow import TrainBatch, TrainSample
from astraflow.trainer import (
    LOSS_NAMES,
    AdvantageConfig,
    BadBatch,
    CriticConfig,
    LossConfig,
    PolicySpec,
    TrainerConfig,
)
from astraflow.trainer.conformance.toy import Engine, answered, on_policy
from astraflow.trainer.torch_backend import TorchBackend

FP32 = TrainerConfig(dtype="float32", lr=1e-3)


def copies(backend: TorchBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_temperature_is_respected_and_mismatch_is_reported(
    spec: PolicySpec, make_batch: Callable[..., TrainBatch]
) -> None:
    metrics = (
        TorchBackend(spec, FP32).step(on_policy(Engine(spec.model), make_batch())).metrics
    )  # temperatures 1 and 0.7
    assert metrics["mismatch_max"] < 1e-5
    assert 0 < metrics["mismatch_mean"] <= metrics["mismatch_max"]
    assert metrics["staleness"] == 0
    assert metrics["kl"] >= 0


def test_mismatch_of_old_versions_is_not_taken_for_the_engines(
    spec: PolicySpec, make_batch: Callable[..., TrainBatch]
) -> None:
    batch = msgspec.structs.replace(make_batch(), version=3)  # sampled at version 0
    metrics = TorchBackend(spec, FP32).step(batch).metrics
    assert "mismatch_mean" not in metrics
    assert metrics["mismatch_all_mean"] > 0
    assert metrics["staleness"] == 3


def test_required_metrics_are_there(spec: PolicySpec, make_batch: Callable[..., TrainBatch]) -> None:
    metrics = TorchBackend(spec, FP32).step(make_batch()).metrics
    wanted = """loss grad_norm ratio_mean ratio_min ratio_max ratio_std clip_share m2 effective_samples mfu
    peak_memory kl entropy mismatch_mean mismatch_max mismatch_share advantage_mean
    reward_mean tokens tokens_per_s skipped staleness sharing seconds"""
    assert not set(wanted.split()) - metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["skipped"] == 0
    assert metrics["sharing"] > 3


def test_a_non_finite_gradient_changes_nothing_and_is_counted(
    spec: PolicySpec, make_batch: Callable[..., TrainBatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend(spec, FP32)
    backend.step(make_batch())
    before = {name: tensor.clone() for name, tensor in backend.learner.state().items()}
    weights = copies(backend)

    def poisoned(*arguments: Any) -> Tensor:
        return torch.as_tensor(arguments[1] * math.nan)

    with monkeypatch.context() as patch:
        patch.setattr("astraflow.trainer.torch_backend.kl_estimate", poisoned)
        metrics = backend.step(make_batch(1)).metrics
    assert metrics["skipped"] == 4
    assert "grad_norm" not in metrics
    assert_equal(weights, copies(backend))
    assert_equal(before, backend.learner.state())
    assert backend.step(make_batch(2)).metrics["skipped"] == 0
    assert not torch.equal(weights["model.norm.weight"], backend.weights()["model.norm.weight"])


def test_samples_without_a_reward_have_no_loss(
    spec: PolicySpec, make_batch: Callable[..., TrainBatch], make_sample: Callable[..., TrainSample]
) -> None:
    batch = make_batch()
    masked = [make_sample([9, 9], [8, 8], reward=None, name=f"masked{i}") for i in range(5)]
    more = msgspec.structs.replace(batch, samples=(*masked[:2], *batch.samples, *masked[2:]))
    left, right = TorchBackend(spec, FP32), TorchBackend(spec, FP32)
    left.step(batch)
    assert right.step(more).metrics["masked"] == 5
    assert_equal(copies(left), copies(right))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_id": "q"}, "is for 'q'"),
        ({"samples": ()}, "none of 0 samples"),
    ],
)
def test_a_batch_for_another_or_of_nothing_is_refused(
    spec: PolicySpec, make_batch: Callable[..., TrainBatch], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadBatch, match=message):
        TorchBackend(spec, FP32).step(msgspec.structs.replace(make_batch(), **change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"completion": [61]}, "token id 61, the vocabulary has 61"),
        ({"logprob": 0.5}, "finite and <= 0"),
        ({"logprob": math.nan}, "finite and <= 0"),
        ({"prompt": []}, "first token cannot be trained"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"std": math.nan}, "not finite"),
        ({"reward": None}, "none of 1 samples"),
        ({"completion": []}, "none of 1 samples"),
        ({"version": -1}, "no version"),
    ],
)
def test_a_bad_sample_is_refused_by_name_and_changes_nothing(
    spec: PolicySpec, make_sample: Callable[..., TrainSample], arguments: dict[str, Any], message: str
) -> None:
    backend = TorchBackend(spec, FP32)
    before = copies(backend)
    sample = make_sample(**({"prompt": [3, 4], "completion": [5, 2]} | arguments))
    batch = TrainBatch(batch_id="bad", model_id="p", version=0, samples=(sample,))
    with pytest.raises(BadBatch, match=message) as caught:
        backend.step(batch)
    assert "batch bad" in str(caught.value)
    assert_equal(before, copies(backend))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_published_and_exported_weights_load_as_a_hugging_face_model(
    tied: bool, dtype: str, make_model: Callable[..., Path], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    spec = PolicySpec(model_id="p", model=str(make_model(tied=tied)), directory="unused")
    backend = TorchBackend(spec, TrainerConfig(dtype=dtype, lr=1e-2))  # type: ignore[arg-type]
    before = copies(backend)
    backend.step(make_batch())
    weights = backend.weights()
    assert ("lm_head.weight" in weights) is not tied
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in weights.values())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights.items())
    backend.export(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    state = model.state_dict()
    assert not weights.keys() - state.keys()
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor), name
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr() or not tied


def test_published_weights_are_the_rounded_masters(spec: PolicySpec, make_batch: Callable[..., TrainBatch]) -> None:
    backend = TorchBackend(spec, TrainerConfig(lr=1e-6))
    for version in range(3):
        backend.step(make_batch(version))
    state, published = backend.learner.state(), backend.weights()
    moved = 0
    for name, tensor in published.items():
        assert torch.equal(state[f"master.{name}"].bfloat16(), tensor)
        moved += int((state[f"master.{name}"] != tensor.float()).sum())
    assert moved > 1000  # what bf16 alone would have lost


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_bit_identical(
    spec: PolicySpec, make_batch: Callable[..., TrainBatch], tmp_path: Path, dtype: str
) -> None:
    config = msgspec.structs.replace(FP32, dtype=dtype, lr=1e-3, warmup_steps=10)
    through = TorchBackend(spec, config)
    for version in range(2):
        through.step(make_batch(version))
    through.save(tmp_path)
    again = TorchBackend(spec, config)
    again.load(tmp_path)
    assert_equal(copies(through), copies(again))
    for version in range(2, 4):
        left, right = through.step(make_batch(version)).metrics, again.step(make_batch(version)).metrics
        assert left["lr"] == right["lr"]
        assert left["loss"] == right["loss"]
    assert_equal(copies(through), copies(again))


def test_clipping_bounds_the_update_of_plain_adam(spec: PolicySpec, make_batch: Callable[..., TrainBatch]) -> None:
    """The first AdamW step from clipped gradients equals torch's own AdamW on gradients that were clipped by it."""
    config = msgspec.structs.replace(FP32, minibatches=1, loss=LossConfig(kl=0), lr=1e-3, clip_norm=1e-9)
    ours, plain = TorchBackend(spec, config), TorchBackend(spec, config)
    from astraflow.trainer.batch import examples

    batch = make_batch()
    metrics = ours.step(batch).metrics
    plain.gradients(examples(batch, "p", 61))
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in plain.weights().values()]
    for parameter, name in zip(parameters, plain.weights(), strict=True):
        parameter.grad = plain.learner.gradients()[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1e-9)
    torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01).step()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for parameter, (name, tensor) in zip(parameters, ours.weights().items(), strict=True):
        torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_kl_pulls_back_to_the_reference(
    spec: PolicySpec, make_model: Callable[..., Path], make_batch: Callable[..., TrainBatch]
) -> None:
    """With zero advantages only the KL term is left: the policy moves towards another reference."""
    other = msgspec.structs.replace(spec, reference=str(make_model(seed=1)))
    config = TrainerConfig(dtype="float32", loss=LossConfig(name="ppo", kl=1.0), lr=3e-3, weight_decay=0)
    backend = TorchBackend(other, config)
    batch = make_batch()
    still = [msgspec.structs.replace(s, group_size=1) for s in batch.samples]
    batch = msgspec.structs.replace(batch, samples=tuple(still))
    values = [backend.step(batch).metrics["kl"] for _ in range(8)]
    assert values[-1] < 0.5 * values[0]


def test_models_that_packing_would_compute_wrongly_are_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding-window"):
        TorchBackend(PolicySpec(model_id="p", model=str(tmp_path), directory="unused"), FP32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_learns_a_toy_preference(
    spec: PolicySpec,
    loss: str,
    dtype: Literal["bfloat16", "float32"],
) -> None:
    clip = {"gspo": (0.1, 0.1)}.get(loss, (0.2, 0.28))
    config = TrainerConfig(
        loss=LossConfig(name=loss, clip_low=clip[0], clip_high=clip[1]), dtype=dtype, minibatches=2, lr=3e-3
    )
    backend, engine = TorchBackend(spec, config), Engine(spec.model)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for version in range(12):
        engine.load(dict(backend.weights()))
        batch, reward = answered(engine, version, generator)
        backend.step(batch)
        rewards.append(reward)
    assert rewards[0] < 0.5
    assert np.mean(rewards[-5:]) > 0.9


def test_state_file_of_another_model_is_refused(spec: PolicySpec, tmp_path: Path) -> None:
    save_file({"step": torch.zeros(())}, tmp_path / "training-00000-of-00001.safetensors")
    with pytest.raises(KeyError, match=r"master\."):
        TorchBackend(spec, FP32).load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": LossConfig(name="ppo", proximal=True, correction="truncate")},
        {"loss": LossConfig(name="ppo", proximal=True, correction="mask", reject_high=3.0, kl_in_reward=True, kl=0.01)},
        {"loss": LossConfig(name="ppo", entropy=0.001), "advantage": AdvantageConfig(estimator="leave_one_out")},
        {"loss": LossConfig(aggregate="constant", aggregate_tokens=1), "advantage": AdvantageConfig(std=False)},
        {"advantage": AdvantageConfig(estimator="gae"), "critic": CriticConfig(enabled=True, lr=3e-3, clip=0.0)},
    ],
    ids=["tis", "icepop", "rloo", "dr-grpo", "gae"],
)
def test_every_kind_of_advantage_and_correction_learns_too(spec: PolicySpec, change: dict[str, Any]) -> None:
    config = msgspec.structs.replace(TrainerConfig(dtype="float32", minibatches=2, lr=3e-3), **change)
    backend, engine = TorchBackend(spec, config), Engine(spec.model)
    generator = torch.Generator().manual_seed(0)
    rewards, metrics = [], {}
    for version in range(14):
        engine.load(dict(backend.weights()))
        batch, reward = answered(engine, version, generator)
        metrics = backend.step(batch).metrics
        assert all(math.isfinite(value) for value in metrics.values())
        rewards.append(reward)
    assert np.mean(rewards[-5:]) > 0.9
    if "critic" in change:
        assert metrics["value_mean"] > 0.5  # what it learned to expect
    if config.loss.proximal:
        assert metrics["correction_mean"] == pytest.approx(1.0, abs=1e-3)  # the engine was exact


def test_a_critic_is_saved_and_resumed(spec: PolicySpec, make_batch: Callable[..., TrainBatch], tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        FP32, advantage=AdvantageConfig(estimator="gae"), critic=CriticConfig(enabled=True, lr=1e-3)
    )
    through = TorchBackend(spec, config)
    through.step(make_batch())
    through.save(tmp_path)
    again = TorchBackend(spec, config)
    again.load(tmp_path)
    left, right = through.step(make_batch(1)).metrics, again.step(make_batch(1)).metrics
    assert left["value_loss"] == right["value_loss"]
    assert left["value_mean"] == right["value_mean"] != 0
    assert_equal(copies(through), copies(again))


def test_the_proximal_policy_is_the_one_before_the_batch(
    spec: PolicySpec, make_batch: Callable[..., TrainBatch]
) -> None:
    """With one mini-batch the ratio to it is exactly 1, however old the samples are."""
    config = msgspec.structs.replace(FP32, minibatches=1, loss=LossConfig(name="ppo", proximal=True, kl=0.0))
    metrics = TorchBackend(spec, config).step(make_batch()).metrics
    assert metrics["ratio_min"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["correction_mean"] != pytest.approx(1.0, abs=0.1)
    assert metrics["mismatch_mean"] > 0.1
