"""The processes that train one policy together. One process alone is a world of one, for which nothing here costs.

Started by torchrun: its environment says who is who. Invariant: every rank calls the same collectives in the same
order, so whatever decides about them is computed from what all ranks know.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .launch import world


class Ranks:
    """This process's place among them. Joins the group when made; raises RuntimeError if the others do not come."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = world()
        self.mesh: DeviceMesh | None = None
        if self.size > 1:
            if device.type == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            if not dist.is_initialized():
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
            self.mesh = init_device_mesh(device.type, (self.size,))

    def share(self, sizes: Sequence[int]) -> range:
        """Which items are this rank's: runs of about equal sums, so that neighbours (a group's samples) stay together.

        A run may be empty where there are fewer items than ranks.
        """
        return shares(sizes, self.size)[self.rank]

    def sum(self, *tensors: Tensor) -> None:
        """Add up every tensor over the ranks, in place; all of one dtype and device."""
        if self.size > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def most(self, count: int, device: torch.device) -> int:
        """The largest of the ranks' counts."""
        if self.size == 1:
            return count
        value = torch.tensor(count, device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)


def shares(sizes: Sequence[int], count: int) -> list[range]:
    """Cut items into `count` runs whose sums of `sizes` are as equal as cuts between items allow."""
    ends = list(accumulate(sizes, initial=0))
    cuts = [0]
    for k in range(1, count):
        ideal = ends[-1] * k / count
        near = min(range(cuts[-1], len(ends)), key=lambda i: abs(ends[i] - ideal))
        cuts.append(near)
    cuts.append(len(sizes))
    return [range(start, stop) for start, stop in pairwise(cuts)]
