"""Parquet files: pictures as bytes or paths, captions as text or token ids.

A row of a parquet file cannot be reached without decoding its whole row group, so the columns that are needed are
copied once, into a file from which rows can be read in any order. It is removed when packing is done; until then the
pictures take their space twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ..children import map_in_processes
from ..progress import Log, Progress
from .base import (
    Arrays,
    Bytes,
    CaptionLists,
    Row,
    RowError,
    Source,
    choose_caption_columns,
    choose_image_column,
    read_file,
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
        footers = [_footer(file) for file in self.files]
        columns, what = footers[0][0], str(self.files[0])
        self.image_column = choose_image_column(columns, self.image_column, what)
        self.caption_columns = choose_caption_columns(columns, self.image_column, self.caption_columns, what)
        self._lists = CaptionLists(self.caption_columns, _first_rows(self.files[0], self.caption_columns), what)
        self.caption_names = self._lists.names
        if self.key_column is not None and self.key_column not in columns:
            raise UserError(f"{what} has no column {self.key_column!r}; it has {', '.join(columns)}")
        self._names = [*self.caption_columns, *([self.key_column] if self.key_column else [])]
        for file, (others, _) in zip(self.files, footers, strict=True):
            for name in (self.image_column, *self._names):
                if others.count(name) != 1:
                    raise UserError(
                        f"{file} has {others.count(name) or 'no'} columns {name!r} and one is needed; it has "
                        f"{', '.join(others)}: pack files of other columns by themselves"
                    )
        self._starts = np.cumsum([0, *(count for _, count in footers)])
        if not len(self):
            raise UserError(f"{what} holds no rows")
        copies = [_copy_path(file, self.image_column, self._names, folder) for file in self.files]
        self._copies = [Bytes(path) for path in copies]
        self._places = [Arrays(path.with_suffix(".places")) for path in copies]
        listed = [(file.name, _state(file)) for file in self.files]
        self.fingerprint = f"{listed}/{self.image_column}/{self._names}"

    def copy_rows(self, folder: Path, log: Log | None = None) -> None:
        counts = dict(zip(self.files, np.diff(self._starts).tolist(), strict=True))
        copies = zip(self.files, self._places, strict=True)
        files = [file for file, places in copies if not (places.folder / "done").exists()]
        if not files:
            return
        size = sum(file.stat().st_size for file in files)
        if log is not None:
            there = len(self.files) - len(files)
            going_on = f"; {there} are copied already" if there else ""
            log(f"copying rows out of {len(files)} parquet files ({size / 1e6:,.0f} MB){going_on}")
        progress = Progress("copying", sum(counts[file] for file in files), "rows", log)
        copy = partial(_copy, image=self.image_column, names=self._names, folder=folder)
        if len(files) < 4:  # few large ones: their batches are counted, not the files
            for file in files:
                copy(file, tick=progress)
        else:
            map_in_processes(copy, files, progress)

    def require_keys(self) -> None:
        if self.key_column is None:
            raise UserError("parquet rows are joined by a key column: name it with --key-column")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def where(self, i: int) -> str:
        file, position = self._locate(i)
        return f"{self.files[file].name} row {position}"

    def key(self, i: int) -> str:
        self.require_keys()
        return str(self._values(i)[-1])

    def row(self, i: int) -> Row:
        file, position = self._locate(i)
        places = self._places[file]
        image = self._copies[file].read(int(places["starts"][position]), int(places["middles"][position]))
        kind = int(places["kinds"][position])
        if kind == _NONE:
            raise RowError("no image", f"column {self.image_column} is empty")
        if kind == _PATH:
            image = read_file(self.images / os.fsdecode(image))
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


@contextlib.contextmanager
def _opened(file: Path, purpose: str = "") -> Iterator[Any]:
    """pyarrow's reader of a file; what it says of a damaged one, then or later, becomes a UserError."""
    parquet = _parquet()
    import pyarrow

    try:
        with parquet.ParquetFile(file) as reader:
            yield reader
    # The last two: a column that stands twice, and a date that Python has no form for.
    except (OSError, ValueError, pyarrow.ArrowException, KeyError, OverflowError) as error:
        raise UserError(f"{file} cannot be read as parquet{purpose}: {error}") from None


def _footer(file: Path) -> tuple[list[str], int]:
    """Names of the columns, and number of rows."""
    with _opened(file) as reader:
        return list(reader.schema_arrow.names), reader.metadata.num_rows


def _first_rows(file: Path, columns: list[str]) -> list[dict[str, Any]]:
    with _opened(file) as reader:
        batch = next(reader.iter_batches(SAMPLE_ROWS, columns=columns), None)
        values = [] if batch is None else [_python(batch.column(name)) for name in columns]
        return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _state(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _copy_path(file: Path, image: str, names: list[str], folder: Path) -> Path:
    """FOLDER/HASH.rows, another one for a file that changed and for other columns."""
    what = f"{file.absolute()}/{_state(file)}/{image}/{names}"
    return folder / f"{hashlib.sha256(what.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}.rows"


def _copy(file: Path, image: str, names: list[str], folder: Path, tick: Callable[[int], None] = lambda _: None) -> int:
    """Copy one file's needed columns; returns the number of rows, and calls `tick` with that of each batch.

    Each row is its picture's bytes (or path) and then a JSON list of the other values.
    """
    path = _copy_path(file, image, names, folder)
    places = path.with_suffix(".places")
    starts, middles, kinds, position = [0], [], [], 0
    columns = list(dict.fromkeys([image, *names]))
    with _opened(file, f" or copied to {folder}") as reader:
        places.mkdir(exist_ok=True)
        with open(path, "wb") as out:
            for batch in reader.iter_batches(BATCH_ROWS, columns=columns):
                values = [_python(batch.column(name)) for name in names]
                for picture, *rest in zip(_python(batch.column(image)), *values, strict=True):
                    kind, data = _picture(picture)
                    others = json.dumps(rest, default=_text).encode("utf-8", "surrogatepass")
                    out.write(data)
                    out.write(others)
                    kinds.append(kind)
                    middles.append(position + len(data))
                    position += len(data) + len(others)
                    starts.append(position)
                tick(batch.num_rows)
        Arrays(places).save(
            starts=np.array(starts, np.int64), middles=np.array(middles, np.int64), kinds=np.array(kinds, np.int8)
        )
        (places / "done").touch()
    return len(kinds)


def _python(column: Any) -> list[Any]:
    """The Python values of an Arrow array; a string that is not UTF-8 is given as its bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # it would cost all rows of the file
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if hasattr(scalar, "items"):  # a struct
            return {name: _value(inner) for name, inner in scalar.items()}
        if hasattr(scalar, "values"):  # a list
            return _python(scalar.values)
        return scalar.as_buffer().to_pybytes()


def _text(value: Any) -> str:
    """What JSON has no form for: text stored as bytes, dates, decimals."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _picture(value: Any) -> tuple[int, bytes]:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return _BYTES, value
    if isinstance(value, str) and value.strip():
        return _PATH, os.fsencode(value.strip())
    return _NONE, b""
