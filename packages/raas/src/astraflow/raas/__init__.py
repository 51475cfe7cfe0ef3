"""Rollout as a service: workers, engines and the workflow runtime."""

from .handles import Handle, Policy
from .interface import (
    CachePolicy,
    Engine,
    EngineError,
    EngineGone,
    EngineSpec,
    EngineStats,
    GenerateRequest,
    Generation,
    Outcome,
    PolicyHandle,
    Progress,
    Turn,
    Workflow,
)
from .meter import Meter
from .recorder import RecordedTurn, Recorder
from .registry import load_engine, load_workflow
from .rollout import run_sample
from .scoring import parse_last_number
from .tokenizer import ChatTokenizer, Tokenizer, load_tokenizer
from .worker import Worker, WorkerConfig, WorkerFailed, first_cause

__all__ = [
    "CachePolicy",
    "ChatTokenizer",
    "Engine",
    "EngineError",
    "EngineGone",
    "EngineSpec",
    "EngineStats",
    "GenerateRequest",
    "Generation",
    "Handle",
    "Meter",
    "Outcome",
    "Policy",
    "PolicyHandle",
    "Progress",
    "RecordedTurn",
    "Recorder",
    "Tokenizer",
    "Turn",
    "Worker",
    "WorkerConfig",
    "WorkerFailed",
    "Workflow",
    "first_cause",
    "load_engine",
    "load_tokenizer",
    "load_workflow",
    "parse_last_number",
    "run_sample",
]
