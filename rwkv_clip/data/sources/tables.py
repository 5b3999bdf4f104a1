"""Tables of rows: tab-separated, comma-separated, or a JSON object a line."""

from __future__ import annotations

import csv
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from .base import (
    IMAGE_NAMES,
    MAX_CAPTIONS,
    Arrays,
    Bytes,
    CaptionLists,
    Row,
    RowError,
    Source,
    check_number_of_captions,
    choose_caption_columns,
    choose_image_column,
    json_caption,
    read_file,
)
from .lines import join_csv_records, quote_state, scan_lines

# So many rows tell what a table without a header holds.
SAMPLE_ROWS = 1000


class TableSource(Source):
    """Rows of a text file; the picture is named by a path relative to the table's folder (or to `images`).

    Args:
        path: the table, UTF-8 (bytes that are not become U+FFFD).
        images: folder that picture paths are relative to; default: the table's.
        image_column: name of the column with the picture's path; default: by its usual names.
        caption_columns: names of the caption columns, in the records' order; default: by their usual names.
        key_column: name of the column that other files are joined by.
    """

    def __init__(
        self,
        path: Path,
        images: Path | None = None,
        image_column: str | None = None,
        caption_columns: Sequence[str] | None = None,
        key_column: str | None = None,
    ):
        self.path = path
        self.images = images or path.parent
        self.image_column, self.key_column = image_column, key_column
        self.caption_columns = list(caption_columns) if caption_columns else None
        self._file = Bytes(path)

    def build_index(self, folder: Path) -> None:
        starts, ends, numbers, digest = scan_lines(self.path)
        if not len(starts):
            raise UserError(f"{self.path} holds no rows")
        starts, ends, numbers = self._join(starts, ends, numbers)
        skip = self._understand([self._file.read(s, e) for s, e in zip(starts[:SAMPLE_ROWS], ends, strict=False)])
        if len(starts) == skip:
            raise UserError(f"{self.path} holds a header and no rows")
        self._arrays = Arrays(folder)
        self._arrays.save(starts=starts[skip:], ends=ends[skip:], numbers=numbers[skip:])
        self._num_rows = len(starts) - skip
        self.fingerprint = f"{digest}/{self.image_column}/{self.caption_columns}"

    def __len__(self) -> int:
        return self._num_rows

    def where(self, i: int) -> str:
        return f"{self.path.name} line {self._arrays['numbers'][i]}"

    def require_keys(self) -> None:
        if self.key_column is None:
            raise UserError("rows of a table are joined by a key column: name it with --key-column")

    def key(self, i: int) -> str:
        self.require_keys()
        return str(self._value(self._line(i), self.key_column)).strip()

    def row(self, i: int) -> Row:
        image, captions = self._parse(self._line(i))
        if not isinstance(image, str) or not image.strip():
            raise RowError("no image path", repr(image)[:80])
        if "://" in image:
            raise RowError("image is a URL", f"{image[:120]} (download it first)")
        return Row(read_file(self.images / image.strip()), captions)

    def _line(self, i: int) -> bytes:
        return self._file.read(int(self._arrays["starts"][i]), int(self._arrays["ends"][i]))

    def _join(self, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray):
        return starts, ends, numbers

    @abstractmethod
    def _understand(self, sample: list[bytes]) -> int:
        """Find the columns in the first rows; return how many of them are a header (0 or 1)."""

    @abstractmethod
    def _parse(self, line: bytes) -> tuple[Any, list]:
        """One row's image path and captions."""

    @abstractmethod
    def _value(self, line: bytes, column: str) -> Any:
        """One row's value in a column."""


class _ColumnSource(TableSource):
    """A table with columns: its first line is a header if it has a usual image name or the one asked for.

    Without a header the columns are called 1, 2, ...; the first is the picture, the others are captions. A row with
    another number of columns than the header (without one: than most rows) is left out: a tab or line break inside a
    caption would otherwise move captions to wrong places.
    """

    def _understand(self, sample: list[bytes]) -> int:
        try:
            first = self._fields(sample[0])
        except RowError as error:
            raise UserError(f"{self.path} line 1: {error}") from None
        names = [name.strip() for name in first]
        has_header = self.image_column in names or any(name.lower() in IMAGE_NAMES for name in names)
        if has_header:
            self.num_columns = len(names)
        else:
            self.num_columns = Counter(self._count(line) for line in sample).most_common(1)[0][0]
            names = [str(i + 1) for i in range(self.num_columns)]
        if self.num_columns < 2:
            raise UserError(
                f"{self.path} has one column ({first[0][:40]!r}): columns are separated by {self.separator_name}"
            )
        wanted = self.image_column or (None if has_header else "1")
        self.image_column = choose_image_column(names, wanted, str(self.path))
        if has_header or self.caption_columns:
            self.caption_columns = choose_caption_columns(
                names, self.image_column, self.caption_columns, str(self.path)
            )
            self.caption_names = self.caption_columns
        else:
            self.caption_columns = [name for name in names if name != self.image_column]
            check_number_of_captions(len(self.caption_columns), str(self.path))
            self.caption_names = [f"caption{i}" for i in range(len(self.caption_columns))]
        if self.key_column is not None and self.key_column not in names:
            raise UserError(f"{self.path} has no column {self.key_column!r}; it has {', '.join(names)}")
        for name in (self.image_column, *self.caption_columns, self.key_column):
            if names.count(name) > 1:
                raise UserError(f"{self.path} has {names.count(name)} columns {name!r}: rename them in its first line")
        self._columns = names
        self._image_index = names.index(self.image_column)
        self._caption_indices = [names.index(name) for name in self.caption_columns]
        return int(has_header)

    def _count(self, line: bytes) -> int:
        try:
            return len(self._fields(line))
        except RowError:
            return 0

    def _parse(self, line: bytes) -> tuple[str, list[str]]:
        fields = self._fields(line)
        if len(fields) != self.num_columns:
            raise RowError("wrong number of columns", f"{len(fields)}, not {self.num_columns}")
        return fields[self._image_index], [fields[i] for i in self._caption_indices]

    def _value(self, line: bytes, column: str) -> str:
        return self._fields(line)[self._columns.index(column)]


