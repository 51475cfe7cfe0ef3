"""The training loop: losses, packing, optimiser, checkpoints, publishing.

The torch backend is reached by name (`load_backend`), so importing this package imports neither torch nor transformers.
"""

from .advantages import Groups, normalized, token_advantages
from .batch import Example, examples
from .checkpoint import Checkpoint, CheckpointMeta, latest_checkpoint, save_checkpoint
from .config import LOSS_NAMES, AdvantageConfig, CriticConfig, LossConfig, OptimConfig, TrainerConfig, check
from .interface import (
    REQUIRED_METRICS,
    BadBatch,
    PolicySpec,
    PublishesItself,
    PublishTarget,
    SavesAside,
    StepResult,
    TrainerBackend,
)
from .launch import world
from .loop import TrainSummary, follow, train
from .packing import minibatches
from .registry import UnknownBackend, load_backend

__all__ = [
    "LOSS_NAMES",
    "REQUIRED_METRICS",
    "AdvantageConfig",
    "BadBatch",
    "Checkpoint",
    "CheckpointMeta",
    "CriticConfig",
    "Example",
    "Groups",
    "LossConfig",
    "OptimConfig",
    "PolicySpec",
    "PublishTarget",
    "PublishesItself",
    "SavesAside",
    "StepResult",
    "TrainSummary",
    "TrainerBackend",
    "TrainerConfig",
    "UnknownBackend",
    "check",
    "examples",
    "follow",
    "latest_checkpoint",
    "load_backend",
    "minibatches",
    "normalized",
    "save_checkpoint",
    "token_advantages",
    "train",
    "world",
]
