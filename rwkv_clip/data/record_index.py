"""The `.idx` file of a RecordIO pair: one line per record, `key<TAB>byte offset`.

Accepted beyond what mxnet writes: blanks instead of the tab, CRLF, blank lines, one header line of words, a missing
final newline, lines in any order, and keys that are words. Keys that are words are replaced by their line's number
(0, 1, ... over the records) and are looked up again in the file when a message needs one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import UserError

_CHUNK_BYTES = 8 << 20
_PLAIN = b"0123456789\t\n\r "
_NEWLINE, _ZERO, _NINE = ord("\n"), ord("0"), ord("9")


def read_index(path: Path) -> tuple[np.ndarray | None, np.ndarray]:
    """Parse an index file.

    Returns:
        keys: int64 [n], or None when they are 0, 1, ..., n - 1 (or words, which count as that).
        offsets: int64 [n], bytes into the `.rec` file, in the order of the lines.

    Raises:
        UserError: the file cannot be read, holds no record, or a line is not `key offset`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the index {path}: {error.strerror}") from None
    pairs = _parse_plain(data)
    if pairs is None:
        keys, offsets = _parse_any(path, data)
    else:
        keys, offsets = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    if len(offsets) == 0:
        raise UserError(
            f"the index {path} lists no record (an interrupted packer leaves that): pack again, or write it anew "
            f"with `rwkv-clip inspect --rebuild-index {path.with_suffix('.rec')}`"
        )
    if keys is not None and keys[0] == 0 and keys[-1] == len(keys) - 1 and np.array_equal(keys, np.arange(len(keys))):
        keys = None
    return keys, offsets


def read_key_names(path: Path) -> list[str]:
    """The keys as they stand in the file, one per record. Slow for millions of records; for messages."""
    return [key for _, key, _ in _lines(path, path.read_bytes())]


def format_index(keys: np.ndarray, offsets: np.ndarray) -> bytes:
    """The index file's bytes, as mxnet writes them: `key<TAB>offset<LF>` per record."""
    return b"".join(b"%d\t%d\n" % pair for pair in zip(keys.tolist(), offsets.tolist(), strict=True))


def _parse_plain(data: bytes) -> np.ndarray | None:
    """int64 [n, 2] for a file of digits and blanks with two numbers on each line that is not blank, else None."""
    pieces = []
    start = 0
    while start < len(data):
        end = len(data)
        if end - start > _CHUNK_BYTES:
            end = data.rfind(b"\n", start, start + _CHUNK_BYTES) + 1
            if end == 0:
                return None
        chunk = data[start:end]
        if chunk.translate(None, _PLAIN):
            return None
        codes = np.frombuffer(chunk, np.uint8)
        is_digit = (codes >= _ZERO) & (codes <= _NINE)
        number_starts = np.flatnonzero(is_digit & ~np.concatenate(([False], is_digit[:-1])))
        line = np.searchsorted(np.flatnonzero(codes == _NEWLINE), number_starts)
        first, second = line[0::2], line[1::2]
        if len(first) != len(second) or (first != second).any() or (np.diff(first) == 0).any():
            return None
        if len(line):
            digits = np.flatnonzero(is_digit & ~np.concatenate((is_digit[1:], [False]))) - number_starts + 1
            if digits.max() > 18:
                return None
            pieces.append(np.fromstring(chunk, np.int64, sep=" ").reshape(-1, 2))
        start = end
    return np.concatenate(pieces) if pieces else np.empty((0, 2), np.int64)


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


def _parse_any(path: Path, data: bytes) -> tuple[np.ndarray | None, np.ndarray]:
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
    return None if keys is None else np.array(keys, np.int64), np.array(offsets, np.int64)
