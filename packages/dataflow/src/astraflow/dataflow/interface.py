"""The nouns of the system and the one Protocol through which everybody meets: read this page first.

Rollout workers lease `RolloutTask`s and submit `SampleResult`s; trainers ask for `TrainBatch`es and announce
`PolicyVersion`s; a view or a command line asks for `Status` and evaluations. Everybody pulls: the dataflow never
calls anyone, so a worker or trainer in this process, another process or another region is the same code path.

Invariants, asserted where the objects are made (`Sequence.check`) and relied upon everywhere else:

* token in, token out: `Sequence.tokens` are the ids that were sampled; text is never tokenised again;
* `loss_mask`, `logprobs` and `versions` have the length of `tokens`; a token is trained (mask true) only if it was
  sampled, and then its log-probability is finite and <= 0 and its version >= 0;
* a `PolicyVersion` never changes: (incarnation, model_id, version) names one set of weights for ever.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import msgspec

from astraflow.rpc import method, service

from .figures import LengthCount, MetricSummary, PolicyBalance, PolicyStatus, PoolBalance, WorkerStatus
from .sequence import Sequence

TrajectoryStatus = Literal["ok", "failed", "timed_out"]
Purpose = Literal["train", "eval"]
Phase = Literal["starting", "running", "evaluating", "finished"]
Scalar = str | int | float | bool


class Message(msgspec.Struct, gc=False, frozen=True):
    """One turn as people read it. `name` says which policy or tool spoke, where that is not plain from the role."""

    role: str
    content: str
    name: str = ""


class Prompt(msgspec.Struct, gc=False, frozen=True):
    """One problem. `id` is unique in its source; `reference` is the answer, never shown to a policy."""

    id: str
    source: str
    messages: tuple[Message, ...]
    reference: str = ""
    metadata: dict[str, Scalar] = {}


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy samples. temperature 0 is greedy (evaluation only: its log-probabilities are taken at 1).

    There is no top-p or top-k: the trainer's log-probabilities could not match them.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0


class PolicyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A published set of weights. `version` counts trained batches, 0 being the initial weights; `weights` is the
    weightsync store's URL; `incarnation` is granted by `attach` and fences a trainer that was replaced."""

    model_id: str
    version: int
    incarnation: int
    weights: str
    digest: str = ""


class RolloutTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker leases: roll out `n_samples` trajectories of one prompt.

    `task_id` is deterministic (source, number). `seed` + sample index seeds a sample. `deadline_s` is how long a
    task may go without a new token, `limit_s` how long it may take in all, in seconds from its lease. `versions` is
    the newest version of every policy at lease time; the worker waits until its engines hold at least `min_versions`
    (synchronous mode), or exactly those `pinned` (evaluation), at which it then stays. `done` are the sample indices
    that an earlier attempt brought in: they need not run again.
    """

    task_id: str
    prompt: Prompt
    workflow: str
    n_samples: int
    sampling: dict[str, Sampling]
    seed: int
    deadline_s: float
    limit_s: float = math.inf
    attempt: int = 0
    purpose: Purpose = "train"
    suite: str = ""
    versions: dict[str, int] = {}
    min_versions: dict[str, int] = {}
    pinned: tuple[PolicyVersion, ...] = ()
    done: tuple[int, ...] = ()


class Trajectory(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """One sample across policies: their sequences, the messages for people, and metrics (evaluation averages them)."""

    sequences: tuple[Sequence, ...] = ()
    messages: tuple[Message, ...] = ()
    metrics: dict[str, float] = {}
    status: TrajectoryStatus = "ok"
    error: str = ""


class SampleResult(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """One trajectory of a task as a worker submits it. `seconds` is from lease to submit; `tokens` were sampled, also
    where nothing came of them; `incarnations` are, for the policies whose weights had been published, those of the
    oldest weights that had a part in it."""

    task_id: str
    sample_index: int
    attempt: int
    worker_id: str
    trajectory: Trajectory
    seconds: float = 0.0
    tokens: int = 0
    incarnations: dict[str, int] = {}


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories of a task by sample index, assembled in the dataflow; None where one failed or timed out."""

    task: RolloutTask
    trajectories: tuple[Trajectory | None, ...]


