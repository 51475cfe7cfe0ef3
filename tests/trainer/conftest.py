"""The conformance kit's toy model and batches, as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from astraflow.dataflow import TrainBatch, TrainSample
from astraflow.trainer import PolicySpec
from astraflow.trainer.conformance import toy


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[bool, int], Path] = {}

    def make(*, tied: bool = True, seed: int = 0) -> Path:
        if (tied, seed) not in made:
            made[tied, seed] = toy.make_model(tmp_path_factory.mktemp("model"), tied=tied, seed=seed)
        return made[tied, seed]

    return make


@pytest.fixture
def spec(make_model: Callable[..., Path], tmp_path: Path) -> PolicySpec:
    return PolicySpec(model_id="p", model=str(make_model()), directory=str(tmp_path / "checkpoints"))


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., TrainSample]:
    return toy.make_sample


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TrainBatch]:
    return toy.make_batch
