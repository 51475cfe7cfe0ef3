"""Examples as padded arrays of few different shapes, so that little is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from astraflow.trainer import Example

STEP = 32
"""Rows are padded to a multiple of this many tokens."""


class Rows(NamedTuple):
    """One forward pass of B rows of L tokens, padded with rows and tokens that carry no weight.

    tokens int32 [B, L]; temperatures float32 [B]; trained bool [B, L - 1], of the token after each position; index
    int64 [K]: where the trained tokens, row by row, stand among the mini-batch's.
    """

    tokens: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    trained: NDArray[np.bool_]
    index: NDArray[np.int64]

    def spread(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of the mini-batch's trained tokens [N] -> [B, L - 1], 0 elsewhere."""
        table = np.zeros(self.trained.shape, np.float32)
        table[self.trained] = values[self.index]
        return table


def padded(examples: Sequence[Example], budget: int) -> Iterator[Rows]:
    """The mini-batch in passes of about `budget` tokens; rows of similar length go together."""
    starts = np.cumsum([0, *(example.trained.size for example in examples)])
    order = sorted(range(len(examples)), key=lambda i: examples[i].tokens.size)
    while order:
        length = -(-examples[order[0]].tokens.size // STEP) * STEP
        count = max(1, budget // length)
        taken = [i for i in order[:count] if examples[i].tokens.size <= length]
        order = order[len(taken) :]
        tokens = np.zeros((min(count, 1 << (len(taken) - 1).bit_length()), length), np.int32)
        trained = np.zeros((len(tokens), length - 1), np.bool_)
        temperatures = np.ones(len(tokens), np.float32)
        for row, i in enumerate(taken):
            tokens[row, : examples[i].tokens.size] = examples[i].tokens
            trained[row, examples[i].trained - 1] = True
            temperatures[row] = examples[i].temperature
        yield Rows(tokens, temperatures, trained, np.concatenate([np.arange(starts[i], starts[i + 1]) for i in taken]))