class TsvSource(_ColumnSource):
    """Tab-separated columns. Quotes and backslashes are ordinary characters: nothing can span columns or lines."""

    kind = "tab-separated table"
    separator_name = "tabs"

    def _fields(self, line: bytes) -> list[str]:
        return _text(line).split("\t")


class CsvSource(_ColumnSource):
    """Comma-separated columns with RFC 4180 quotes; a quote inside an unquoted field is an ordinary character."""

    kind = "comma-separated table"
    separator_name = "commas"

    def _join(self, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray):
        return join_csv_records(self.path, starts, ends, numbers)

    def _fields(self, line: bytes) -> list[str]:
        if quote_state(line) != "closed":
            raise RowError("quote without its end", _text(line)[:80])
        try:
            # Not splitlines(), which also cuts at characters that only Unicode calls line ends.
            return next(csv.reader(part + "\n" for part in _text(line).split("\n")))
        except csv.Error as error:
            raise RowError("not CSV", str(error)[:80]) from None


class JsonlSource(TableSource):
    """One JSON object a line: the picture's path under a usual image name, and captions.

    Captions are the list or the object under "captions", or the values of caption keys, each a caption or a list of
    some (see `CaptionLists`). Text and numbers are captions (numbers as JSON spells them), null or an absent key is a
    missing one, and a list of integers is token ids.
    """

    kind = "JSON lines"

    def _understand(self, sample: list[bytes]) -> int:
        keys: dict[str, None] = {}
        width, named, rows = 0, {}, []
        for line in sample:
            try:
                value = self._object(line)
            except RowError:
                continue
            rows.append(value)
            keys.update(dict.fromkeys(value))
            captions = value.get("captions")
            if isinstance(captions, list):
                width = max(width, len(captions))
            elif isinstance(captions, dict):
                named.update(dict.fromkeys(captions))
        if not keys:
            raise UserError(f"{self.path} has no line that is a JSON object among the first {len(sample)}")
        self.image_column = choose_image_column(list(keys), self.image_column, str(self.path))
        self._in_captions = not self.caption_columns and bool(width or named)
        if self._in_captions:
            self.caption_names = list(named) or [f"caption{i}" for i in range(min(width, MAX_CAPTIONS))]
            self.caption_columns = self.caption_names
            check_number_of_captions(len(self.caption_names), str(self.path))
        else:
            self.caption_columns = choose_caption_columns(
                list(keys), self.image_column, self.caption_columns, str(self.path)
            )
            self._lists = CaptionLists(self.caption_columns, rows, str(self.path))
            self.caption_names = self._lists.names
        return 0

    def _value(self, line: bytes, column: str) -> Any:
        return self._object(line).get(column)

    def _object(self, line: bytes) -> dict:
        try:
            value = json.loads(_text(line))
        except (ValueError, RecursionError) as error:
            raise RowError("not JSON", str(error)[:80]) from None
        if not isinstance(value, dict):
            raise RowError("not a JSON object", f"a {type(value).__name__}")
        return value

    def _parse(self, line: bytes) -> tuple[Any, list]:
        value = self._object(line)
        if not self._in_captions:
            return value.get(self.image_column), self._lists.of(value)
        captions = value.get("captions")
        if isinstance(captions, (str, int, float)):
            captions = [captions]
        if isinstance(captions, list):
            captions = dict(zip(self.caption_columns, captions, strict=False))
        elif captions is None:
            captions = {}
        elif not isinstance(captions, dict):
            raise RowError("captions are no list", f"a {type(captions).__name__}")
        return value.get(self.image_column), [json_caption(captions.get(name)) for name in self.caption_columns]


def _text(line: bytes) -> str:
    return line.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\r").decode("utf-8", "replace")
