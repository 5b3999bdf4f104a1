"""What a source of image-caption rows offers to the packer."""

from __future__ import annotations

import json
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ..images import MAX_FILE_BYTES
from ..progress import Log

MAX_CAPTIONS = 8
# Names under which tables call their picture, in the order of preference.
IMAGE_NAMES = ("image", "image_path", "filepath", "file_path", "file", "filename", "file_name", "path", "img", "images")
PUBLISHED_NAMES = ("raw", "synthetic", "generated")
CAPTION_PREFIXES = ("caption", "text", "txt", "title", "description", "alt")


class RowError(Exception):
    """A row that cannot be packed, and why.

    Attributes:
        kind: the reason in a few words, the same for all rows with this fault; detail: what was found in this one.
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail


@dataclass
class Row:
    """One pair: the encoded picture, and its captions in the order of `Source.caption_names`.

    A caption is text, token ids (list or array of numbers), or None when the row has none; `why_none` says why it has
    none at all, where that is known.
    """

    image: bytes
    captions: Sequence
    why_none: str = ""


class Source(ABC):
    """Numbered rows that any process can read in any order.

    `build_index` and then `copy_rows` run once, in one process; after that the object may be pickled: other processes
    map the index's files instead of copying them.

    Attributes:
        kind: what the source is, for messages.
        caption_names: a name for each caption of a row.
        fingerprint: changes when the rows, or their number or order, change.
    """

    kind: str
    caption_names: list[str]
    fingerprint: str

    @abstractmethod
    def build_index(self, folder: Path) -> None:
        """Find all rows and write what is needed to reach them into `folder`; sets the attributes.

        It takes minutes at most, so that a mistake is told before the work of hours. The folder may hold files of an
        earlier call, by an interrupted run.

        Raises:
            UserError: the source holds no rows or is not what it seems.
        """

    def copy_rows(self, folder: Path, log: Log | None = None) -> None:
        """Copy rows that cannot be reached where they are into `folder`; most sources have none.

        Copies that an interrupted call finished are kept. `log` takes progress lines.

        Raises:
            UserError: the source cannot be read, or the disk refuses a write.
        """
        return

    def require_keys(self) -> None:
        """Refuse a source whose rows have no keys.

        Raises:
            UserError: it has none, with what to do.
        """
        return

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def where(self, i: int) -> str:
        """Where row `i` is, for messages: "pairs.tsv line 17"."""

    def key(self, i: int) -> str:
        """What other files call row `i`, to join them with it."""
        raise UserError(f"a {self.kind} has no keys to join by")

    @abstractmethod
    def row(self, i: int) -> Row:
        """Read row `i`.

        Raises:
            RowError: this row must be left out.
        """


class Arrays:
    """Named numpy arrays in a folder, memory-mapped in each process that uses them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, np.ndarray] = {}

    def save(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            np.save(self.folder / f"{name}.npy", array)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._open:
            self._open[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return self._open[name]

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "_open": {}}


class Bytes:
    """A file read at given places, opened once in each process."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def read(self, start: int, end: int) -> bytes:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        parts = []
        while start < end:  # one read gives at most 2 GiB
            part = os.pread(self._descriptor, end - start, start)
            if not part:
                raise RowError("file became shorter", f"{self.path} ends at byte {start}")
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def __getstate__(self) -> dict:
        return {"path": self.path, "_descriptor": None}


def read_file(path: Path, what: str = "image") -> bytes:
    """The bytes of a row's file.

    Raises:
        RowError: it is not there, cannot be read, or is larger than any picture.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for without end
            raise RowError(f"{what} cannot be read", f"{path} is no regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise RowError("file too large", f"{path}: {status.st_size >> 20} MB, at most {MAX_FILE_BYTES >> 20} MB")
        return path.read_bytes()
    except FileNotFoundError:
        raise RowError(f"{what} missing", str(path)) from None
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise RowError(f"{what} cannot be read", f"{path}: {getattr(error, 'strerror', None) or error}") from None


def choose_image_column(columns: Sequence[str], wanted: str | None, what: str) -> str:
    """The column that names the picture: `wanted`, or the first with one of the usual names."""
    if wanted is not None:
        if wanted not in columns:
            raise UserError(f"{what} has no column {wanted!r}; it has {', '.join(columns)}")
        return wanted
    by_name: Mapping[str, str] = {column.strip().lower(): column for column in reversed(columns)}
    for name in IMAGE_NAMES:
        if name in by_name:
            return by_name[name]
    raise UserError(
        f"{what} has no column with a usual image name ({', '.join(IMAGE_NAMES)}); it has {', '.join(columns)}: name "
        "it with --image-column"
    )


def choose_caption_columns(columns: Sequence[str], image: str, wanted: Sequence[str] | None, what: str) -> list[str]:
    """The caption columns: `wanted`, or raw, synthetic and generated, or those with a usual caption name."""
    if wanted:
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise UserError(f"{what} has no column {missing[0]!r}; it has {', '.join(columns)}")
        chosen = list(wanted)
    else:
        lower = {column: column.strip().lower() for column in columns if column != image}
        chosen = [column for name in PUBLISHED_NAMES for column in lower if lower[column] == name]
        if not chosen:
            chosen = [column for column in lower if lower[column].startswith(CAPTION_PREFIXES)]
        if not chosen:
            raise UserError(
                f"{what} has no caption column that is known by its name ({', '.join(columns)}): name them "
                "with --caption-columns"
            )
    check_number_of_captions(len(chosen), what)
    return chosen


def json_caption(value: Any) -> str | list | None:
    """A JSON value as a caption: text, a number as JSON spells it, token ids; null and NaN are a missing one."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) in (int, float) for item in value):
        return value
    if isinstance(value, (bool, int, float)):
        return None if value != value else json.dumps(value)
    raise RowError("caption is no text", f"{value!r}"[:80])


class CaptionLists:
    """Captions of columns in which a row's value may be one caption or a list of them.

    A list is several captions unless all in it are numbers: those are one caption's token ids. A column with such lists
    gives as many captions as the longest of them has, NAME0, NAME1, ...; further items are left out.

    Args:
        columns: names of the columns.
        sample: some rows, values by column, which tell the lengths.
        what: where they are from, for messages.

    Attributes:
        names: a name for each caption of a row.
    """

    def __init__(self, columns: Sequence[str], sample: Sequence[Mapping[str, Any]], what: str):
        most = MAX_CAPTIONS if len(columns) == 1 else None
        self._lengths = [
            (name, max((len(_items(row.get(name))[:most]) for row in sample), default=1)) for name in columns
        ]
        self.names = [f"{name}{i}" if length > 1 else name for name, length in self._lengths for i in range(length)]
        check_number_of_captions(len(self.names), what)

    def of(self, values: Mapping[str, Any]) -> list[str | list | None]:
        """One row's captions, None for those that are missing, from its values by column."""
        captions: list[str | list | None] = []
        for name, length in self._lengths:
            items = _items(values.get(name))[:length]
            captions += [json_caption(item) for item in items] + [None] * (length - len(items))
        return captions


def _items(value: Any) -> list:
    """The captions in a JSON value, at least one."""
    is_several = isinstance(value, list) and not all(type(item) in (int, float) for item in value)
    return value if is_several else [value]


def check_number_of_captions(count: int, what: str) -> None:
    if not 1 <= count <= MAX_CAPTIONS:
        raise UserError(
            f"{what} gives {count} captions a row; a record holds 1 to {MAX_CAPTIONS}: choose with --caption-columns"
        )