class TrainSample(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """A sequence with the statistics of its (task, model_id) group, taken over trajectories.

    `group_std` is unbiased, 0 for a group of one. `weight` multiplies its loss (importance correction); `ratio_range`
    [low, high], if there is one, bounds its tokens' importance ratio beside the loss's own range.
    """

    sequence: Sequence
    sample_id: str
    group_id: str
    group_mean: float
    group_std: float
    group_size: int
    weight: float = 1.0
    ratio_range: tuple[float, float] | None = None
    replayed: bool = False


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimiser step of one policy consumes. `version` is the version it was cut at: training it makes
    `version` + 1. Never empty."""

    batch_id: str
    model_id: str
    version: int
    samples: tuple[TrainSample, ...]


# --- what workers say and hear -----------------------------------------------------------------------------------


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's introduction. `capacity` is the samples it wants to run at once; `policies` those it serves."""

    worker_id: str
    pool: str
    capacity: int
    policies: tuple[str, ...]
    region: str = "local"
    gpus: float = 0.0
    pid: int = 0


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for up to `max_tasks` tasks, waiting at most `wait_s` seconds for the first. Together they have at most
    `max_samples` samples to run (0: no such bound), unless a single one has more."""

    worker_id: str
    max_tasks: int
    max_samples: int = 0
    wait_s: float = 5.0


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """`finished`: the run needs no more rollouts, the worker may leave."""

    tasks: tuple[RolloutTask, ...] = ()
    finished: bool = False


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    results: tuple[SampleResult, ...]


class SubmitReply(msgspec.Struct, frozen=True, kw_only=True):
    """`rejected` names what was malformed, one line each; duplicates and late results are counted, not errors."""

    accepted: int
    duplicates: int = 0
    rejected: tuple[str, ...] = ()


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one worker since its last heartbeat, except `running` and `versions`, which are of now."""

    running: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    versions: dict[str, int] = {}
    pulled_full_bytes: int = 0
    pulled_delta_bytes: int = 0
    swap_pause_s: float = 0.0


class TaskProgress(msgspec.Struct, gc=False, frozen=True, array_like=True):
    """How far a task is: `tokens` sampled so far in this attempt. `began` has the policies in which every sample that
    is still open has a token: the newest of the versions that the samples' oldest tokens are of."""

    task_id: str
    tokens: int
    began: dict[str, int] = {}


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """`tasks` are the task ids the worker still runs: their leases stay alive. `progress` of those that have begun.
    `declined` are evaluation tasks whose pinned versions it cannot have. `leaving`: the last word of a worker that
    goes; what it holds goes to others at once."""

    worker_id: str
    tasks: tuple[str, ...] = ()
    progress: tuple[TaskProgress, ...] = ()
    declined: tuple[str, ...] = ()
    stats: WorkerStats = WorkerStats()
    leaving: bool = False


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """`cancel` are tasks nobody needs any more, or of which nothing would be young enough to train; `known` false asks
    the worker to register again."""

    known: bool = True
    cancel: tuple[str, ...] = ()
    finished: bool = False


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Wait at most `wait_s` seconds until a policy has a version other than `known` (model_id -> version), or an
    incarnation other than `incarnations`, where that names it."""

    known: dict[str, int] = {}
    wait_s: float = 10.0
    incarnations: dict[str, int] = {}


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """The newest published version of every policy that has one."""

    versions: tuple[PolicyVersion, ...] = ()


# --- what trainers say and hear ----------------------------------------------------------------------------------


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer takes charge of a policy at `version`, having consumed exactly `consumed` (batch ids, in order).

    The trainer's checkpoint is the authority: those batches are committed, later ones are served again.
    """

    model_id: str
    version: int = 0
    consumed: tuple[str, ...] = ()


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """The incarnation under which this trainer speaks; an older one is refused with `Fenced`. `steps` is how many
    versions the run wants in all."""

    incarnation: int
    steps: int


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the batch that makes `version` + 1, waiting at most `wait_s` seconds."""

    model_id: str
    incarnation: int
    version: int
    wait_s: float = 10.0


class BatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """`batch` None and not `finished`: nothing yet, ask again."""

    batch: TrainBatch | None = None
    finished: bool = False


class CommitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint at `version` is durable: batches up to it need not be served again."""

    model_id: str
    incarnation: int
    version: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One optimiser step as the trainer saw it; `metrics` holds the trainer's own figures by name.

    `wait_s` is time spent waiting for the batch, `step_s` from batch to new weights.
    """

    model_id: str
    incarnation: int
    version: int
    batch_id: str
    wait_s: float
    step_s: float
    metrics: dict[str, float]


# --- what people and the run's driver ask ------------------------------------------------------------------------


class EvaluateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Start the evaluation `suites` (configured names) under `label`, at the newest published version of every policy;
    idempotent by label. Its tasks are leased before others; a worker that takes one evaluates until none is left for
    it, and while training goes on only a share of the workers does."""

    label: str
    suites: tuple[str, ...]


class EvaluationQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for an evaluation's state, waiting at most `wait_s` seconds for its end."""

    label: str
    wait_s: float = 10.0


class SuiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """One suite's figures so far, at exactly these `versions`. `metrics`: the mean over all samples (avg@k), `passes`:
    pass@k by k, for metrics of 0 and 1. A sample that failed, never came back or was sampled by another version (these
    are `elsewhere`) counts as 0 in every metric and is counted in `missing`. `examples` are trajectories to read."""

    suite: str
    done: int
    total: int
    missing: int
    metrics: dict[str, MetricSummary]
    versions: dict[str, int]
    elsewhere: int = 0
    passes: dict[str, dict[int, MetricSummary]] = {}
    examples: tuple[Trajectory, ...] = ()


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    finished: bool
    suites: tuple[SuiteReport, ...]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a person wants to see at one glance. `metrics` are means of the trajectories' own metrics over the
    window; `data` are the figures of the prompt source and of the selection before rollout; `example` is the newest
    trajectory; `lengths` counts training samples by sampled tokens; `evaluating` counts workers. `warning`: somebody
    waits and nothing goes on; `error`: the run cannot go on.
    """

    phase: Phase
    policies: tuple[PolicyStatus, ...]
    workers: tuple[WorkerStatus, ...]
    leased: int = 0
    pending_eval: int = 0
    evaluating: int = 0
    metrics: dict[str, float] = {}
    data: dict[str, dict[str, float]] = {}
    example: Trajectory | None = None
    lengths: tuple[LengthCount, ...] = ()
    warning: str = ""
    error: str = ""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Demand and supply over the last `window_s` seconds."""

    window_s: float
    policies: tuple[PolicyBalance, ...]
    pools: tuple[PoolBalance, ...]


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """Move the run: `running` opens training leases, `finished` sends workers and trainers home."""

    phase: Phase


class Empty(msgspec.Struct, frozen=True):
    """Nothing to say, or a plain acknowledgement."""


class Fenced(Exception):
    """A trainer spoke under an incarnation that has been replaced: it must stop."""


class RunFailed(Exception):
    """The run cannot go on; the message says why, with figures (all groups dropped, every worker gone …)."""


@service(errors=(Fenced, RunFailed))
class DataflowService(Protocol):
    """The dataflow as everybody sees it. Waiting calls return at the latest after their `wait_s`.

    Every method may be called again after a lost connection: what a lost reply granted (a lease, an incarnation) is
    taken back or replaced, and what was said twice counts once.
    """

    # workers
    @method(idempotent=True)
    async def register(self, request: Registration, /) -> Empty: ...
    @method(idempotent=True)
    async def lease(self, request: LeaseRequest, /) -> LeaseReply: ...
    @method(idempotent=True)
    async def submit(self, request: SubmitRequest, /) -> SubmitReply: ...
    @method(idempotent=True)
    async def heartbeat(self, request: Heartbeat, /) -> HeartbeatReply: ...
    @method(idempotent=True)
    async def watch(self, request: WatchRequest, /) -> Policies: ...

    # trainers
    @method(idempotent=True)
    async def attach(self, request: AttachRequest, /) -> Attachment: ...
    @method(idempotent=True)
    async def next_batch(self, request: BatchRequest, /) -> BatchReply: ...
    @method(idempotent=True)
    async def publish(self, request: PolicyVersion, /) -> Empty: ...
    @method(idempotent=True)
    async def report(self, request: StepReport, /) -> Empty: ...
    @method(idempotent=True)
    async def commit(self, request: CommitRequest, /) -> Empty: ...

    # people and the driver of the run
    @method(idempotent=True)
    async def control(self, request: Control, /) -> Empty: ...
    @method(idempotent=True)
    async def evaluate(self, request: EvaluateRequest, /) -> Empty: ...
    @method(idempotent=True)
    async def evaluation(self, request: EvaluationQuery, /) -> Evaluation: ...
    @method(idempotent=True)
    async def status(self, request: Empty, /) -> Status: ...
    @method(idempotent=True)
    async def balance(self, request: Empty, /) -> Balance: ...
