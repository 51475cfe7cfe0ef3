"""Data sets by the `datasets` library: JSON lines, Parquet or CSV files, directories, the Hugging Face hub.

Whole, a data set is memory-mapped and shuffled anew each epoch; streamed, it is read on and shuffled in a window.
Making a source reads files and may download: do it in a thread. Needs the extra `[data]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from ..algorithms.stage import Context
from ..interface import Prompt
from ..sources import ListSource
from .lengths import fits
from .rows import Columns, row_prompt
from .stream import StreamSource
from .wrapped import WrappedSource

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class RowPrompts(Sequence[Prompt]):
    """The rows `indices` of a data set, each made a prompt when it is asked for."""

    def __init__(self, rows: Any, indices: Sequence[int], source: str, columns: Columns) -> None:
        self._rows, self._indices, self._source, self._columns = rows, indices, source, columns

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return RowPrompts(self._rows, self._indices[index], self._source, self._columns)
        at = self._indices[index]
        return row_prompt(self._rows[at], self._source, self._columns, at)


class DatasetSource(WrappedSource):
    """`dataset`: the rows of files or of a data set of the hub.

    `path` is a file (or several of one format: .jsonl, .json, .parquet, .csv), a directory or a hub id; `name` and
    `split` say which part. `epochs` 0 repeats for ever; `first` takes the first rows only (0: all); prompts of more
    than `max_tokens` tokens for `tokenizer` are left out (0: none is). With `streaming` rows are read on and shuffled
    within `window` of them (1: not at all).
    """

    def __init__(
        self,
        context: Context,
        path: str | list[str],
        name: str = "",
        split: str = "train",
        prompt_column: str = "prompt",
        answer_column: str = "",
        id_column: str = "",
        metadata_columns: tuple[str, ...] = (),
        system: str = "",
        epochs: int = 0,
        first: int = 0,
        max_tokens: int = 0,
        tokenizer: str = "",
        streaming: bool = False,
        window: int = 1000,
    ) -> None:
        keep = fits(tokenizer, max_tokens)
        rows = load(path, name, split, streaming)
        columns = Columns(
            prompt=prompt_column, answer=answer_column, id=id_column, metadata=metadata_columns, system=system
        )
        columns.check(rows.column_names, f"the data set {path}")
        source = context.source or str(path)
        self._too_long = 0
        if streaming:
            rows = rows.take(first) if first else rows
            self._source = StreamSource(reader(rows, source, columns, context.seed, window), epochs or None, keep)
            return
        count = min(first, len(rows)) if first else len(rows)
        every = RowPrompts(rows, range(count), source, columns)
        kept = [index for index, prompt in enumerate(every) if keep(prompt)] if max_tokens else range(count)
        self._too_long = count - len(kept)
        if not kept:
            raise ValueError(f"the data set {path}: none of {count} prompts has at most {max_tokens} tokens")
        self._source = ListSource(RowPrompts(rows, kept, source, columns), context.seed, epochs or None)

    def stats(self) -> dict[str, float]:
        return {**super().stats(), "too_long": float(self._too_long)}


def load(path: str | list[str], name: str, split: str, streaming: bool) -> Any:
    """A `Dataset`, or an `IterableDataset` with `streaming`.

    Raises:
        ValueError: it is not there or cannot be read.
    """
    import datasets

    datasets.disable_progress_bars()  # a library prints nothing
    paths = [path] if isinstance(path, str) else path
    formats = {FORMATS.get(Path(file).suffix) for file in paths}
    try:
        if formats <= set(FORMATS.values()) and len(formats) == 1:
            return datasets.load_dataset(formats.pop(), data_files=paths, split=split, streaming=streaming)
        if len(paths) > 1:
            raise ValueError("several paths must be files of one format")
        return datasets.load_dataset(paths[0], name or None, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"the data set {path} cannot be loaded: {error.__cause__ or error}") from error


def reader(rows: Any, source: str, columns: Columns, seed: int, window: int) -> Callable[[int], Iterator[Prompt]]:
    """Reads an `IterableDataset`, each epoch in an order of its own."""

    def read(epoch: int) -> Iterator[Prompt]:
        shuffled = rows.shuffle(seed=seed % (1 << 32), buffer_size=window) if window > 1 else rows
        shuffled.set_epoch(epoch)
        for row in shuffled:
            yield row_prompt(row, source, columns)

    return read
