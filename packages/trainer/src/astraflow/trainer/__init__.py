"""The training loop: losses, packing, optimiser, checkpoints, publishing.

The torch backend is reached by name (`load_backend`), so importing this package imports neither torch nor transformers.
"""

from .checkpoint import Checkpoint, CheckpointMeta, latest_checkpoint, save_checkpoint
from .config import LOSS_NAMES, AdvantageConfig, CriticConfig, LossConfig, OptimConfig, TrainerConfig, check
from .interface import BadBatch, PolicySpec, StepResult, TrainerBackend
from .loop import TrainSummary, train
from .registry import UnknownBackend, load_backend

__all__ = [
    "LOSS_NAMES",
    "AdvantageConfig",
    "BadBatch",
    "Checkpoint",
    "CheckpointMeta",
    "CriticConfig",
    "LossConfig",
    "OptimConfig",
    "PolicySpec",
    "StepResult",
    "TrainSummary",
    "TrainerBackend",
    "TrainerConfig",
    "UnknownBackend",
    "check",
    "latest_checkpoint",
    "load_backend",
    "save_checkpoint",
    "train",
]
