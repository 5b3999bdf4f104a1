"""Parquet files: pictures as bytes or paths, captions as text or token ids.

A row of a parquet file cannot be reached without decoding its whole row group, so the columns that are needed are
copied once, into a file from which rows can be read in any order. It is removed when packing is done; until then the
pictures take their space twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from .base import (
    Arrays,
    Bytes,
    CaptionLists,
    Row,
    RowError,
    Source,
    choose_caption_columns,
    choose_image_column,
    map_in_processes,
    read_image,
)

BATCH_ROWS = 256
# So many rows tell how many captions the lists in a column hold.
SAMPLE_ROWS = 1000


class ParquetSource(Source):
    """One parquet file or a folder of them, all with the same columns.

    The image column holds bytes, a struct with `bytes` and `path` (as Hugging Face writes it), or a path relative to
    `images` (default: the file's folder). A caption column holds text, lists of texts (see `CaptionLists`), or lists of
    token ids.
    """

    kind = "parquet files"

    def __init__(
        self,
        files: list[Path],
        images: Path | None = None,
        image_column: str | None = None,
        caption_columns: Sequence[str] | None = None,
        key_column: str | None = None,
    ):
        self.files = files
        self.images = images or files[0].parent
        self.image_column, self.key_column = image_column, key_column
        self.caption_columns = list(caption_columns) if caption_columns else None

    def build_index(self, folder: Path) -> None:
        columns = _columns(self.files[0])
        what = str(self.files[0])
        self.image_column = choose_image_column(columns, self.image_column, what)
        self.caption_columns = choose_caption_columns(columns, self.image_column, self.caption_columns, what)
        self._lists = CaptionLists(self.caption_columns, _first_rows(self.files[0], self.caption_columns), what)
        self.caption_names = self._lists.names
        if self.key_column is not None and self.key_column not in columns:
            raise UserError(f"{what} has no column {self.key_column!r}; it has {', '.join(columns)}")
        names = [*self.caption_columns, *([self.key_column] if self.key_column else [])]
        copy = partial(_copy, image=self.image_column, names=names, folder=folder)
        size = sum(file.stat().st_size for file in self.files)
        print(f"copying rows out of {len(self.files)} parquet files ({size / 1e6:,.0f} MB)", flush=True)
        copies = map_in_processes(copy, self.files)
        self._copies = [Bytes(path) for path, _ in copies]
        counts = [count for _, count in copies]
        if not sum(counts):
            raise UserError(f"{what} holds no rows")
        self._starts = np.cumsum([0, *counts])
        self._places = [Arrays(folder / f"{path.stem}.places") for path, _ in copies]
        listed = [(file.name, _state(file)) for file in self.files]
        self.fingerprint = f"{listed}/{self.image_column}/{names}"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def where(self, i: int) -> str:
        file, position = self._locate(i)
        return f"{self.files[file].name} row {position}"

    def key(self, i: int) -> str:
        if self.key_column is None:
            raise UserError("parquet rows are joined by a key column: name it with --key-column")
        return str(self._values(i)[-1])

    def row(self, i: int) -> Row:
        file, position = self._locate(i)
        places = self._places[file]
        image = self._copies[file].read(int(places["starts"][position]), int(places["middles"][position]))
        kind = int(places["kinds"][position])
        if kind == _NONE:
            raise RowError("no image", f"column {self.image_column} is empty")
        if kind == _PATH:
            image = read_image(self.images / os.fsdecode(image))
        return Row(image, self._lists.of(dict(zip(self.caption_columns, self._values(i), strict=False))))

    def _values(self, i: int) -> list[Any]:
        """The caption columns' values, then the key's."""
        file, position = self._locate(i)
        middle = int(self._places[file]["middles"][position])
        end = int(self._places[file]["starts"][position + 1])
        return json.loads(self._copies[file].read(middle, end))

    def _locate(self, i: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._starts, i, "right")) - 1
        return file, i - int(self._starts[file])


_NONE, _BYTES, _PATH = 0, 1, 2


def _parquet():
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"parquet files are read with pyarrow ({error}): run `pip install pyarrow`") from None
    return pyarrow.parquet


def _columns(file: Path) -> list[str]:
    try:
        return list(_parquet().read_schema(file).names)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{file} cannot be read as parquet: {error}") from None


def _first_rows(file: Path, columns: list[str]) -> list[dict[str, Any]]:
    try:
        with _parquet().ParquetFile(file) as reader:
            batch = next(reader.iter_batches(SAMPLE_ROWS, columns=columns), None)
            return batch.to_pylist() if batch is not None else []
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as parquet: {error}") from None


def _state(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _copy(file: Path, image: str, names: list[str], folder: Path) -> tuple[Path, int]:
    """Copy one file's needed columns to FOLDER/HASH.rows, unless an interrupted run did; its path and row count.

    Each row is its picture's bytes (or path) and then a JSON list of the other values.
    """
    what = f"{file.absolute()}/{_state(file)}/{image}/{names}"
    path = folder / f"{hashlib.sha256(what.encode()).hexdigest()[:24]}.rows"
    places = folder / f"{path.stem}.places"
    if (places / "done").exists():
        return path, len(np.load(places / "kinds.npy", mmap_mode="r"))
    places.mkdir(exist_ok=True)
    starts, middles, kinds, position = [0], [], [], 0
    columns = list(dict.fromkeys([image, *names]))
    try:
        with _parquet().ParquetFile(file) as reader, open(path, "wb") as out:
            for batch in reader.iter_batches(BATCH_ROWS, columns=columns):
                values = [batch.column(name).to_pylist() for name in names]
                for picture, *rest in zip(batch.column(image).to_pylist(), *values, strict=True):
                    kind, data = _picture(picture)
                    others = json.dumps(rest, default=str).encode("utf-8", "surrogatepass")
                    out.write(data)
                    out.write(others)
                    kinds.append(kind)
                    middles.append(position + len(data))
                    position += len(data) + len(others)
                    starts.append(position)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as parquet or copied to {folder}: {error}") from None
    Arrays(places).save(
        starts=np.array(starts, np.int64), middles=np.array(middles, np.int64), kinds=np.array(kinds, np.int8)
    )
    (places / "done").touch()
    return path, len(kinds)


def _picture(value: Any) -> tuple[int, bytes]:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return _BYTES, value
    if isinstance(value, str) and value.strip():
        return _PATH, os.fsencode(value.strip())
    return _NONE, b""
