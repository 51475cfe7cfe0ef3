"""Who holds which rows, and who therefore encodes which frame: pure functions of what the ranks hold.

Frames are cut on whole tensors, so they and their digests do not depend on the number of ranks. A frame has one owner:
the rank that holds most of it, and where several hold as much, the one that owns least so far. The rest of a frame
that lies on several ranks is sent to its owner, which is all that ever moves between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from .interface import TensorSpec
from .layout import ITEMSIZE, Frame, canonical


class Piece(NamedTuple):
    """Rows [row, row + rows) of a tensor, along its first axis, on this rank.

    `dtype` in safetensors' names; `shape` of the whole tensor; `data`: torch tensor (any device, any strides) or numpy
    array [rows, *shape[1:]], for a tensor without axes the value itself. A rank may hold no rows, or all of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    row: int
    data: Any


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, stop) of a tensor, on some rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Extent(NamedTuple):
    """Bytes [start, stop) of a tensor, on `rank`."""

    rank: int
    start: int
    stop: int


class Assigned(NamedTuple):
    """A frame, who makes it, and where its bytes come from, in order."""

    position: int
    frame: Frame
    owner: int
    extents: tuple[Extent, ...]


def held(piece: Piece) -> Held:
    """Raises ValueError for a piece that contradicts itself."""
    if piece.dtype not in ITEMSIZE:
        raise ValueError(f"tensor {piece.name!r} has dtype {piece.dtype!r}; known are {', '.join(ITEMSIZE)}")
    local = tuple(int(size) for size in piece.data.shape)
    itemsize = piece.data.element_size() if hasattr(piece.data, "element_size") else piece.data.itemsize
    rows = local[0] if piece.shape else 1
    fits = (
        local[1:] == piece.shape[1:] and 0 <= piece.row <= piece.row + rows <= piece.shape[0] if piece.shape else True
    )
    if len(local) != len(piece.shape) or not fits or itemsize != ITEMSIZE[piece.dtype]:
        raise ValueError(
            f"tensor {piece.name!r}: {local} at row {piece.row}, {itemsize} bytes each, is no piece of "
            f"{piece.dtype} {piece.shape}"
        )
    row = itemsize * math.prod(piece.shape[1:])
    return Held(piece.name, piece.dtype, piece.shape, piece.row * row, (piece.row + rows) * row)


def layout_of(ranks: Sequence[Sequence[Held]]) -> tuple[TensorSpec, ...]:
    """The whole tensors. Raises ValueError where ranks disagree about one."""
    found: dict[str, TensorSpec] = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            nbytes = math.prod(piece.shape) * ITEMSIZE[piece.dtype]
            spec = TensorSpec(name=piece.name, dtype=piece.dtype, shape=piece.shape, nbytes=nbytes)
            if found.setdefault(piece.name, spec) != spec:
                raise ValueError(f"tensor {piece.name!r} is {spec} on rank {rank}, {found[piece.name]} on another")
    return canonical(found.values())


def extents_of(layout: Sequence[TensorSpec], ranks: Sequence[Sequence[Held]]) -> list[list[Extent]]:
    """Per tensor, what the ranks hold of it; the same rows may be on several."""
    found: dict[str, list[Extent]] = {spec.name: [] for spec in layout}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            found[piece.name].append(Extent(rank, piece.start, piece.stop))
    return [found[spec.name] for spec in layout]


def assign(
    layout: Sequence[TensorSpec],
    frames: Sequence[Frame],
    extents: Sequence[Sequence[Extent]],
    world_size: int,
    *,
    whole_tensors: bool = False,
) -> list[Assigned]:
    """An owner for every frame; with `whole_tensors` the same for all of a tensor's, as a file of its own needs.

    Raises ValueError where nobody holds some rows.
    """
    loads = [0] * world_size
    by_tensor = balanced(layout, world_size) if whole_tensors else []
    assigned = []
    for position, frame in enumerate(frames):
        first, last = frame.offset, frame.offset + frame.length
        within = [
            Extent(rank, max(start, first), min(stop, last))
            for rank, start, stop in extents[frame.tensor]
            if start < last and stop > first
        ]
        shares = [0] * world_size
        for extent in within:
            shares[extent.rank] += extent.stop - extent.start
        most = min(range(world_size), key=lambda rank: (-shares[rank], loads[rank], rank))
        owner = by_tensor[frame.tensor] if whole_tensors else most
        loads[owner] += frame.length
        chosen = _cover(first, last, owner, within)
        if chosen is None:
            raise ValueError(f"no rank holds all the rows of tensor {layout[frame.tensor].name!r}")
        assigned.append(Assigned(position, frame, owner, chosen))
    return assigned


def balanced(layout: Sequence[TensorSpec], world_size: int) -> list[int]:
    """A rank for every tensor, the largest first to the one that has least."""
    loads, owners = [0] * world_size, [0] * len(layout)
    for tensor in sorted(range(len(layout)), key=lambda tensor: -layout[tensor].nbytes):
        owners[tensor] = loads.index(min(loads))
        loads[owners[tensor]] += layout[tensor].nbytes
    return owners


def files_of(layout: Sequence[TensorSpec], world_size: int) -> dict[int, tuple[int, ...]]:
    """Rank -> the tensors it writes to a file, where it has any; agrees with `assign(whole_tensors=True)`."""
    owners = balanced(layout, world_size)
    files = {rank: tuple(at for at, owner in enumerate(owners) if owner == rank) for rank in range(world_size)}
    return {rank: tensors for rank, tensors in files.items() if tensors}


def _cover(first: int, last: int, owner: int, within: Sequence[Extent]) -> tuple[Extent, ...] | None:
    """Extents that make [first, last), the owner's where it has them; None if there is a gap."""
    chosen = []
    position = first
    while position < last:
        here = [extent for extent in within if extent.start <= position < extent.stop]
        if not here:
            return None
        best = max(here, key=lambda extent: (extent.rank == owner, extent.stop, -extent.rank))
        stop = best.stop
        if best.rank != owner:  # as far as the owner's own begin
            stop = min([stop, *(e.start for e in within if e.rank == owner and position < e.start)])
        chosen.append(Extent(best.rank, position, stop))
        position = stop
    return tuple(chosen)


def rounds_of(assigned: Iterable[Assigned], world_size: int, frame_bytes: int) -> list[list[list[Assigned]]]:
    """By round and rank: the frames the rank makes in it, at most about `frame_bytes`."""
    groups: list[list[list[Assigned]]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    for item in assigned:
        mine = groups[item.owner]
        if not mine or sizes[item.owner] + item.frame.length > frame_bytes:
            mine.append([])
            sizes[item.owner] = 0
        mine[-1].append(item)
        sizes[item.owner] += item.frame.length
    count = max(len(mine) for mine in groups)
    return [[mine[number] if number < len(mine) else [] for mine in groups] for number in range(count)]
