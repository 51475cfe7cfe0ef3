"""The running batch: which requests run in which slot, and one step at a time. No threads, no event loop.

Invariants:

* a running job's slot holds the keys and values of `ids[:cached]`; everything a step does is to bring `cached` up
  to date and to append one token, so a change of weights with "recompute" is no more than `cached = 0`;
* positions are shared between slots only when all of them were computed under the weights of now (`epoch`);
* a job's random numbers come from its own seed, so what it draws does not depend on who runs beside it.

Requests of one group have the same prompt: one of them computes it and the others copy it, also when they are
admitted later, as long as one of them still runs, and also after a change of weights.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from astraflow.raas.engines.sampling import sample
from astraflow.raas.engines.slots import ATTENTION, SlotCache, Window
from astraflow.raas.interface import EngineError, EngineSpec, GenerateRequest, Generation

PREFILL_TOKENS = 2048
"""Tokens, padding included, of one forward pass over prompts: bounds its memory and how long a swap waits for it."""

_LOADING = threading.Lock()
"""from_pretrained changes the process's default device and dtype while it runs: one at a time."""


@dataclass(eq=False, slots=True)
class Job:
    """A request under way. `ids` is the prompt and the tokens so far; `outcome` is set once, at the end, and then
    `done` called with it. `epoch` counts the changes of weights before the slot was filled."""

    request: GenerateRequest
    done: Callable[[Generation | EngineError], None]
    ids: list[int] = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    epoch: int = -1
    cancelled: bool = False
    outcome: Generation | EngineError | None = None
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt)
        self.random = random.Random(self.request.seed)

    @property
    def lag(self) -> int:
        """Tokens to compute before the next can be drawn; at least 1."""
        return len(self.ids) - self.cached

    def append(self, token: int, logprob: float, version: int) -> None:
        request = self.request
        if not math.isfinite(logprob):
            self.outcome = EngineError(
                f"request {request.request_id}: log-probability {logprob} of token {token} at version {version}: "
                "the weights or activations are not finite; look at the trainer's loss and gradient norm"
            )
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        stopped = token in request.stop_token_ids
        if stopped or len(self.versions) == request.sampling.max_new_tokens:
            self.outcome = Generation(
                tokens=tuple(self.ids[len(request.prompt) :]),
                logprobs=tuple(self.logprobs),
                versions=tuple(self.versions),
                finish_reason="stop" if stopped else "length",
            )


def load_model(spec: EngineSpec) -> Any:
    """The model of a local directory, ready to run on slots. Raises EngineError for attention it cannot do."""
    with _LOADING:
        model = AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=getattr(torch, spec.dtype), attn_implementation=ATTENTION, local_files_only=True
        )
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise EngineError(
            f"{spec.model}: layers {sorted(kinds)}, sliding window {getattr(config, 'sliding_window', None)}: the "
            "transformers engine runs full attention only; use the sglang engine for this model"
        )
    model.requires_grad_(False)
    return model.eval().to(spec.device)


