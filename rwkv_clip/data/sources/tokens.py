"""Captions that are token ids already, in an `.npy` file beside the source."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...errors import UserError
from ..progress import Log
from .base import PUBLISHED_NAMES, Row, RowError, Source, check_number_of_captions


@dataclass(frozen=True)
class TokenColumns:
    """One caption: columns `first` to `last` (both included) of the array in `path`."""

    name: str
    path: Path
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> TokenColumns:
        """From "raw=tokens.npy:0-76"; without columns the whole width is meant."""
        match = re.fullmatch(r"([^=]+)=(.+?)(?::(\d+)-(\d+))?", text)
        if match is None:
            raise UserError(f"--tokens {text!r}: give NAME=FILE.npy:FIRST-LAST, such as raw=tokens.npy:0-76")
        name, path, first, last = match.groups()
        return cls(name, Path(path), int(first or 0), -1 if last is None else int(last))


def map_array(path: Path) -> np.ndarray:
    """The array of an `.npy` file, mapped.

    Raises:
        UserError: the file cannot be read or is no `.npy`.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--tokens {path} cannot be read as .npy ({reason}): give one array as `numpy.save` writes it"
        ) from None


class WithTokens(Source):
    """A source with further captions from arrays of token ids.

    Captions called raw, synthetic and generated come first, in this order; then the source's, then the arrays' others.

    Args:
        source: gives the pictures, and any captions of its own.
        columns: the further captions.
        by_key: row `int(key)` of the array belongs to a row (see `Source.key`); otherwise row i to row i, and the
            array must have as many rows as the source.
    """

    def __init__(self, source: Source, columns: list[TokenColumns], by_key: bool):
        self.source, self.columns, self.by_key = source, columns, by_key
        self.kind = source.kind
        self._arrays: dict[Path, np.ndarray] = {}

    def build_index(self, folder: Path) -> None:
        self.source.build_index(folder)
        if self.by_key:
            self.source.require_keys()
        digest = hashlib.sha256(self.source.fingerprint.encode())
        for column in self.columns:
            array = self._array(column.path)
            last = array.shape[1] - 1 if column.last < 0 else column.last
            if not column.first <= last < array.shape[1]:
                raise UserError(f"--tokens {column.name}: {column.path} has columns 0-{array.shape[1] - 1}")
            if not self.by_key and len(array) != len(self.source):
                raise UserError(
                    f"{column.path} has {len(array):,} rows and the source {len(self.source):,}: join them with "
                    "--join-by-key if the source's keys are row numbers"
                )
            stat = column.path.stat()
            digest.update(f"{column}{array.shape}{array.dtype}{stat.st_size}{stat.st_mtime_ns}".encode())
        own = self.source.caption_names
        names = [*own, *(column.name for column in self.columns)]
        if len(set(names)) < len(names):
            raise UserError(f"two captions have the same name: {', '.join(names)}")
        check_number_of_captions(len(names), "the source with --tokens")
        rank = {name: position for position, name in enumerate(PUBLISHED_NAMES)}
        self._order = sorted(range(len(names)), key=lambda n: rank.get(names[n], len(rank)))
        self.caption_names = [names[n] for n in self._order]
        self.fingerprint = f"{digest.hexdigest()}/{self.caption_names}/{self.by_key}"

    def copy_rows(self, folder: Path, log: Log | None = None) -> None:
        self.source.copy_rows(folder, log)

    def __len__(self) -> int:
        return len(self.source)

    def where(self, i: int) -> str:
        return self.source.where(i)

    def key(self, i: int) -> str:
        return self.source.key(i)

    def row(self, i: int) -> Row:
        row = self.source.row(i)
        captions = [*row.captions, *(self._tokens(column, i) for column in self.columns)]
        return replace(row, captions=[captions[n] for n in self._order])

    def _tokens(self, column: TokenColumns, i: int) -> np.ndarray:
        array = self._array(column.path)
        if self.by_key:
            key = self.source.key(i)
            if not key.isascii() or not key.isdigit() or int(key) >= len(array):
                raise RowError("no tokens for this key", f"{key!r}; {column.path.name} has {len(array):,} rows")
            i = int(key)
        return array[i, column.first : None if column.last < 0 else column.last + 1]

    def _array(self, path: Path) -> np.ndarray:
        if path not in self._arrays:
            array = map_array(path)
            if array.ndim != 2 or array.dtype.kind not in "iuf":
                raise UserError(f"--tokens {path} is {array.dtype} {list(array.shape)}: numbers [rows, ids] are needed")
            self._arrays[path] = array
        return self._arrays[path]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_arrays": {}}
