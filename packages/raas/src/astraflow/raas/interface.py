"""The nouns of rollout: engines sample tokens, handles record them, workflows turn a task into a trajectory.

Invariants:

* a `Generation` has one log-probability and one version per token, in the order sampled; across a change of
  weights no token is lost or repeated and the budget is not shortened;
* an engine never serves a new request from a cache made by older weights;
* what a handle records is exactly what the engine sampled: a later turn extends a sequence only when its prompt
  begins with exactly the tokens so far, otherwise it starts another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from astraflow.dataflow import FinishReason, Message, RolloutTask, Sampling
from astraflow.weightsync import Sink

CachePolicy = Literal["recompute", "keep"]
"""What happens to the caches of running generations when weights change: made again under the new weights (every
log-probability is exact for one version), or kept (faster; the mismatch is reported by the trainer)."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is made from. `model` is a local Hugging Face directory; `max_running` requests run at once,
    more queue; `max_context` bounds prompt + answer in tokens; `deterministic`: one request at a time, seeded."""

    model_id: str
    model: str
    device: str = "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_running: int = 32
    max_context: int = 512
    cache: CachePolicy = "recompute"
    deterministic: bool = False
    options: dict[str, str | int | float | bool] = {}


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Continue `prompt` (token ids). Generation ends with one of `stop_token_ids` (kept) or the budget."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    seed: int


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled: tokens [N], logprobs [N] at the sampling temperature, versions [N]."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """`generated_tokens` counts since the start; `running` and `waiting` are requests now."""

    running: int
    waiting: int
    generated_tokens: int


class Progress(msgspec.Struct, frozen=True):
    """Of a request under way: tokens sampled so far, and the version of the first."""

    tokens: int = 0
    began: int = -1


class EngineError(Exception):
    """A request failed (too long, engine gone); the message says what to do."""


class EngineGone(EngineError):
    """The engine runs no more, and will answer nothing: whoever owns it must make another."""


class Engine(Protocol):
    """One policy's sampler. Constructed from an `EngineSpec`; an entry point of the group `astraflow.engines`."""

    def __init__(self, spec: EngineSpec, /) -> None: ...

    @property
    def version(self) -> int:
        """The version new requests are sampled with; 0 until the first `swap`."""
        ...

    async def start(self) -> None:
        """Load the model and be ready. Raises EngineError."""
        ...

    async def aclose(self) -> None:
        """Stop, failing what still runs. Idempotent; no thread or process is left."""
        ...

    async def generate(self, request: GenerateRequest, /) -> Generation:
        """Sample one answer. Cancelling the caller aborts the request. Raises EngineError (EngineGone for the last
        time)."""
        ...

    def sink(self) -> Sink:
        """Where weightsync puts this engine's weights."""
        ...

    async def swap(self, commit: Callable[[], None], version: int, /) -> float:
        """Run the blocking `commit` while generation stands still, then go on as `version`.

        If `commit` raises, the old weights and version go on serving and the exception surfaces.
        Returns the seconds generation stood still.
        """
        ...

    def progress(self, request_id: str, /) -> Progress:
        """How far a running request is; nothing sampled, of an unknown one."""
        ...

    def stats(self) -> EngineStats: ...


class Turn(Protocol):
    """One answer of a policy. Setting `reward` rewards the sequence it belongs to (None masks it)."""

    reward: float | None

    @property
    def text(self) -> str:
        """The answer as text, prefill included, special tokens not."""
        ...

    @property
    def finish_reason(self) -> FinishReason: ...


class PolicyHandle(Protocol):
    """A policy inside one rollout: calls are sampled by its engine and recorded token by token."""

    @property
    def model_id(self) -> str: ...

    async def chat(
        self, messages: Sequence[Message], /, *, prefill: str = "", role: str = "", fresh: bool = False
    ) -> Turn:
        """Answer `messages` through the model's chat template. `prefill` opens the answer (not trained);
        `role` names the part this policy plays; `fresh` starts another sequence even where the prefix matches."""
        ...

    async def generate(self, prompt: Sequence[int], /, *, role: str = "", fresh: bool = False) -> Turn:
        """Continue token ids."""
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a workflow says at its end: metrics (evaluation averages them) and the messages for people; without
    `messages` the handles' own record is shown."""

    metrics: dict[str, float] = {}
    messages: tuple[Message, ...] = ()


Workflow = Callable[[RolloutTask, Mapping[str, PolicyHandle]], Awaitable[Outcome]]
"""One sample: asks the policies, sets the turns' rewards, returns the outcome. An exception fails this sample alone."""
