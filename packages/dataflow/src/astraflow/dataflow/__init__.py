"""Tasks, trajectories, buffers, data algorithms and the control plane of reinforcement learning."""

from .algorithms.batching import BatchBy
from .algorithms.correction import StalenessCorrection
from .algorithms.entry import Entry
from .algorithms.filter import Filter
from .algorithms.order import Order
from .algorithms.pick import Pick
from .algorithms.selector import Selector
from .algorithms.stage import Context, Dice, Stage, read_state
from .arrays import Array
from .balance import pool_target, wait_fraction
from .config import DataflowConfig, PolicyFeed, Replay
from .data.gym import gym_dataset
from .data.mixture import MixBy, MixtureSource
from .data.open import open_sources
from .data.stream import StreamSource
from .failures import FailurePolicy
from .figures import LengthCount, MetricSummary, PolicyStatus, WorkerStatus
from .group import PolicyGroup, advantage_of, reward_of, trajectory_of
from .inspection import inspect_journal
from .interface import (
    Attachment,
    AttachRequest,
    BatchReply,
    BatchRequest,
    CommitRequest,
    Control,
    DataflowService,
    Empty,
    EvaluateRequest,
    Evaluation,
    EvaluationQuery,
    Fenced,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Message,
    Phase,
    Policies,
    PolicyVersion,
    Prompt,
    Purpose,
    Registration,
    RolloutGroup,
    RolloutTask,
    RunFailed,
    SampleResult,
    Sampling,
    Scalar,
    Status,
    StepReport,
    SubmitReply,
    SubmitRequest,
    SuiteReport,
    TaskProgress,
    TrainBatch,
    TrainSample,
    Trajectory,
    TrajectoryStatus,
    WatchRequest,
    WorkerStats,
)
from .journal import Journal, JournalError, open_journal, reopen_journal
from .observer import Observer
from .sequence import FinishReason, Sequence
from .service import Dataflow
from .sources import EvalSuite, ListSource, PromptSource, SourceFailed

__all__ = [
    "Array",
    "AttachRequest",
    "Attachment",
    "BatchBy",
    "BatchReply",
    "BatchRequest",
    "CommitRequest",
    "Context",
    "Control",
    "Dataflow",
    "DataflowConfig",
    "DataflowService",
    "Dice",
    "Empty",
    "Entry",
    "EvalSuite",
    "EvaluateRequest",
    "Evaluation",
    "EvaluationQuery",
    "FailurePolicy",
    "Fenced",
    "Filter",
    "FinishReason",
    "Heartbeat",
    "HeartbeatReply",
    "Journal",
    "JournalError",
    "LeaseReply",
    "LeaseRequest",
    "LengthCount",
    "ListSource",
    "Message",
    "MetricSummary",
    "MixBy",
    "MixtureSource",
    "Observer",
    "Order",
    "Phase",
    "Pick",
    "Policies",
    "PolicyFeed",
    "PolicyGroup",
    "PolicyStatus",
    "PolicyVersion",
    "Prompt",
    "PromptSource",
    "Purpose",
    "Registration",
    "Replay",
    "RolloutGroup",
    "RolloutTask",
    "RunFailed",
    "SampleResult",
    "Sampling",
    "Scalar",
    "Selector",
    "Sequence",
    "SourceFailed",
    "Stage",
    "StalenessCorrection",
    "Status",
    "StepReport",
    "StreamSource",
    "SubmitReply",
    "SubmitRequest",
    "SuiteReport",
    "TaskProgress",
    "TrainBatch",
    "TrainSample",
    "Trajectory",
    "TrajectoryStatus",
    "WatchRequest",
    "WorkerStats",
    "WorkerStatus",
    "advantage_of",
    "gym_dataset",
    "inspect_journal",
    "open_journal",
    "open_sources",
    "pool_target",
    "read_state",
    "reopen_journal",
    "reward_of",
    "trajectory_of",
    "wait_fraction",
]
