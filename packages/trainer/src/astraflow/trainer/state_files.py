"""Training state in files: every rank writes the rows it holds, any number of ranks reads the rows it needs.

`training-RANK-of-COUNT.safetensors`, whose metadata says at which row of the whole tensor each of its tensors begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

PATTERN = "training-*-of-*.safetensors"

Span = tuple[int, int]
"""(first row, number of rows) of a tensor, along its first axis."""


def write_state(directory: Path, state: Mapping[str, Tensor], spans: Mapping[str, Span], rank: int, size: int) -> None:
    """`state` in this rank's file; tensors without a span are whole."""
    rows = json.dumps({name: spans[name][0] for name in state if name in spans})
    save_file(dict(state), directory / f"training-{rank:05d}-of-{size:05d}.safetensors", metadata={"rows": rows})


def read_state(directory: Path, wanted: Mapping[str, Span | None]) -> dict[str, Tensor]:
    """The wanted rows (None: all) of each tensor, from however many files there are.

    Raises KeyError for a tensor that is not there, ValueError for rows that are not.
    """
    found: dict[str, list[tuple[int, Any]]] = {name: [] for name in wanted}
    for path in sorted(directory.glob(PATTERN)):
        with safe_open(path, framework="pt") as file:
            rows = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name in found:
                    found[name].append((rows.get(name, 0), _part(file, name, rows.get(name), wanted[name])))
    result = {}
    for name, span in wanted.items():
        if not found[name]:
            raise KeyError(f"{name} is in no file of {directory}")
        parts = [part for _, part in sorted(found[name], key=lambda item: item[0])]
        split = len(parts) > 1 and parts[0].dim() > 0
        result[name] = torch.cat(parts) if split else parts[0]
        if span is not None and len(result[name]) != span[1]:
            raise ValueError(f"{directory} has {len(result[name])} of the {span[1]} rows of {name} from {span[0]} on")
    return result


def _part(file: Any, name: str, first: int | None, span: Span | None) -> Tensor:
    if span is None:
        whole: Tensor = file.get_tensor(name)
        return whole
    piece = file.get_slice(name)
    start, count = first or 0, piece.get_shape()[0]
    low, high = max(span[0], start), min(span[0] + span[1], start + count)
    rows: Tensor = piece[low - start : max(low, high) - start]
    return rows
