"""Constants of the RecordIO format.

Layout of a `.rec` file (little endian, every part starts on a multiple of 4 bytes):

    part     = magic uint32 | flag << 29 | length uint32 | length bytes | zeros up to a multiple of 4
    record   = one part with flag 0, or parts with flags 1, 2, ..., 3, cut where the content itself holds the magic on
               a multiple of 4; the reader puts the magic back between them
    content  = IRHeader | label float32[width] | payload
    IRHeader = width uint32 | label float32 | id uint64 | id2 uint64; width 0 means one label, the header's own

Source: dmlc-core `recordio.h` and mxnet `recordio.py` define the format.
"""

from __future__ import annotations

import struct

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
LENGTH_MASK = (1 << 29) - 1
MAX_CONTENT_BYTES = LENGTH_MASK
PART = struct.Struct("<II")
HEADER = struct.Struct("<IfQQ")
# A one-part record's first 32 bytes: part, then header.
START = struct.Struct("<IIIfQQ")


def record_end(view: memoryview, place: int, size: int) -> int | None:
    """Where the record at `place` ends (padding included), or None if no whole record starts there."""
    first = True
    length_before = 0
    while place <= size - PART.size:
        magic, packed = PART.unpack_from(view, place)
        flag, length = packed >> 29, packed & LENGTH_MASK
        if magic != MAGIC or flag not in ((0, 1) if first else (2, 3)) or place + PART.size + length > size:
            return None
        if flag == 0 and not _header_fits(view, place + PART.size, length):
            return None
        length_before += length + (0 if first else len(MAGIC_BYTES))
        place += PART.size + length + -length % 4
        if flag in (0, 3):
            return place if length_before >= HEADER.size else None
        first = False
    return None


def _header_fits(view: memoryview, start: int, length: int) -> bool:
    return length >= HEADER.size and HEADER.size + 4 * HEADER.unpack_from(view, start)[0] <= length
