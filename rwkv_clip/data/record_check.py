"""Check a whole RecordIO index against its file, vectorised: millions of entries in seconds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError
from .record_format import LENGTH_MASK, MAGIC, record_end

if TYPE_CHECKING:
    from .recordio import RecordFile

_BLOCK = 1 << 16


@dataclass
class IndexReport:
    """What `check_index` found in a sound pair.

    Attributes:
        widths: int32 [n], label width of every record; 1 for a scalar label in the header.
        num_multipart: records stored in several parts.
        unlisted_bytes: bytes of the file that belong to no listed record (a subset index, or a torn tail).
        notes: what a user may want to know, one line each.
    """

    widths: np.ndarray
    num_multipart: int = 0
    unlisted_bytes: int = 0
    notes: list[str] = field(default_factory=list)


def refuse_short_index(file: RecordFile) -> None:
    """Refuse an index that ends before its file does, as a packer leaves it that was stopped before it wrote the rest.

    An index may leave out records between others (a subset that someone chose), and the file may end inside a record.

    Raises:
        UserError: a whole record follows the last one that is listed.
    """
    last = int(file.offsets.argmax())
    try:
        end = file.part_end(last)
        short = record_end(file.view(), end, file.size_bytes) is not None
    except UserError:  # the checks of the entries themselves tell more
        return
    finally:
        file.release()
    if short:
        raise UserError(
            f"{file.idx_path} ends with key {file.key_name(last)} at byte {file.offsets[last]} and {file.rec_path.name}"
            f" holds more records after it ({file.size_bytes - end} bytes): an interrupted packer leaves that; pack "
            f"again, or list them with `rwkv-clip inspect --rebuild-index {file.rec_path}`, or, if the rest is not "
            f"wanted, cut it off with `truncate -s {end} {file.rec_path}`"
        )


def check_index(file: RecordFile, words: np.ndarray, num_threads: int = 4, progress=None) -> IndexReport:
    """Every listed offset lies in the file, a record starts there and fits, no record is listed twice, and none follows
    the last one that is listed.

    Args:
        file: the pair.
        words: uint32 view of the mapped file (whole words only).
        num_threads: blocks of 65,536 entries are checked by this many threads.
        progress: called with the number of entries of each finished block.

    Raises:
        UserError: naming the first broken entry's key, in the order of the index.
    """
    offsets = file.offsets
    count = len(offsets)
    starts_outside = (offsets < 0) | (offsets > file.size_bytes - 32) | (offsets % 4 != 0)
    suspects = np.flatnonzero(starts_outside)
    ends = np.zeros(count, np.int64)
    widths = np.zeros(count, np.int32)
    walk = np.zeros(count, bool)

    def check_block(start: int) -> int:
        block = slice(start, min(start + _BLOCK, count))
        first = np.where(starts_outside[block], 0, offsets[block]) >> 2
        magic, packed, width = (words[np.minimum(first + i, len(words) - 1)] for i in range(3))
        length = (packed & LENGTH_MASK).astype(np.int64)
        end = offsets[block] + 8 + (length + 3 & ~3)
        one_part = packed <= LENGTH_MASK
        sound = (magic == MAGIC) & (24 + 4 * width.astype(np.int64) <= length)
        sound &= offsets[block] + 8 + length <= file.size_bytes
        ends[block] = end
        widths[block] = np.maximum(width, 1)
        walk[block] = ~(one_part & sound)
        return block.stop - start

    blocks = range(0, count, _BLOCK) if len(words) else ()
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        for done in pool.map(check_block, blocks):
            if progress is not None:
                progress(done)
    walk[suspects] = True
    unusual = np.flatnonzero(walk)
    for i in unusual.tolist():
        # Raises for a broken entry; records in several parts pass.
        flag = file.header(i)[0]
        widths[i] = max(flag, 1)
        ends[i] = file.part_end(i)
    order = None if (np.diff(offsets) > 0).all() else np.argsort(offsets, kind="stable")
    in_order = offsets if order is None else offsets[order]
    twice = np.flatnonzero(np.diff(in_order) == 0)
    if len(twice):
        a, b = (order[twice[0]], order[twice[0] + 1]) if order is not None else (0, 0)
        raise UserError(
            f"{file.idx_path} lists the record at byte {offsets[a]} twice, as key {file.key_name(int(a))} and key "
            f"{file.key_name(int(b))}: write it anew with `rwkv-clip inspect --rebuild-index {file.rec_path}`"
        )
    refuse_short_index(file)
    report = IndexReport(widths, num_multipart=len(unusual))
    listed = int((ends - offsets).sum())
    report.unlisted_bytes = max(0, file.size_bytes - listed)
    if report.unlisted_bytes:
        report.notes.append(
            f"{file.idx_path.name} leaves out {report.unlisted_bytes} of the {file.size_bytes} bytes of "
            f"{file.rec_path.name}: records that it does not list are not used"
        )
    return report
