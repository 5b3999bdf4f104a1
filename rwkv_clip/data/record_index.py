"""The `.idx` file of a RecordIO pair: one line per record, `key<TAB>byte offset`.

Accepted beyond what mxnet writes: blanks instead of the tab, CRLF, blank lines, one header line of words, a missing
final newline, lines in any order, and keys that are words. Keys that are words are replaced by their line's number
(0, 1, ... over the records) and are looked up again in the file when a message needs one.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import UserError


class Index(NamedTuple):
    """A parsed index file.

    Attributes:
        keys: int64 [n], or None when they are 0, 1, ..., n - 1.
        offsets: int64 [n], bytes into the `.rec` file, in the order of the lines.
        word_keys: the file's keys are words; `keys` is None then, and `read_key_name` finds the word.
    """

    keys: np.ndarray | None
    offsets: np.ndarray
    word_keys: bool


def read_index(path: Path) -> Index:
    """Parse an index file.

    Raises:
        UserError: the file cannot be read, holds no record, or a line is not `key offset`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the index {path}: {error.strerror}") from None
    pairs = _parse_plain(data)
    if pairs is None:
        index = _parse_any(path, data)
    else:
        index = Index(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]), False)
    if len(index.offsets) == 0:
        raise UserError(
            f"the index {path} lists no record (an interrupted packer leaves that): pack again, or write it anew "
            f"with `rwkv-clip inspect --rebuild-index {path.with_suffix('.rec')}`"
        )
    keys = index.keys
    if keys is not None and keys[0] == 0 and keys[-1] == len(keys) - 1 and np.array_equal(keys, np.arange(len(keys))):
        return index._replace(keys=None)
    return index


def read_key_name(path: Path, i: int) -> str:
    """The key of record `i` as it stands in the file. Slow for millions of records; for messages."""
    return next(islice((key for _, key, _ in _lines(path, path.read_bytes())), i, None))


def format_index(keys: np.ndarray, offsets: np.ndarray) -> bytes:
    """The index file's bytes, as mxnet writes them: `key<TAB>offset<LF>` per record."""
    return b"".join(b"%d\t%d\n" % pair for pair in zip(keys.tolist(), offsets.tolist(), strict=True))


def _parse_plain(data: bytes) -> np.ndarray | None:
    """int64 [n, 2] for `number separator number newline` lines with one kind of separator and newline, else None."""
    if not data.endswith(b"\n"):
        data += b"\n"
    separators = data.translate(None, b"0123456789")
    count = data.count(b"\n")
    if not any(separators == pattern * count for pattern in (b"\t\n", b" \n", b"\t\r\n", b" \r\n")):
        return None
    numbers = np.fromstring(data, np.int64, sep=" ")
    # A field without digits leaves a number too few; one too long for int64 is read as the largest.
    if len(numbers) != 2 * count or numbers.max() == np.iinfo(np.int64).max:
        return None
    return numbers.reshape(-1, 2)


def _lines(path: Path, data: bytes):
    """Yield (line number from 1, key, offset) for each record's line."""
    seen_first = False
    for number, raw in enumerate(data.split(b"\n"), 1):
        line = raw.decode("utf-8", "replace").strip()
        if not line:
            continue
        fields = line.rsplit(None, 1)
        is_header = not seen_first
        seen_first = True
        if len(fields) == 2 and fields[1].isascii() and fields[1].isdigit() and len(fields[1]) <= 18:
            yield number, fields[0], int(fields[1])
        elif not (is_header and len(fields) == 2 and fields[1].isalpha()):
            raise UserError(
                f"line {number} of the index {path} is {line[:60]!r}, not `key offset`: is this the .idx of a "
                f"RecordIO pair? `rwkv-clip inspect --rebuild-index` writes a new one from the .rec"
            )


def _parse_any(path: Path, data: bytes) -> Index:
    keys: list[int] | None = []
    offsets = []
    for _, key, offset in _lines(path, data):
        offsets.append(offset)
        if keys is not None:
            try:
                number = int(key)
                if not -(2**63) <= number < 2**63:
                    raise ValueError
                keys.append(number)
            except ValueError:
                keys = None
    return Index(None if keys is None else np.array(keys, np.int64), np.array(offsets, np.int64), keys is None)
