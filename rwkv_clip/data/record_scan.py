"""Find the records of a `.rec` file without an index, and write the index anew."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError
from .progress import Log, Progress
from .record_format import HEADER, LENGTH_MASK, MAGIC_BYTES, PART, record_end
from .record_index import Index, format_index
from .record_writer import sync_folder
from .recordio import RecordFile


@dataclass
class Scan:
    """What a pass over a `.rec` file found.

    Attributes:
        index: keys and offsets of the sound records, in the order of the file.
        lost_bytes: bytes that belong to no sound record.
        torn_tail: the file ends inside a record, as an interrupted packer leaves it.
    """

    index: Index
    lost_bytes: int
    torn_tail: bool


def scan_records(rec_path: str | os.PathLike, log: Log | None = None) -> Scan:
    """Walk a `.rec` file from record to record; after a broken place, go on at the next record's start.

    Keys are the ids in the records' headers where these are all different, else 0, 1, ...

    Raises:
        UserError: the file cannot be read or holds no sound record.
    """
    rec_path = Path(rec_path)
    try:
        size = rec_path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot open the records {rec_path}: {error.strerror}") from None
    if size == 0:
        raise UserError(f"{rec_path} is empty (0 bytes): pack the data again or copy the file again")
    view = RecordFile.with_index(rec_path, Index(None, np.zeros(0, np.int64), False)).view()
    mapped = view.obj
    progress = Progress(f"scanning {rec_path.name}", size, "bytes", log)
    offsets, ids = array("q"), array("Q")
    place = sound_bytes = 0
    torn_tail = False
    while place < size:
        end = record_end(view, place, size)
        if end is not None:
            offsets.append(place)
            ids.append(_header_id(view, place))
            sound_bytes += min(end, size) - place
            progress(end - place)
            place = end
            continue
        next_start = _next_start(mapped, view, place + 4, size)
        torn_tail = next_start == size
        progress(next_start - place)
        place = next_start
    if not offsets:
        raise UserError(f"{rec_path} holds no RecordIO record ({size} bytes): is it a .rec file? Pack the data again")
    keys = np.frombuffer(ids, np.uint64)
    if len(np.unique(keys)) != len(keys) or keys.max() >= 1 << 63:
        keys = np.arange(len(offsets))
    index = Index(keys.astype(np.int64), np.frombuffer(offsets, np.int64), False)
    return Scan(index, size - sound_bytes, torn_tail)


def rebuild_index(rec_path: str | os.PathLike, log: Log | None = None) -> Scan:
    """Scan `X.rec` and write `X.idx` for it; an older index is kept as `X.idx.old`."""
    rec_path = Path(rec_path)
    scan = scan_records(rec_path, log)
    idx_path = rec_path.with_suffix(".idx")
    partial = idx_path.with_name(f"{idx_path.name}.partial")
    try:
        with open(partial, "wb") as out:
            out.write(format_index(scan.index.keys, scan.index.offsets))
            out.flush()
            os.fsync(out.fileno())
        if idx_path.exists() and idx_path.stat().st_size > 0:
            os.replace(idx_path, idx_path.with_name(f"{idx_path.name}.old"))
        os.replace(partial, idx_path)
        sync_folder(idx_path.parent)
    except OSError as error:
        raise UserError(f"cannot write {idx_path}: {error.strerror}") from None
    return scan


def _header_id(view: memoryview, place: int) -> int:
    """The id in the header of the sound record at `place`; 0 if the record is cut inside its header."""
    packed = PART.unpack_from(view, place)[1]
    return HEADER.unpack_from(view, place + PART.size)[2] if packed & LENGTH_MASK >= HEADER.size else 0


def _next_start(mapped, view: memoryview, place: int, size: int) -> int:
    """The next place where a record may start, or `size`."""
    while True:
        place = mapped.find(MAGIC_BYTES, place)
        if place < 0 or place > size - PART.size:
            return size
        if place % 4 == 0 and PART.unpack_from(view, place)[1] >> 29 in (0, 1):
            return place
        place += 1
