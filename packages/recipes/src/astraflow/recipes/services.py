"""Builds each service of a run from (recipe, configuration, run directory): the same in one process and in several."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
import msgspec

from astraflow.dataflow import (
    Dataflow,
    DataflowService,
    Journal,
    JournalError,
    Observer,
    PromptSource,
    open_journal,
    open_sources,
)
from astraflow.raas import (
    ChatTokenizer,
    Engine,
    EngineSpec,
    Worker,
    WorkerConfig,
    Workflow,
    load_engine,
    load_tokenizer,
    load_workflow,
)
from astraflow.trainer import PolicySpec, TrainerConfig

from .config import AnyRun, ConfigError, Device, RunConfig, dataflow_config
from .models import resolve_model
from .recipe import Recipe
from .rundir import RunDirectory


def resolve_device(device: Device) -> str:
    """Raises ConfigError if a GPU is asked for and there is none."""
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("--device cuda: no CUDA device is visible to torch here; use --device cpu")
    return "cuda" if available and device != "cpu" else "cpu"


async def resolve_models(config: RunConfig) -> dict[str, Path]:
    """Local directories of the policies' initial models, converted or downloaded once."""
    made: dict[str, Path] = {}
    for name, policy in config.policies.items():
        made[name] = await anyio.to_thread.run_sync(resolve_model, policy.model)
    return made


def make_source(recipe: Recipe[AnyRun], config: AnyRun) -> PromptSource:
    """The prompts to train on: those of --data.sources, or the recipe's own.

    Raises:
        ConfigError: a source cannot be opened.
    """
    data = config.data
    if not data.sources:
        return recipe.parts.source(config)
    try:
        return open_sources(data.sources, seed=config.seed, weights=data.weights, by=data.mix)
    except ValueError as error:
        raise ConfigError(f"--data.sources: {error}") from error


async def build_dataflow(
    recipe: Recipe[AnyRun], config: AnyRun, observer: Observer | None, journal: Journal | None = None
) -> Dataflow:
    """The dataflow with its prompts; making these can take a second, in a thread."""
    source = await anyio.to_thread.run_sync(make_source, recipe, config)
    suites = await anyio.to_thread.run_sync(recipe.parts.suites, config)
    return Dataflow(
        dataflow_config(config, recipe.workflow),
        source,
        suites,
        observer=observer,
        journal=journal,
    )


@asynccontextmanager
async def journal_of(run: RunDirectory) -> AsyncIterator[Journal]:
    """The run's journal, held by this process alone.

    Raises:
        ConfigError: another dataflow holds it, or it is of another run or version; in the block, too.
    """
    try:
        async with open_journal(run.journal) as journal:
            yield journal
    except JournalError as error:
        raise ConfigError(str(error)) from error


async def build_worker(
    recipe: Recipe[AnyRun],
    config: AnyRun,
    dataflow: DataflowService,
    models: Mapping[str, Path],
    worker_id: str,
    device: str,
) -> Worker:
    """A worker with its engines, not started; what it imports is loaded in a thread."""
    rollout = config.rollout
    engines, tokenizers, workflows = await anyio.to_thread.run_sync(load_parts, recipe, config, models, device)
    return Worker(
        WorkerConfig(
            worker_id=worker_id,
            pool="local",
            capacity=rollout.capacity,
            min_update_s=0.0 if config.synchronous else rollout.min_update_s,
            transfer=rollout.transfer,
            one_at_a_time=config.debug,
            reraise=config.debug,
        ),
        dataflow,
        engines=engines,
        tokenizers=tokenizers,
        workflows=workflows,
    )


def load_parts(
    recipe: Recipe[AnyRun], config: AnyRun, models: Mapping[str, Path], device: str
) -> tuple[dict[str, Engine], dict[str, ChatTokenizer], dict[str, Workflow]]:
    """Engines and tokenizers by policy, workflows by name."""
    engines = {
        name: load_engine(config.rollout.engine, engine_spec(config, name, path, device))
        for name, path in models.items()
    }
    tokenizers = {name: load_tokenizer(str(path)) for name, path in models.items()}
    return engines, tokenizers, {name: load_workflow(target) for name, target in recipe.workflows.items()}


def engine_spec(config: RunConfig, model_id: str, model: Path, device: str) -> EngineSpec:
    rollout = config.rollout
    return EngineSpec(
        model_id=model_id,
        model=str(model),
        device=device,
        dtype=rollout.dtype,
        max_running=rollout.max_running,
        max_context=rollout.max_context,
        cache=rollout.cache,
        deterministic=config.debug,
    )


def policy_spec(config: RunConfig, run: RunDirectory, model_id: str, model: Path, device: str) -> PolicySpec:
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}/{model_id}".encode()).digest()[:4], "little")
    return PolicySpec(
        model_id=model_id,
        model=str(model),
        directory=str(run.checkpoints(model_id)),
        reference=str(model) if config.trainer.loss.kl > 0 else None,
        device=device,
        seed=seed,
    )


def trainer_config(config: RunConfig, model_id: str) -> TrainerConfig:
    """How this policy is trained: as all are, but for a backend of its own."""
    backend = config.policies[model_id].backend
    return msgspec.structs.replace(config.trainer, backend=backend) if backend else config.trainer
