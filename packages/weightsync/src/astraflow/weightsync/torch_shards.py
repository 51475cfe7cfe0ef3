"""What a rank of torch.distributed holds of a model: FSDP2's parameters as pieces, without gathering one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .interface import Tensors
from .shards import Piece
from .tensors import spec_of


def shards_of(model: Any, dtype: Any = None) -> list[Piece]:
    """The pieces of a torch.nn.Module, or of tensors by name, that lie on this rank.

    A DTensor may be sharded along its first axis over one dimension of its mesh (FSDP2, HSDP) and replicated over the
    others; a plain tensor is taken to be the same on every rank. A module's tied parameters are published once, under
    the first name. `dtype`: floating-point tensors are published as this one (a copy of this rank's rows).

    Raises ValueError for a DTensor that is laid out otherwise.
    """
    pieces = []
    for name, tensor in _named(model):
        row, local = _local(name, tensor.detach())
        if dtype is not None and local.is_floating_point():
            local = local.to(dtype)
        pieces.append(Piece(name, spec_of(name, local).dtype, tuple(int(size) for size in tensor.shape), row, local))
    return pieces


def _named(model: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(model, Mapping):
        tensors: Tensors = model
        yield from tensors.items()
        return
    unique = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        if name in unique:
            yield name, tensor


def _local(name: str, tensor: Any) -> tuple[int, Any]:
    """Its first row here, and its rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return 0, tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    sharded = [at for at, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if not sharded:
        return 0, tensor.to_local()
    placement, here = placements[sharded[0]], mesh.get_coordinate()
    # A subclass of Shard orders the rows otherwise.
    if len(sharded) > 1 or type(placement) is not Shard or placement.dim != 0 or here is None:
        raise ValueError(f"{name!r} is laid out as {placements}; only whole rows can be published from ranks")
    rows = -(-tensor.shape[0] // mesh.size(sharded[0]))  # as torch.chunk cuts
    return min(here[sharded[0]] * rows, tensor.shape[0]), tensor.to_local()
