"""What a run is configured by: one tree of typed structs, the same on the command
line, in TOML and in the run directory.

Invariant: a configuration that passed `check` can be run; whatever cannot work together is refused there with the
field's name and the reason, before anything is loaded.
"""

from __future__ import annotations

import difflib
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import tomli_w

from astraflow.dataflow import BatchBy, DataflowConfig, FailurePolicy, MixBy, PolicyFeed, Replay, Sampling
from astraflow.raas import CachePolicy
from astraflow.trainer import TrainerConfig
from astraflow.trainer import check as check_trainer
from astraflow.weightsync import TransferMode

Device = Literal["auto", "cpu", "cuda"]


GRACE_SILENCES = 20
"""Silence limits without any worker at all after which a run is given up: a supervised one is back long before."""


class ConfigError(Exception):
    """A configuration that cannot be run; the message names the field, the reason and, where it can, the remedy."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of the run."""

    model: str = "package:smollm2"
    """Initial weights: a hub id, a directory, or package:smollm2 / package:tiny."""
    batch_size: int = 96
    """Sequences in one training batch."""
    max_new_tokens: int = 8
    """Budget of one answer, in tokens."""
    temperature: float = 1.0
    """Sampling temperature in training."""
    backend: str = ""
    """Trainer of this policy, where it is another than --trainer.backend."""
    frozen: bool = False
    """Asked by the workflow, but not trained: it keeps its initial weights."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is rolled out, kept and served."""

    n_samples: int = 8
    """Trajectories of one prompt: a group."""
    max_staleness: int = 8
    """Versions a trained token may be older than the weights it trains."""
    order: str = "edf"
    """Which buffered sequence is served first: edf (the oldest version), fifo, lifo, or your own."""
    sources: dict[str, str] = {}
    """Prompts to train on in place of the recipe's own, by name: dataset(path=...), gym(dataset=...), or your own
    (docs/data_algorithms.md)."""
    weights: dict[str, float] = {}
    """Shares of several sources in the mixture, by name (1 where none is given)."""
    mix: MixBy = "weight"
    """Sources are drawn from at random by their weights, or take turns so that every prefix has its ratio."""
    selectors: tuple[str, ...] = ()
    """Prompts worth a rollout: greso, filter_solved, curriculum, ... (docs/data_algorithms.md)."""
    filters: tuple[str, ...] = ("zero_advantage",)
    """Groups worth training: zero_advantage (dynamic sampling: rewards that differ), ... in the order given."""
    staleness: str = "drop"
    """What becomes of samples beyond --data.max-staleness: drop, or keep with a smaller weight."""
    batch_by: BatchBy = "samples"
    """What --policies.NAME.batch-size counts."""
    replay: Replay = Replay()
    failures: FailurePolicy = FailurePolicy()
    max_dropped_batches: int = 20
    """Fail when so many batches' worth of groups in a row were dropped."""
    task_deadline_s: float = 120.0
    """Seconds a worker has for a group before its samples go to another."""
    worker_silence_s: float = 15.0
    """Seconds without a heartbeat after which a worker's tasks go to others."""


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How rollouts are made."""

    engine: str = "transformers"
    """Name of the engine (entry-point group astraflow.engines)."""
    workers: int = 1
    """Rollout workers; more than one only with --split."""
    capacity: int = 32
    """Samples a worker runs at once."""
    max_running: int = 32
    """Requests an engine decodes at once; more queue."""
    max_context: int = 256
    """Longest prompt + answer, in tokens."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type the engine computes in."""
    cache: CachePolicy = "recompute"
    """Caches of running generations when weights change: made again, or kept."""
    transfer: TransferMode = "auto"
    """How weights are pulled: the cheapest verified path, or the published rule."""
    min_update_s: float = 0.0
    """Shortest time between two weight updates of a worker, in seconds."""


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out evaluation before, after and while training."""

    problems: int = 300
    """Held-out problems per suite (0: no evaluation)."""
    every: int = 0
    """Versions from one evaluation to the next while training goes on (0: none); figures go to metrics.jsonl."""
    share: float = 0.5
    """Largest share of the workers that evaluates while the others roll out for training."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Every field is a command-line option; see also --preset, --config and --dry-run."""

    steps: int = 40
    """Versions each policy is trained for: one batch each."""
    seed: int = 0
    """Seeds prompts, sampling and initial states."""
    out: str = "runs"
    """Directory that receives the run's directory."""
    name: str = ""
    """Name of the run's directory (default: recipe and time)."""
    device: Device = "auto"
    """Where engines and trainers compute; they share a GPU."""
    split: bool = False
    """Services as supervised processes of their own over Unix sockets."""
    debug: bool = False
    """Deterministic, one thing at a time, in fp32; breakpoint() works anywhere."""
    synchronous: bool = False
    """Generate, train and sync in turn, for comparison."""
    policies: dict[str, PolicyConfig] = {}
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()


AnyRun = TypeVar("AnyRun", bound=RunConfig)


