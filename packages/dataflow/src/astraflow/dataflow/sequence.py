"""What is trained: a policy's tokens, as they were sampled.

Invariants, asserted by `Sequence.check`: `loss_mask`, `logprobs` and `versions` have the length of `tokens`; a token is
trained (mask true) only if it was sampled, and then its log-probability is finite and <= 0 and its version >= 0.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np

from .arrays import Array

FinishReason = Literal["stop", "length", "abort"]


class Sequence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One policy's contiguous token stream [L] in one trajectory.

    tokens int32 [L]; loss_mask bool [L], true where the policy sampled; logprobs float32 [L], log p of the token
    at `temperature` when it was sampled, 0 elsewhere; versions int32 [L], the policy version that sampled the
    token, -1 elsewhere. `reward` None masks the sequence (an error is never a reward of 0).
    """

    model_id: str
    role: str
    tokens: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    temperature: float
    finish_reason: FinishReason
    reward: float | None = None

    def check(self) -> None:
        """Assert the invariants of the module's docstring.

        Raises:
            ValueError: naming the first one that does not hold.
        """
        self._check_shapes()
        tokens, mask, logprobs = self.tokens.numpy(), self.loss_mask.numpy(), self.logprobs.numpy()
        if int(np.minimum.reduce(tokens)) < 0:
            raise ValueError("negative token id")
        if mask[0]:
            raise ValueError("the first token cannot be trained: nothing predicts it")
        # Where all of them are finite and <= 0, so are the trained ones; the comparison is false for NaN.
        if not (np.maximum.reduce(logprobs) <= 0 and np.minimum.reduce(logprobs) > -math.inf):
            trained = logprobs[mask]
            if not bool(np.isfinite(trained).all()) or bool((trained > 0).any()):
                raise ValueError("log-probabilities of trained tokens must be finite and <= 0")
        if self.version_range[0] < 0 and bool(mask.any()):
            raise ValueError("a trained token has no version")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} is not finite; use None for a sample that could not be scored")

    def _check_shapes(self) -> None:
        length = len(self.tokens.data) // 4
        wanted = (("tokens", "int32"), ("loss_mask", "bool"), ("logprobs", "float32"), ("versions", "int32"))
        for name, dtype in wanted:
            array: Array = getattr(self, name)
            if array.dtype != dtype or array.shape != (length,):
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, wanted {dtype}[{length}]")
        if length < 2:
            raise ValueError(f"a sequence of {length} tokens has nothing to train")

    @property
    def oldest_version(self) -> int:
        """The smallest version over the trained tokens; -1 if none is trained."""
        return self.version_range[0]

    @cached_property
    def version_range(self) -> tuple[int, int]:
        """The smallest and the largest version over the trained tokens; -1, -1 if none is trained."""
        mask, versions = self.loss_mask.numpy(), self.versions.numpy()
        if (versions >= 0).tobytes() == bytes(self.loss_mask.data):
            # Exactly the trained tokens have a version: as unsigned numbers the others are larger than any of them.
            newest = int(np.maximum.reduce(versions))
            return (int(np.minimum.reduce(versions.view(np.uint32))), newest) if newest >= 0 else (-1, -1)
        trained = versions[mask]
        return (int(trained.min()), int(trained.max())) if trained.size else (-1, -1)
