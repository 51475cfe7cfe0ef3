"""GRESO: skip, before generation, prompts that keep giving no variance (arXiv:2506.02177, in AstraFlow's form).

Per prompt, z counts its consecutive results without variance; they are *easy* if their mean reward is above 0.5, else
*hard*. A change of kind restarts z at 1, a result with variance sets it to 0. A prompt with z = 0 is submitted, another
with probability max(p_kind^z, floor_kind). After the first epoch, once per policy version, p_kind falls by `step` if
of the groups ingested since the last version at least the share `target_kind` was of that kind, else it rises; without
any group since then it stays.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from ..group import PolicyGroup
from ..interface import Prompt
from .selector import ByProbability, prompt_key
from .stage import Context, Dice, read_state
from .table import PromptTable

ZeroKind = Literal["easy", "hard"]
KINDS: tuple[ZeroKind, ...] = get_args(ZeroKind)
P_LEAST, P_MOST = 0.01, 0.99


class Streak(msgspec.Struct, frozen=True):
    """`z` consecutive results without variance, all of this kind."""

    kind: ZeroKind
    z: int


class GresoState(msgspec.Struct, frozen=True, kw_only=True):
    streaks: dict[str, Streak]
    p: dict[ZeroKind, float]
    zero: dict[ZeroKind, int]
    groups: int
    version: int
    drawn: int


class Greso(ByProbability):
    """The rule of the module's docstring."""

    def __init__(
        self,
        context: Context,
        p: float = 0.5,
        floor_easy: float = 0.10,
        floor_hard: float = 0.40,
        target_easy: float = 0.083,
        target_hard: float = 0.167,
        step: float = 0.01,
    ) -> None:
        if context.n_samples < 2:
            raise ValueError(f"with n_samples {context.n_samples} no group has variance: every prompt would be skipped")
        for name, value in (("p", p), ("floor_easy", floor_easy), ("floor_hard", floor_hard)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}: a probability is between 0 and 1")
        self._floor: dict[ZeroKind, float] = {"easy": floor_easy, "hard": floor_hard}
        self._target: dict[ZeroKind, float] = {"easy": target_easy, "hard": target_hard}
        self._step = step
        self._streaks: PromptTable[Streak] = PromptTable()
        self._p: dict[ZeroKind, float] = dict.fromkeys(KINDS, p)
        self._zero: dict[ZeroKind, int] = dict.fromkeys(KINDS, 0)
        self._groups = 0
        self._version = 0
        self._dice = Dice(context.seed)

    def probability(self, prompt: Prompt) -> float:
        streak = self._streaks.get(prompt_key(prompt))
        return 1.0 if streak is None else max(self._p[streak.kind] ** streak.z, self._floor[streak.kind])

    def outcome(self, group: PolicyGroup, /) -> None:
        key = prompt_key(group.prompt)
        self._groups += 1
        if not group.constant:
            self._streaks.forget(key)
            return
        kind: ZeroKind = "easy" if group.mean > 0.5 else "hard"
        self._zero[kind] += 1
        before = self._streaks.get(key)
        z = before.z + 1 if before is not None and before.kind == kind else 1
        self._streaks.set(key, Streak(kind, z))

    def advance(self, version: int, epoch: int, /) -> None:
        if version > self._version and epoch > 0 and self._groups:
            for kind in KINDS:
                falls = self._zero[kind] / self._groups >= self._target[kind]
                p = self._p[kind] + (-self._step if falls else self._step)
                self._p[kind] = min(max(p, P_LEAST), P_MOST)
        if version != self._version:
            self._zero = dict.fromkeys(KINDS, 0)
            self._groups = 0
        self._version = version

    def state(self) -> GresoState:
        return GresoState(
            streaks=self._streaks.copy(),
            p=dict(self._p),
            zero=dict(self._zero),
            groups=self._groups,
            version=self._version,
            drawn=self._dice.drawn,
        )

    def restore(self, state: Any, /) -> None:
        kept = read_state(state, GresoState)
        self._streaks = PromptTable(kept.streaks)
        self._p, self._zero = dict(kept.p), dict(kept.zero)
        self._groups, self._version, self._dice.drawn = kept.groups, kept.version, kept.drawn

    def stats(self) -> dict[str, float]:
        kinds = [streak.kind for streak in self._streaks.values()]
        return {
            "p_easy": self._p["easy"],
            "p_hard": self._p["hard"],
            "easy": float(kinds.count("easy")),
            "hard": float(kinds.count("hard")),
        }
