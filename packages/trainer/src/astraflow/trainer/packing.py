"""Packing: examples -> mini-batches (one optimiser step each) -> micro-batches (one forward pass each).

The samples of a group repeat their prompt, prompts repeat their template, and short answers repeat each other. So the
rows of a mini-batch are merged into prefix trees: a token after the same tokens is computed once, whichever samples it
belongs to, and attends to its ancestors only. A micro-batch is a run of such trees without padding. A single row, or
rows that are all equal, is a tree without branches.

Invariants: everything here is deterministic; a node's ancestors are exactly the tokens before it in each of its rows,
and its position is how many there are, so its hidden state is what a row of its own would give; each trained token of
each example appears once, as (node that predicts it, target), in exactly one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .batch import Example

PAIR_COST = 1 / 1500
"""Cost of one query-key pair of a tree's dense attention, in units of one token's linear layers (measured on CPU for
a hidden size of 576, forward and backward; the wider the model the smaller, so large models share a little less than
they could)."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows merged by their common beginnings: `tokens` and `positions` int64 [T]; `visible` bool [T, T], true where
    the query (row) sees the key (column), or None for a single chain (plain causal attention)."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: trees one after another, T tokens in all, and what is read off it.

    heads int64 [U]: the nodes whose hidden state predicts something, each at `temperatures` float32 [U];
    pair_heads, pair_targets int64 [M]: the distinct predictions, `pair_targets[m]` after head `pair_heads[m]`
    (ascending); copies int64 [N]: for each trained token of each example its pair; index int64 [N]: where that token
    stands in the mini-batch's trained tokens (examples in order, tokens in order).
    """

    trees: tuple[Tree, ...]
    heads: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    pair_heads: NDArray[np.int64]
    pair_targets: NDArray[np.int64]
    copies: NDArray[np.int64]
    index: NDArray[np.int64]

    @property
    def size(self) -> int:
        return sum(tree.tokens.size for tree in self.trees)


def minibatches(examples: Sequence[Example], count: int) -> list[list[Example]]:
    """Cut into at most `count` runs of about equal numbers of sequences, none empty.

    A cut moves to the nearest end of a group if one is less than half a mini-batch away; otherwise it splits a group.
    """
    count = min(count, len(examples))
    ends = [i for i in range(1, len(examples)) if examples[i].group_id != examples[i - 1].group_id]
    size = len(examples) / count
    cuts = [0]
    for k in range(1, count):
        ideal = k * size
        near = min(ends, key=lambda end: abs(end - ideal), default=0)
        cuts.append(near if abs(near - ideal) < size / 2 else round(ideal))
    cuts.append(len(examples))
    return [list(examples[start:stop]) for start, stop in pairwise(cuts) if stop > start]


def micro_batches(examples: Sequence[Example], budget: int, *, share: bool = True) -> list[MicroBatch]:
    """Merge a mini-batch's rows into trees and pack those into forward passes of at most `budget` tokens.

    A row longer than `budget` is a micro-batch of its own. `share=False` keeps every row separate (a reference to
    compare with). Tokens after the last trained one, and that one, are targets only and are not forwarded.
    """
    rows = [example.tokens[: example.trained[-1]] for example in examples]
    # Little-endian bytes do not sort by token, but rows with a common beginning are still neighbours, which is enough.
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    builders: list[_TreeBuilder] = []
    for i in order:
        if not (share and builders and builders[-1].takes(rows[i], budget)):
            builders.append(_TreeBuilder())
        builders[-1].add(i, rows[i])
    bins: list[list[_TreeBuilder]] = []
    for builder in builders:
        if not bins or sum(other.size for other in bins[-1]) + builder.size > budget:
            bins.append([])
        bins[-1].append(builder)
    starts = np.cumsum([0, *(example.trained.size for example in examples)])
    return [_assemble(trees, examples, starts) for trees in bins]


def _common(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """Length of the common beginning."""
    n = min(left.size, right.size)
    different = left[:n] != right[:n]
    return int(different.argmax()) if different.any() else n


@dataclass(slots=True)
class _TreeBuilder:
    """Grows one tree from rows in an order that keeps common beginnings together."""

    size: int = 0
    chain: bool = True
    last: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    paths: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    path: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = field(default_factory=list)

    def takes(self, row: NDArray[np.int64], budget: int) -> bool:
        """Whether adding `row` here is allowed and cheaper than a tree of its own."""
        shared = _common(self.last, row)
        size = self.size + row.size - shared
        if size == self.size:
            return True
        chain = self.chain and shared == self.size
        return size <= budget and _cost(size, chain) < _cost(self.size, self.chain) + _cost(row.size, chain=True)

    def add(self, key: int, row: NDArray[np.int64]) -> None:
        shared = _common(self.last, row)
        self.chain = self.chain and (shared == self.size or shared == row.size)
        new = np.arange(self.size, self.size + row.size - shared)
        self.path = np.concatenate([self.path[:shared], new])
        if new.size:
            self.parts.append((row[shared:], self.path, shared))
        self.paths[key], self.last, self.size = self.path, row, self.size + new.size

    def build(self) -> Tree:
        tokens = np.concatenate([part for part, _, _ in self.parts])
        positions = np.concatenate([np.arange(shared, path.size) for _, path, shared in self.parts])
        if self.chain:
            return Tree(tokens, positions, None)
        visible = np.zeros((self.size, self.size), np.bool_)
        for _, path, shared in self.parts:
            new = path[shared:]
            visible[np.ix_(new, path[:shared])] = True
            visible[np.ix_(new, new)] = np.tri(new.size, dtype=np.bool_)
        return Tree(tokens, positions, visible)


def _cost(size: int, chain: bool) -> float:
    return size + PAIR_COST * size * size / (2 if chain else 1)


def _assemble(builders: list[_TreeBuilder], examples: Sequence[Example], starts: NDArray[np.int64]) -> MicroBatch:
    """Collect what the trees predict: (node, temperature, target) of every trained token, then each distinct once."""
    offset, nodes, temperatures, targets, index = 0, [], [], [], []
    for builder in builders:
        for key, path in builder.paths.items():
            example = examples[key]
            nodes.append(path[example.trained - 1] + offset)
            temperatures.append(np.full(example.trained.size, example.temperature, np.float32))
            targets.append(example.tokens[example.trained])
            index.append(np.arange(starts[key], starts[key + 1]))
        offset += builder.size
    heads, head_of = np.unique(_keys(np.concatenate(nodes), np.concatenate(temperatures)), return_inverse=True)
    pairs, copies = np.unique(_keys(head_of, np.concatenate(targets)), return_inverse=True)
    return MicroBatch(
        trees=tuple(builder.build() for builder in builders),
        heads=heads["a"].astype(np.int64),
        temperatures=heads["b"].astype(np.float32),
        pair_heads=pairs["a"].astype(np.int64),
        pair_targets=pairs["b"].astype(np.int64),
        copies=copies,
        index=np.concatenate(index),
    )


def _keys(a: NDArray[np.int64], b: NDArray[np.int64] | NDArray[np.float32]) -> NDArray[np.void]:
    """Pairs as one sortable array."""
    keys = np.empty(a.size, dtype=[("a", a.dtype), ("b", b.dtype)])
    keys["a"], keys["b"] = a, b
    return keys
