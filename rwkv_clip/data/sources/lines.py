"""Finding the rows of text tables: places of lines, and of CSV records that span lines."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from ...errors import UserError

CHUNK_BYTES = 1 << 24
# A quoted CSV field may hold so many line breaks; more is a quote that was never closed.
MAX_CSV_LINES = 100


def scan_lines(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Every line that is not blank.

    Returns:
        (starts int64 [N], ends int64 [N] without the line break, line numbers int64 [N] from 1, digest of the bytes).

    Raises:
        UserError: the file cannot be read, or is UTF-16.
    """
    digest = hashlib.sha256()
    breaks, position = [], 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                if position == 0 and chunk[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise UserError(f"{path} is UTF-16 text: save it as UTF-8")
                digest.update(chunk)
                breaks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + position)
                position += len(chunk)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    ends = np.concatenate([*breaks, [position]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    numbers = np.arange(1, len(ends) + 1)
    keep = ends > starts
    one = np.flatnonzero(ends - starts == 1)
    if len(one):  # a lone carriage return is a blank line, too
        data = np.memmap(path, np.uint8, "r")
        keep[one[data[starts[one]] == 13]] = False
    return starts[keep], ends[keep], numbers[keep], digest.hexdigest()


def join_csv_records(
    path: Path, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join lines that belong to one CSV record because a quoted field holds a line break.

    A quote that opens a field and is not closed within MAX_CSV_LINES lines, or is closed in the middle of a word, joins
    nothing: that line is left as a row of its own (which then fails to parse), and the next line starts a row.
    """
    data = np.memmap(path, np.uint8, "r")
    keep = np.ones(len(starts), bool)
    joined_ends = ends.copy()
    free = 0  # lines before this one are taken
    for i in _lines_with_quotes(data, starts).tolist():
        if i < free or quote_state(bytes(data[starts[i] : ends[i]])) != "open":
            continue
        for j in range(i + 1, min(i + MAX_CSV_LINES, len(starts))):
            state = quote_state(bytes(data[starts[i] : ends[j]]))
            if state == "closed":
                keep[i + 1 : j + 1] = False
                joined_ends[i] = ends[j]
                free = j + 1
            if state != "open":
                break
    return starts[keep], joined_ends[keep], numbers[keep]


def _lines_with_quotes(data: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Indices of the lines that hold a quote, in order."""
    lines = [np.zeros(0, np.int64)]
    for begin in range(0, len(data), CHUNK_BYTES):
        quotes = np.flatnonzero(data[begin : begin + CHUNK_BYTES] == 34) + begin
        lines.append(np.unique(np.searchsorted(starts, quotes, "right") - 1))
    return np.unique(np.concatenate(lines))


def quote_state(record: bytes) -> str:
    """How the quotes of a CSV record stand: "closed", "open" (a field goes on in the next line), or "broken"."""
    if b'"' not in record:
        return "closed"
    position, size = 0, len(record)
    while position < size:
        if record[position : position + 1] == b'"':
            position += 1
            while True:
                quote = record.find(b'"', position)
                if quote < 0:
                    return "open"
                if record[quote + 1 : quote + 2] == b'"':  # a doubled quote is a quote
                    position = quote + 2
                    continue
                break
            rest = record[quote + 1 : quote + 2]
            if rest not in (b"", b",", b"\r"):
                return "broken"
            position = quote + 1
        comma = record.find(b",", position)
        if comma < 0:
            return "closed"
        position = comma + 1
    return "closed"
