"""A model as Hugging Face lays it out in a directory: one safetensors file, or several and their index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .interface import TensorSpec
from .layout import dense_bytes, safetensors_header, safetensors_index
from .manifest import anchor_name


class Files:
    """Which file of `directory` each tensor of a layout is in, and at which byte. `parts`: the tensors of each file."""

    def __init__(self, directory: Path, layout: Sequence[TensorSpec], parts: Sequence[Sequence[int]]) -> None:
        self.directory = directory
        self.layout = tuple(layout)
        self.parts = tuple(tuple(part) for part in parts)
        self.paths = [directory / anchor_name(number, len(parts)) for number in range(len(parts))]
        specs = [[layout[tensor] for tensor in part] for part in parts]
        self.headers = [safetensors_header(part) for part in specs]
        self.sizes = [len(header) + dense_bytes(part) for header, part in zip(self.headers, specs, strict=True)]
        self._places: dict[str, tuple[int, int]] = {}
        for number, part in enumerate(specs):
            position = len(self.headers[number])
            for spec in part:
                self._places[spec.name] = (number, position)
                position += spec.nbytes

    def where(self, name: str, offset: int) -> tuple[int, int]:
        """The file, by number, and the byte in it."""
        number, start = self._places[name]
        return number, start + offset

    def index(self) -> bytes:
        """What Hugging Face's loaders read where there are several files."""
        return safetensors_index(self.layout, {name: self.paths[at].name for name, (at, _) in self._places.items()})


def split(layout: Sequence[TensorSpec], file_bytes: int) -> list[list[int]]:
    """Tensors, in order, into files of at most `file_bytes`, or of one tensor that has more."""
    parts: list[list[int]] = [[]]
    size = 0
    for tensor, spec in enumerate(layout):
        if parts[-1] and size + spec.nbytes > file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += spec.nbytes
    return parts
