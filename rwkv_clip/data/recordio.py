"""RecordIO pairs (`X.rec` + `X.idx`): a memory-mapped reader, and a writer byte-identical to mxnet 1.9.1's.

The layout is described in `record_format.py`.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .record_check import IndexReport, check_index
from .record_format import HEADER, LENGTH_MASK, MAGIC, MAGIC_BYTES, PART, START
from .record_index import Index, read_index, read_key_name
from .record_writer import RecordWriter

__all__ = ["Record", "RecordFile", "RecordWriter", "pair_paths"]


class Record(NamedTuple):
    """One record. `label` and `payload` may be read-only views of the mapped file: copy what must outlive it."""

    key: int
    label: np.ndarray  # float32 [width]
    payload: memoryview | bytes


def pair_paths(path: str | os.PathLike) -> tuple[Path, Path]:
    """(`X.rec`, `X.idx`) for a prefix `X`, `X.rec` or `X.idx`."""
    path = Path(path)
    if path.suffix in (".rec", ".idx"):
        return path.with_suffix(".rec"), path.with_suffix(".idx")
    return path.with_name(path.name + ".rec"), path.with_name(path.name + ".idx")


class RecordFile:
    """A RecordIO pair, opened for random access by position in the index (0 ... len - 1).

    Reading is thread-safe and lock-free, and the object may be pickled and forked: the file is mapped at the first
    read in each process. Every fault of the files raises a UserError that names the file and the key.

    Args:
        rec_path: the `.rec` file.
        idx_path: its index; default: the same name with `.idx`.
    """

    def __init__(self, rec_path: str | os.PathLike, idx_path: str | os.PathLike | None = None):
        self.rec_path = Path(rec_path)
        self.idx_path = self.rec_path.with_suffix(".idx") if idx_path is None else Path(idx_path)
        try:
            self.size_bytes = self.rec_path.stat().st_size
        except OSError as error:
            raise UserError(f"cannot open the records {self.rec_path}: {error.strerror}") from None
        if self.size_bytes == 0:
            raise UserError(f"{self.rec_path} is empty (0 bytes): pack the data again or copy the file again")
        if not self.idx_path.exists():
            raise UserError(
                f"{self.rec_path} has no index {self.idx_path.name} beside it: copy it there, or write it with "
                f"`rwkv-clip inspect --rebuild-index {self.rec_path}`"
            )
        self._set_index(read_index(self.idx_path))

    @classmethod
    def with_index(cls, rec_path: Path, index: Index) -> RecordFile:
        """A `.rec` file with an index that stands in no file, as `repair.scan_records` finds one."""
        file = cls.__new__(cls)
        file.rec_path, file.idx_path = rec_path, rec_path.with_suffix(".idx")
        file.size_bytes = rec_path.stat().st_size
        file._set_index(index)
        return file

    def _set_index(self, index: Index) -> None:
        self._keys, self.offsets, self._word_keys = index
        self._view: memoryview | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def keys(self) -> np.ndarray:
        """int64 [len]: the index's keys in the order of its lines; line numbers where keys are words."""
        return np.arange(len(self)) if self._keys is None else self._keys

    def key(self, i: int) -> int:
        """The key of position `i`."""
        return i if self._keys is None else self._keys.item(i)

    def key_name(self, i: int) -> str:
        """The key of position `i` as the index file spells it."""
        if self._word_keys:
            try:
                return read_key_name(self.idx_path, i)
            except (OSError, UserError, StopIteration):  # the file changed meanwhile
                pass
        return str(self.key(i))

    def describe(self, i: int) -> str:
        """Where position `i` is, for messages: `name.rec key 17 (byte 80344)`."""
        return f"{self.rec_path.name} key {self.key_name(i)} (byte {self.offsets.item(i)})"

    def view(self) -> memoryview:
        """The mapped file, read-only."""
        view = self._view
        if view is None:
            self._view = view = memoryview(self._map())
        return view

    def _map(self) -> mmap.mmap:
        try:
            with open(self.rec_path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot map the records {self.rec_path}: {error}") from None
        if len(mapped) != self.size_bytes:
            raise UserError(
                f"{self.rec_path} was {self.size_bytes} bytes when opened and is {len(mapped)} now: start again "
                f"once nothing writes to it"
            )
        return mapped

    def release(self) -> None:
        """Let go of the mapping (and its file descriptor); the next read maps again. Views handed out stay valid."""
        self._view = None

    def read(self, i: int) -> Record:
        """Record at position `i` of the index; label and payload are views where the record is in one part."""
        offset = self.offsets.item(i)
        view = self.view()
        if offset & 3 == 0 and 0 <= offset <= self.size_bytes - START.size:
            magic, packed, width, scalar, _, _ = START.unpack_from(view, offset)
            label_start = offset + START.size
            payload_start = label_start + 4 * width
            end = offset + PART.size + packed
            # A packed word below 2^29 is flag 0, the whole record in one part.
            if magic == MAGIC and packed <= LENGTH_MASK and payload_start <= end <= self.size_bytes:
                if width:
                    label = np.frombuffer(view, np.float32, width, label_start)
                else:
                    label = np.array([scalar], np.float32)
                return Record(self.key(i), label, view[payload_start:end])
        content = self._join_parts(i, offset)
        width, scalar, _, _ = self._header(i, content)
        payload_start = HEADER.size + 4 * width
        label = np.frombuffer(content, np.float32, width, HEADER.size) if width else np.array([scalar], np.float32)
        return Record(self.key(i), label, memoryview(content)[payload_start:])

    def header(self, i: int) -> tuple[int, float, int, int]:
        """IRHeader of position `i`: (flag = label width or 0, scalar label, id, id2)."""
        return self._header(i, self._join_parts(i, self.offsets.item(i)))

    def check(self, num_threads: int = 4, progress=None) -> IndexReport:
        """Check every entry of the index against the file's size and the record's header (see `check_index`)."""
        mapped = self._map()
        if hasattr(mmap, "MADV_RANDOM"):
            # Headers lie tens of kilobytes apart: without this, reading ahead would fetch nearly the whole file.
            mapped.madvise(mmap.MADV_RANDOM)
        words = np.frombuffer(mapped, "<u4", self.size_bytes // 4)
        return check_index(self, words, num_threads, progress)

    def part_end(self, i: int) -> int:
        """First byte after the record at position `i`, padding included; walks its parts."""
        return self._walk(i, self.offsets.item(i))[1]

    def _walk(self, i: int, offset: int) -> tuple[list[tuple[int, int]], int]:
        """The (start, end) byte ranges of a record's parts, and where the next record starts."""
        view = self.view()
        ranges: list[tuple[int, int]] = []
        while True:
            if not 0 <= offset <= self.size_bytes - PART.size:
                raise self._broken(i, f"the file ends at byte {self.size_bytes}")
            if offset % 4:
                raise self._broken(i, "records start on multiples of 4")
            magic, packed = PART.unpack_from(view, offset)
            flag, length = packed >> 29, packed & LENGTH_MASK
            if magic != MAGIC:
                raise self._broken(i, "no record starts there" if not ranges else f"its part at byte {offset} is lost")
            if flag not in ((0, 1) if not ranges else (2, 3)):
                raise self._broken(
                    i, "an inner part of a record is there" if not ranges else f"its part at byte {offset} is lost"
                )
            start, end = offset + PART.size, offset + PART.size + length
            if end > self.size_bytes:
                raise self._broken(i, f"it needs {end} bytes and the file ends at {self.size_bytes}")
            ranges.append((start, end))
            offset = end + -length % 4
            if flag in (0, 3):
                return ranges, offset

    def _join_parts(self, i: int, offset: int) -> bytes:
        view = self.view()
        return MAGIC_BYTES.join([view[start:end] for start, end in self._walk(i, offset)[0]])

    def _header(self, i: int, content: bytes) -> tuple[int, float, int, int]:
        if len(content) < HEADER.size:
            raise self._broken(i, f"it holds {len(content)} bytes, fewer than an IRHeader's {HEADER.size}")
        header = HEADER.unpack_from(content)
        if HEADER.size + 4 * header[0] > len(content):
            raise self._broken(i, f"its header asks for {header[0]} labels and it holds {len(content)} bytes")
        return header

    def _broken(self, i: int, why: str) -> UserError:
        return UserError(
            f"{self.rec_path} key {self.key_name(i)} at byte {self.offsets.item(i)} is not a readable record: {why}. "
            f"If {self.idx_path.name} is another file's index, write it anew with "
            f"`rwkv-clip inspect --rebuild-index {self.rec_path}`"
        )

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_view": None}
