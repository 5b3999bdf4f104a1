"""Checksums of a checkpoint's files: taken while they are written, compared before they are read.

PyTorch reads a file whose bytes have changed without a word. CRC-32 finds any damage of up to 32 bits in a row for
certain, other damage but for one case in four billion; it is no protection from somebody who means harm. `zlib`'s takes
0.3 to 1 second for a GB, and other threads run meanwhile.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import UserError

STATE = "state.json"
"""In a checkpoint: what the run was and where it stood."""
CHECKSUMS = "crc32"
"""In it: checksums of the other files by name, 8 hexadecimal digits each. Older checkpoints have none."""
_BLOCK = 1 << 20


def save(content: Any, path: Path) -> tuple[int, str]:
    """`torch.save` onto the disk; (size in bytes, checksum). `OSError` or torch's `RuntimeError` when it cannot be."""
    with open(path, "wb") as file:
        summing = _Summing(file)
        torch.save(content, summing)
        if summing.error is not None:
            raise summing.error
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), _text(summing.value)


class _Summing:
    """A file to write to, of whose bytes it takes the checksum as they pass: nothing is read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.value = 0
        self.error: OSError | None = None
        """Why it takes no more. It is not raised in `write`, which torch calls from C++."""

    def write(self, data: memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
                self.value = zlib.crc32(data, self.value)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Nothing: `save` does it, where an error is heard."""


def checksum(path: Path) -> str:
    """Of a file as it is on the disk."""
    value, block = 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            value = zlib.crc32(block[:count], value)
    return _text(value)


def check(path: Path, recorded: str) -> None:
    """`UserError` if a file cannot be read, or has another checksum than when it was written."""
    try:
        found = checksum(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); use an earlier checkpoint") from None
    if found != recorded:
        raise UserError(
            f"{path} is damaged: its bytes have the CRC-32 {found}, and had {recorded} when they were written; use an "
            "earlier checkpoint"
        )


def recorded(checkpoint: Path) -> dict[str, str]:
    """Checksums by file name; {} of a checkpoint that has none, or no state.json that can be read."""
    try:
        return json.loads((checkpoint / STATE).read_text(encoding="utf-8")).get(CHECKSUMS, {})
    except (OSError, ValueError, AttributeError):
        return {}


def _text(value: int) -> str:
    return f"{value:08x}"
