"""The training loop: losses, packing, optimiser, checkpoints, publishing.

The torch backend is reached by name (`load_backend`), so importing this package imports neither torch nor transformers.
"""

from .checkpoint import Checkpoint, CheckpointMeta, latest_checkpoint, save_checkpoint
from .interface import (
    AdvantageConfig,
    BadBatch,
    LossConfig,
    LossName,
    OptimConfig,
    PolicySpec,
    StepResult,
    TrainerBackend,
    TrainerConfig,
)
from .loop import TrainSummary, train
from .registry import UnknownBackend, load_backend

__all__ = [
    "AdvantageConfig",
    "BadBatch",
    "Checkpoint",
    "CheckpointMeta",
    "LossConfig",
    "LossName",
    "OptimConfig",
    "PolicySpec",
    "StepResult",
    "TrainSummary",
    "TrainerBackend",
    "TrainerConfig",
    "UnknownBackend",
    "latest_checkpoint",
    "load_backend",
    "save_checkpoint",
    "train",
]
