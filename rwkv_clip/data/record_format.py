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
