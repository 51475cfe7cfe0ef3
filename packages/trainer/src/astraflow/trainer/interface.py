"""The trainer's contract: what a backend is, so that another can take its place (its configuration: `config`).

The loop (`train`) owns the order of things: attach, get batch, step, publish, report, checkpoint, commit. A backend
owns the model, the optimiser and the arithmetic. Invariants a backend keeps:

* gradients do not depend on how a mini-batch is packed or split;
* log-probabilities are taken at the temperature the tokens were sampled with;
* a step with non-finite gradients changes nothing and is reported (`skipped`); the version still advances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from astraflow.dataflow import TrainBatch
from astraflow.weightsync import PublishReport

from .config import TrainerConfig


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One policy to train: `model` and `reference` are local Hugging Face directories; `directory` is where its
    checkpoints go."""

    model_id: str
    model: str
    directory: str
    reference: str | None = None
    device: str = "cpu"
    seed: int = 0


REQUIRED_METRICS = frozenset(
    {
        "loss", "grad_norm", "ratio_mean", "entropy", "mismatch_mean", "mismatch_max", "reward_mean", "tokens",
        "tokens_per_s", "skipped",
    }
)  # fmt: skip
"""What every backend reports. loss, grad_norm: means over mini-batches; tokens: trained ones; ratio_mean, entropy: over
these; mismatch_*: |trainer's - behaviour's log-probability| before any update, where both are of one version; skipped:
mini-batches without an update."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics` by name: `REQUIRED_METRICS` and whatever the backend has to tell; all finite."""

    metrics: dict[str, float]


class BadBatch(Exception):
    """A batch that cannot be trained (empty, wrong model, token ids beyond the vocabulary); nothing changed."""


class PublishTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The stream that a trainer publishes, and how often all of it."""

    stream: str
    incarnation: int
    anchor_every: int


@runtime_checkable
class PublishesItself(Protocol):
    """A backend whose weights lie in several places: it writes versions to its store itself, instead of handing its
    `weights` over."""

    async def publish(self, target: PublishTarget, version: int, /) -> PublishReport: ...

    def stop(self) -> None:
        """No call follows."""
        ...


@runtime_checkable
class SavesAside(Protocol):
    """A backend that goes on training while its checkpoint is written."""

    def snapshot(self) -> Callable[[Path], None]:
        """A copy in memory of what `save` would write; the function returned writes it, in another thread."""
        ...


class TrainerBackend(Protocol):
    """One policy's model and optimiser. Constructed from (`PolicySpec`, `TrainerConfig`); an entry point of the
    group `astraflow.trainers`. All methods block and are called from one thread at a time, never the event loop's."""

    def __init__(self, spec: PolicySpec, config: TrainerConfig, /) -> None: ...

    def step(self, batch: TrainBatch, /) -> StepResult:
        """Train one batch (all its mini-batches). Raises BadBatch."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The weights to publish, Hugging Face names -> tensors in the published dtype (bf16, or fp32 if the model
        is trained in fp32). Valid until the next `step`."""
        ...

    def save(self, directory: Path, /) -> None:
        """Write model, optimiser, schedule and RNG into an existing empty directory."""
        ...

    def load(self, directory: Path, /) -> None:
        """Go back to exactly what `save` wrote."""
        ...

    def export(self, directory: Path, /) -> None:
        """Write a Hugging Face directory (weights, configuration, tokenizer) that AutoModelForCausalLM loads."""
        ...
