"""The invariants of many sequences at once: what a submit brings is looked through in one pass over all its tokens.

Invariant: what passes here passes `Sequence.check`; what does not is looked at there, one by one, for the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .sequence import Sequence as TokenSequence


def well_formed(sequences: Sequence[TokenSequence]) -> bool:
    """Do all of them hold the invariants, with log-probabilities finite and <= 0 and versions exactly at the trained
    tokens? Each is then given its `version_range`. False also for what only `Sequence.check` can tell."""
    if not sequences or not all(_shaped(sequence) for sequence in sequences):
        return not sequences
    mask = b"".join(sequence.loss_mask.data for sequence in sequences)
    tokens = np.frombuffer(b"".join(sequence.tokens.data for sequence in sequences), np.int32)
    logprobs = np.frombuffer(b"".join(sequence.logprobs.data for sequence in sequences), np.float32)
    versions = np.frombuffer(b"".join(sequence.versions.data for sequence in sequences), np.int32)
    # A comparison with NaN is false. As unsigned numbers, negative versions are larger than all others.
    if not (
        np.minimum.reduce(tokens) >= 0
        and np.maximum.reduce(logprobs) <= 0
        and np.minimum.reduce(logprobs) > -math.inf
        and (versions >= 0).tobytes() == mask
    ):
        return False
    starts = [0, *accumulate(sequence.tokens.shape[0] for sequence in sequences[:-1])]
    oldest = np.minimum.reduceat(versions.view(np.uint32), starts).tolist()
    newest = np.maximum.reduceat(versions, starts).tolist()
    for sequence, first, last in zip(sequences, oldest, newest, strict=True):
        vars(sequence)["version_range"] = (first, last) if last >= 0 else (-1, -1)
    return True


def _shaped(sequence: TokenSequence) -> bool:
    """Types and shapes, the first token, the reward."""
    tokens, mask, logprobs, versions = sequence.tokens, sequence.loss_mask, sequence.logprobs, sequence.versions
    shape, reward = tokens.shape, sequence.reward
    return (
        len(shape) == 1
        and shape[0] >= 2
        and mask.shape == logprobs.shape == versions.shape == shape
        and (tokens.dtype, mask.dtype, logprobs.dtype, versions.dtype) == ("int32", "bool", "float32", "int32")
        and len(tokens.data) == len(logprobs.data) == len(versions.data) == 4 * shape[0]
        and len(mask.data) == shape[0]
        and not mask.data[0]
        and (reward is None or math.isfinite(reward))
    )
