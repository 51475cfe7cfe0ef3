"""Weights that are live in memory: changes are prepared beside them and scattered in at commit.

Invariant: the tensors' bytes are those of the last committed version, before and after; a commit that fails half way
puts the old bytes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .codecs import Index, changed_elements, sparse_is_smaller
from .interface import Bytes, CorruptVersion, SinkState, TensorSpec
from .layout import ITEMSIZE, elements
from .tensors import is_torch, spec_of

Write = Callable[[], None]
Key = tuple[str, int, int]
"""Device, address and bytes: tensors that share memory (tied weights) have the same."""


class Target(Protocol):
    """The memory of one live tensor."""

    key: Key

    def read(self, offset: int, length: int) -> Bytes:
        """Its bytes from `offset` on, a view or a copy."""
        ...

    def prepare(self, offset: int, itemsize: int, index: Index | None, data: Bytes) -> tuple[Write, Write]:
        """Calls that write `data` (at `index`, or all from byte `offset` on) and that put back what is there now."""
        ...

    def settle(self) -> None:
        """Wait until what was written can be read."""
        ...


class HostTarget:
    """A tensor in the CPU's memory, as bytes that share it."""

    def __init__(self, live: Bytes) -> None:
        self._live = live
        self.key = ("cpu", live.__array_interface__["data"][0], len(live))

    def read(self, offset: int, length: int) -> Bytes:
        return self._live[offset : offset + length]

    def prepare(self, offset: int, itemsize: int, index: Index | None, data: Bytes) -> tuple[Write, Write]:
        if index is None:
            live: NDArray[Any] = self._live[offset : offset + len(data)]
            at: Index | slice = slice(None)
            new: NDArray[Any] = data
        else:
            live, at, new = elements(self._live[offset:], itemsize), index, elements(data, itemsize)
        old = live[at].copy()

        def write(values: NDArray[Any]) -> None:
            live[at] = values

        return lambda: write(new), lambda: write(old)

    def settle(self) -> None:
        pass