class Batch:
    """Jobs that wait, jobs that run, and the model that steps them. Used by one thread at a time."""

    def __init__(self, model: Any, spec: EngineSpec) -> None:
        config = model.config.get_text_config()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.generated = 0
        self.vocab_size: int = config.vocab_size
        self._model = model
        self._epoch = 0
        self._limit = 1 if spec.deterministic else spec.max_running
        self._device = torch.device(spec.device)
        self._cache = SlotCache(
            layers=config.num_hidden_layers,
            slots=self._limit,
            heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=getattr(torch, spec.dtype),
            device=self._device,
        )

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def new_weights(self, *, recompute: bool) -> None:
        """The weights changed; with `recompute` the next steps compute again what the old ones had computed.

        Without it that still holds for a job that has no token yet: it is a new request.
        """
        self._epoch += 1
        for job in self.running:
            if recompute or not job.versions:
                job.cached = 0

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """One forward pass: over prompts while any are missing, else one token, sampled at `version`, for every job."""
        self.waiting = deque(job for job in self.waiting if not job.cancelled)
        self._retire()
        while self.waiting and len(self.running) < self._limit:
            self.running.append(self.waiting.popleft())
        if self.running:
            self._advance(self._share() or list(range(len(self.running))), version)

    def _share(self) -> list[int]:
        """Copy what another slot has already computed; return the slots to compute next, none if all are ready.

        A job most of whose missing tokens an earlier job of this pass computes waits for it, to copy them then.
        """
        computed = [(slot, job.ids[: job.cached]) for slot, job in enumerate(self.running) if job.epoch == self._epoch]
        chosen: list[int] = []
        copies: list[tuple[int, int]] = []
        width = 0
        for slot, job in enumerate(self.running):
            if job.lag == 1:
                continue
            shared, source = max(((common_prefix(job, ids), other) for other, ids in computed), default=(0, slot))
            if shared > job.cached:
                copies.append((source, slot))
                job.cached, job.epoch = shared, self._epoch
            wider = max(width, job.lag)
            full = bool(chosen) and wider * (len(chosen) + 1) > PREFILL_TOKENS
            follows = any(2 * (common_prefix(job, self.running[i].ids) - job.cached) > job.lag for i in chosen)
            if job.lag > 1 and not full and not follows:
                chosen.append(slot)
                width = wider
        if copies:
            sources, targets = zip(*copies, strict=True)
            self._cache.copy(list(sources), list(targets), max(self.running[slot].cached for slot in targets))
        return chosen

    def _advance(self, slots: list[int], version: int) -> None:
        """Bring these slots up to date, draw their next tokens and take out the jobs that ended."""
        jobs = [self.running[slot] for slot in slots]
        logits = self._forward(slots, jobs)
        temperatures = [job.request.sampling.temperature for job in jobs]
        tokens, logprobs = sample(logits, temperatures, [job.random.random() for job in jobs])
        for job, token, logprob in zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True):
            if job.cached == 0:
                job.epoch = self._epoch
            job.cached = len(job.ids)
            job.append(token, logprob, version)
        self.generated += len(jobs)
        self._retire()

    def _forward(self, slots: list[int], jobs: list[Job]) -> torch.Tensor:
        """Logits float32 [B, V] after the last token of each job; writes keys and values of `ids[cached:]`."""
        width = max(job.lag for job in jobs)
        ids = torch.tensor([job.ids[job.cached :] + [0] * (width - job.lag) for job in jobs], device=self._device)
        starts = torch.tensor([job.cached for job in jobs], device=self._device)
        positions = starts[:, None] + torch.arange(width, device=self._device)
        window = Window.of(
            self._cache,
            torch.tensor(slots, device=self._device),
            prefix=len(slots) == len(self.running),
            positions=positions,
            length=max(len(job.ids) for job in jobs),
        )
        last, column = torch.unique(torch.tensor([job.lag - 1 for job in jobs]), return_inverse=True)
        logits: torch.Tensor = self._model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last.to(self._device), window=window
        ).logits
        return logits[torch.arange(len(jobs)), column].float()

    def _retire(self) -> None:
        """Take out the jobs that ended or were cancelled, close the gaps, and tell those that ended."""
        gone = [job.cancelled or job.outcome is not None for job in self.running]
        if not any(gone):
            return
        before, left = self.running, gone.count(False)
        for slot, job in enumerate(before):
            if isinstance(job.outcome, EngineError):
                self._cache.clear(slot)
        self.running = before[:left]
        holes = [slot for slot in range(left) if gone[slot]]
        moved = [slot for slot in range(left, len(gone)) if not gone[slot]]
        if moved:
            self._cache.copy(moved, holes, max(before[slot].cached for slot in moved))
        for source, target in zip(moved, holes, strict=True):
            self.running[target] = before[source]
        for job in before:
            if job.outcome is not None:
                job.done(job.outcome)


def common_prefix(job: Job, ids: list[int]) -> int:
    """Leading tokens that a job shares with `ids`; its last token is always left, to be computed."""
    limit = min(len(job.ids) - 1, len(ids))
    if job.ids[:limit] == ids[:limit]:
        return limit
    return next(index for index in range(limit) if job.ids[index] != ids[index])
