"""One rank of tests/trainer/test_ranks.py, started by torchrun: trains as told and writes down what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import torch

from astraflow.trainer import LossConfig, PolicySpec, PublishTarget, TrainerConfig, examples, follow
from astraflow.trainer.conformance.toy import make_batch
from astraflow.trainer.launch import world
from astraflow.trainer.sharded import ShardedLearner
from astraflow.trainer.team import Team
from astraflow.trainer.torch_backend import TorchBackend
from astraflow.weightsync import DirectoryStore

CONFIG = TrainerConfig(
    dtype="float32", micro_tokens=64, minibatches=2, lr=1e-3, loss=LossConfig(kl=0.001), anchor_every=2
)


def gradients(model: str, out: Path) -> None:
    """Of one mini-batch, whole, for several losses; then one step of plain SGD at 0.1, published in bf16."""
    samples = examples(make_batch(), "p", 61)
    backend = TorchBackend(PolicySpec(model_id="p", model=model, directory="unused"), CONFIG)
    learner = backend.learner
    found: dict[str, torch.Tensor] = {}
    for name in ("m2po", "gspo"):
        config = LossConfig(name=name, clip_low=0.1, clip_high=0.1, kl=0.0)
        other = TorchBackend(backend.spec, TrainerConfig(dtype="float32", micro_tokens=64, loss=config))
        record = other.gradients(samples)
        found |= {f"{name}.{key}": value.clone() for key, value in other.learner.gradients().items()}
        found |= {f"{name}.loss": torch.tensor(record.loss), f"{name}.logprobs": record.logprobs}
        learner = other.learner
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
        if not isinstance(learner, ShardedLearner):
            for name, parameter in learner.model.named_parameters():
                parameter -= 0.1 * learner.gradients()[name]
    found |= {f"bf16.{key}": value.bfloat16() for key, value in learner.weights().items()}
    if world()[0] == 0:
        torch.save(found, out)


async def train(spec: PolicySpec, store: Path, steps: list[int], saved: Path | None, save: Path | None) -> None:
    rank, size = world()
    if rank:
        await follow(spec, CONFIG, DirectoryStore(store))
        return
    backend = TorchBackend(spec, CONFIG)
    team = Team(backend, DirectoryStore(store)) if size > 1 else None
    target = PublishTarget(stream="p", incarnation=0, anchor_every=2)
    if saved is not None:
        (team or backend).load(saved)
    metrics = []
    for version in steps:
        metrics.append((team or backend).step(make_batch(version)).metrics)
        if team is not None:
            await team.publish(target, version)
    if save is not None:
        await anyio.Path(save).mkdir()
        (team or backend).save(save)
        (team or backend).export(save)
        await anyio.Path(save / "metrics.json").write_text(json.dumps(metrics))
    if team is not None:
        team.stop()


def main() -> None:
    torch.set_num_threads(1)
    what, model, out = sys.argv[1:4]
    if what == "gradients":
        gradients(model, Path(out))
    else:
        spec = PolicySpec(model_id="p", model=model, directory="unused")
        saved = Path(sys.argv[5]) if len(sys.argv) > 5 else None
        steps = [int(number) for number in sys.argv[4].split(",")]
        anyio.run(train, spec, Path(out).with_suffix(".store"), steps, saved, Path(out))


main()