class DeviceTarget:
    """A tensor on an accelerator, written by torch. Sparse changes wait on the device, dense ones on the host, so that
    a full pull needs no second copy of the model there."""

    def __init__(self, tensor: Any) -> None:
        import torch

        self._device = tensor.device
        self._flat = tensor.detach().view(-1)
        self._integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        self.key = (str(tensor.device), tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def read(self, offset: int, length: int) -> Bytes:
        import torch

        dense: Bytes = self._flat.view(torch.uint8)[offset : offset + length].cpu().numpy()
        return dense

    def prepare(self, offset: int, itemsize: int, index: Index | None, data: Bytes) -> tuple[Write, Write]:
        import torch

        new = torch.from_numpy(np.array(data))  # torch wants memory that it may write to
        if index is None:
            live = self._flat.view(torch.uint8)[offset : offset + len(data)]
            old = live.to("cpu", copy=True)
            return lambda: live.copy_(new), lambda: live.copy_(old)
        live = self._flat.view(self._integers[itemsize])[offset // itemsize :]
        at = torch.from_numpy(index).to(self._device)
        after = new.view(self._integers[itemsize]).to(self._device)
        before = live[at]
        return lambda: live.index_copy_(0, at, after), lambda: live.index_copy_(0, at, before)

    def settle(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Change(NamedTuple):
    offset: int
    itemsize: int
    at: Index | None
    data: Bytes
    write: Write
    undo: Write


class TensorSink:
    """Live tensors, written in place: name -> contiguous torch.Tensor (any device) or writable numpy array.

    The published version must have the same names, dtypes and shapes. Names that share memory (tied weights) may be
    published under any one of them, or under several with equal bytes. Nothing else may write to the tensors between
    two commits. Holds the staged changes and what they replace, besides the tensors.
    """

    whole_frames = False

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
        self._targets = {name: _target(name, tensor) for name, tensor in tensors.items()}
        self._state = SinkState()
        self._changes: dict[str, dict[int, _Change]] = {}
        self._tied: list[list[str]] = []

    def state(self) -> SinkState:
        return self._state

    def read(self, name: str, offset: int, into: Bytes) -> Bytes:
        return self._targets[name].read(offset, len(into))

    def begin(self, layout: Sequence[TensorSpec]) -> None:
        self.abort()
        published = {spec.name: spec for spec in layout}
        reached: dict[Key, list[str]] = {}
        for name in published:
            if name in self._targets:
                reached.setdefault(self._targets[name].key, []).append(name)
        unknown = [name for name in published if name not in self._specs]
        other = [name for name, spec in published.items() if name in self._specs and spec != self._specs[name]]
        missing = [
            name for name, target in self._targets.items() if name not in published and target.key not in reached
        ]
        faults = {"not here": unknown, "of another dtype or shape here": other, "not published": missing}
        if any(faults.values()):
            told = "; ".join(f"{what}: {_names(names)}" for what, names in faults.items() if names)
            raise CorruptVersion(f"the published tensors are not those of this sink: {told}")
        self._tied = [names for names in reached.values() if len(names) > 1]

    def room(self, name: str, offset: int, length: int) -> Bytes | None:
        return None

    def stage_dense(self, name: str, offset: int, data: Bytes) -> None:
        """Compared with the live bytes, so that a full pull of nearly the same weights commits as fast as a delta."""
        itemsize = ITEMSIZE[self._specs[name].dtype]
        target = self._targets[name]
        if isinstance(target, HostTarget):
            index = changed_elements(target.read(offset, len(data)), data, itemsize)
            if not len(index):
                return
            if sparse_is_smaller(len(index), itemsize, len(data)):
                self._stage(name, offset, itemsize, index, elements(data, itemsize)[index].view(np.uint8))
                return
        self._stage(name, offset, itemsize, None, data)

    def stage_sparse(self, name: str, offset: int, itemsize: int, index: Index, data: Bytes) -> None:
        self._stage(name, offset, itemsize, index, data)

    def seal(self) -> None:
        pass

    def commit(self, state: SinkState) -> None:
        devices = {target.key[0]: target for target in self._targets.values()}.values()
        done: list[_Change] = []
        try:
            self._merge_ties()
            for device in devices:
                device.settle()
            for changes in self._changes.values():
                for change in changes.values():
                    done.append(change)
                    change.write()
            for device in devices:
                device.settle()
        except BaseException:
            for change in done:
                change.undo()
            raise
        finally:
            self.abort()
        self._state = state

    def abort(self) -> None:
        self._changes, self._tied = {}, []

    def _merge_ties(self) -> None:
        """Of tensors that share memory, write one. Raises CorruptVersion if they should differ."""
        for first, *others in self._tied:
            for other in others:
                if not _equal(self._changes.get(first, {}), self._changes.pop(other, {})):
                    raise CorruptVersion(f"{first!r} and {other!r} share memory here but are published apart")

    def _stage(self, name: str, offset: int, itemsize: int, index: Index | None, data: Bytes) -> None:
        write, undo = self._targets[name].prepare(offset, itemsize, index, data)
        self._changes.setdefault(name, {})[offset] = _Change(offset, itemsize, index, data, write, undo)


def _equal(one: dict[int, _Change], other: dict[int, _Change]) -> bool:
    def same(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
        return a is b or (a is not None and b is not None and np.array_equal(a, b))

    return one.keys() == other.keys() and all(
        same(one[offset].at, change.at) and same(one[offset].data, change.data) for offset, change in other.items()
    )


def _target(name: str, tensor: Any) -> Target:
    """Raises ValueError for a tensor that cannot be written in place."""
    if not is_torch(tensor):
        if not (tensor.flags.c_contiguous and tensor.flags.writeable):
            raise ValueError(f"array {name!r} is not contiguous and writable, so it cannot be written in place")
        return HostTarget(tensor.reshape(-1).view(np.uint8))
    if not tensor.is_contiguous():
        raise ValueError(f"tensor {name!r} is not contiguous, so it cannot be written in place")
    if tensor.device.type != "cpu":
        return DeviceTarget(tensor)
    import torch

    return HostTarget(tensor.detach().view(-1).view(torch.uint8).numpy())


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