def positive(config: msgspec.Struct, prefix: str, *names: str) -> None:
    """Raise ConfigError for the first of the fields that is not above zero."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"--{prefix}{name.replace('_', '-')} is {value}; it must be above 0")


def registered(group: str, name: str, option: str) -> None:
    """Raise ConfigError unless an installed distribution registers `name` in the entry-point group."""
    known = {entry.name for entry in entry_points(group=group)}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"installed: {', '.join(sorted(known)) or 'none'}"
        raise ConfigError(f"--{option} {name}: no installed package registers it in {group}; {hint}")


def trained(config: RunConfig) -> list[str]:
    """The policies that have a trainer."""
    return [model_id for model_id, policy in config.policies.items() if not policy.frozen]


def check(config: RunConfig) -> None:
    """Refuse what cannot be run.

    Raises:
        ConfigError: naming the option and the reason.
    """
    positive(config, "", "steps")
    positive(config.data, "data.", "n_samples", "max_dropped_batches", "task_deadline_s", "worker_silence_s")
    positive(config.rollout, "rollout.", "workers", "capacity", "max_running", "max_context")
    positive(
        config.trainer, "trainer.", "minibatches", "micro_tokens", "lr", "anchor_every", "keep_checkpoints", "processes"
    )
    if config.policies and not trained(config):
        raise ConfigError(f"every policy is frozen ({', '.join(config.policies)}): leave one to train")
    if config.data.max_staleness < 0 or config.eval.problems < 0:
        raise ConfigError("--data.max-staleness and --eval.problems must not be negative")
    for model_id, policy in config.policies.items():
        prefix = f"policies.{model_id}."
        positive(policy, prefix, "batch_size", "max_new_tokens")
        if not policy.temperature > 0:
            raise ConfigError(f"--{prefix}temperature is {policy.temperature}: greedy samples cannot be trained on")
        if policy.batch_size < config.trainer.minibatches and not policy.frozen:
            raise ConfigError(
                f"--{prefix}batch-size {policy.batch_size} cannot be cut into "
                f"--trainer.minibatches {config.trainer.minibatches}"
            )
        if policy.max_new_tokens >= config.rollout.max_context:
            raise ConfigError(f"--{prefix}max-new-tokens leaves no room for a prompt in --rollout.max-context")
    try:
        check_trainer(config.trainer)
    except ValueError as error:
        raise ConfigError(f"--trainer: {error}") from error
    registered("astraflow.engines", config.rollout.engine, "rollout.engine")
    registered("astraflow.trainers", config.trainer.backend, "trainer.backend")
    for model_id, policy in config.policies.items():
        if policy.backend:
            registered("astraflow.trainers", policy.backend, f"policies.{model_id}.backend")
    if config.debug and config.split:
        raise ConfigError("--debug runs everything in one process; it cannot be combined with --split")
    if config.trainer.processes > 1 and not config.split:
        raise ConfigError("--trainer.processes above 1 needs --split: in one process a policy has one trainer")
    if config.rollout.workers > 1 and not config.split:
        raise ConfigError("--rollout.workers above 1 needs --split: one process holds one worker")
    try:
        dataflow_config(config, "")
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from error


def dataflow_config(config: RunConfig, workflow: str) -> DataflowConfig:
    """What the dataflow is told of a run whose tasks run `workflow`.

    Raises:
        ValueError: something cannot work together; the message names the field.
    """
    data = config.data
    return DataflowConfig(
        policies=tuple(
            PolicyFeed(
                model_id=name,
                batch_size=policy.batch_size,
                max_staleness=data.max_staleness,
                steps=config.steps,
                order=data.order,
                batch_by=data.batch_by,
                staleness=data.staleness,
                replay=data.replay,
            )
            for name, policy in config.policies.items()
            if not policy.frozen
        ),
        workflow=workflow,
        n_samples=data.n_samples,
        sampling={
            name: Sampling(max_new_tokens=policy.max_new_tokens, temperature=policy.temperature)
            for name, policy in config.policies.items()
        },
        seed=config.seed,
        task_deadline_s=data.task_deadline_s,
        worker_silence_s=data.worker_silence_s,
        worker_grace_s=GRACE_SILENCES * data.worker_silence_s,
        selectors=data.selectors,
        filters=data.filters,
        max_dropped_batches=data.max_dropped_batches,
        failures=data.failures,
        evaluate_every=config.eval.every if config.eval.problems else 0,
        evaluation_share=config.eval.share,
        synchronous=config.synchronous,
        keep_checkpoints=config.trainer.keep_checkpoints,
    )


def resolve(config: AnyRun) -> AnyRun:
    """What --debug and --synchronous mean for the other fields.

    --synchronous: every token is trained at the version that sampled it. --debug: the same, in fp32, one at a time, and
    with time that does not run out.
    """
    replace = msgspec.structs.replace
    if config.debug:
        config = replace(
            config,
            synchronous=True,
            data=replace(config.data, task_deadline_s=1e9, worker_silence_s=1e9),
            rollout=replace(config.rollout, dtype="float32", capacity=config.data.n_samples),
            trainer=replace(config.trainer, dtype="float32"),
        )
    if config.synchronous:
        config = replace(config, data=replace(config.data, max_staleness=0))
    return config


def merge(base: AnyRun, overrides: dict[str, Any], origin: str) -> AnyRun:
    """`base` with the nested `overrides`.

    Raises:
        ConfigError: an unknown key (naming the nearest known one) or a value of the wrong type.
    """
    merged = merge_tables(msgspec.to_builtins(base), overrides, origin, "")
    try:
        return msgspec.convert(merged, type(base), strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error}") from error


def merge_tables(base: dict[str, Any], overrides: dict[str, Any], origin: str, path: str) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        if key not in base:
            near = difflib.get_close_matches(key, list(base), n=1, cutoff=0.5)
            hint = f"; did you mean {path}{near[0]}?" if near else f"; known here: {', '.join(base)}"
            raise ConfigError(f"{origin}: unknown key {path}{key}{hint}")
        if isinstance(value, dict) and isinstance(base[key], dict):
            merged[key] = merge_tables(base[key], value, origin, f"{path}{key}.")
        else:
            merged[key] = value
    return merged


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError if the file cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from error


def to_toml(config: RunConfig) -> str:
    return tomli_w.dumps(msgspec.to_builtins(config))
