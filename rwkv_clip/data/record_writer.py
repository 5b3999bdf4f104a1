"""Write a RecordIO pair byte-identical to mxnet 1.9.1's `MXIndexedRecordIO` with `pack(IRHeader(...), payload)`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import UserError
from .record_format import HEADER, MAGIC, MAGIC_BYTES, MAX_CONTENT_BYTES, PART


class RecordWriter:
    """Writes `prefix.rec` and `prefix.idx`. Nothing stands under these names before `close()` has put all on disk.

    Use it as a context manager: leaving it normally closes, leaving it by an exception aborts and removes the
    unfinished files, which are called `prefix.rec.partial` and `prefix.idx.partial`.

    Args:
        prefix: path without the extension; its folder must exist.
    """

    def __init__(self, prefix: str | os.PathLike):
        prefix = Path(prefix)
        self.rec_path = prefix.with_name(prefix.name + ".rec")
        self.idx_path = prefix.with_name(prefix.name + ".idx")
        self._rec_partial = prefix.with_name(prefix.name + ".rec.partial")
        self._idx_partial = prefix.with_name(prefix.name + ".idx.partial")
        self.num_records = 0
        self.size_bytes = 0
        self._rec = self._idx = None
        try:
            self._rec = open(self._rec_partial, "wb", buffering=1 << 20)
            self._idx = open(self._idx_partial, "wb", buffering=1 << 16)
        except OSError as error:
            self.abort()
            raise UserError(f"cannot write {self._rec_partial}: {error.strerror}") from None

    def write(self, key: int | str, label: np.ndarray | float, payload, *, record_id: int | None = None) -> None:
        """Append one record.

        Args:
            key: the record's key in the index.
            label: float32 [width], or one number (then the header alone holds it and the width is 0).
            payload: the encoded image, any bytes-like object.
            record_id: the header's id; default: the key where that is a number that fits, else 0.

        Raises:
            UserError: the record is too large for the format (2^29 - 1 bytes), or the disk refuses it.
        """
        if record_id is None:
            record_id = key if isinstance(key, (int, np.integer)) and 0 <= key < 1 << 64 else 0
        if np.ndim(label) == 0:
            content = HEADER.pack(0, float(label), record_id, 0) + bytes(payload)
        else:
            label = np.ascontiguousarray(label, np.float32).reshape(-1)
            content = b"".join((HEADER.pack(label.size, 0.0, record_id, 0), label.tobytes(), payload))
        size = len(content)
        if size > MAX_CONTENT_BYTES:
            raise UserError(f"record {key} is {size} bytes and RecordIO's limit is {MAX_CONTENT_BYTES}: leave it out")
        parts = []
        start = 0
        hit = content.find(MAGIC_BYTES)
        while hit >= 0:
            aligned = hit % 4 == 0
            if aligned:
                parts += (_part_head(2 if parts else 1, hit - start), content[start:hit])
                start = hit + 4
            hit = content.find(MAGIC_BYTES, start if aligned else hit + 1)
        parts += (_part_head(3 if parts else 0, size - start), content[start:], bytes(-size % 4))
        data = b"".join(parts)
        try:
            self._rec.write(data)
            self._idx.write(b"%s\t%d\n" % (str(key).encode(), self.size_bytes))
        except OSError as error:
            self.abort()
            raise UserError(f"cannot write {self._rec_partial}: {error.strerror}") from None
        self.size_bytes += len(data)
        self.num_records += 1

    def close(self) -> None:
        """Put both files on disk, then give them their names, the index last."""
        if self._rec is None:
            return
        try:
            for file in (self._rec, self._idx):
                file.flush()
                os.fsync(file.fileno())
                file.close()
            # An older index must not stand beside the new records, not even for a moment.
            self.idx_path.unlink(missing_ok=True)
            os.replace(self._rec_partial, self.rec_path)
            os.replace(self._idx_partial, self.idx_path)
            sync_folder(self.rec_path.parent)
        except OSError as error:
            self.abort()
            raise UserError(f"cannot finish {self.rec_path}: {error.strerror}") from None
        self._rec = self._idx = None

    def abort(self) -> None:
        """Remove the unfinished files. A finished pair of an earlier writer is left alone."""
        for file, path in ((self._rec, self._rec_partial), (self._idx, self._idx_partial)):
            if file is not None:
                try:
                    file.close()
                except OSError:
                    pass  # a full disk fails again when the buffer is flushed
                path.unlink(missing_ok=True)
        self._rec = self._idx = None

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _part_head(flag: int, length: int) -> bytes:
    return PART.pack(MAGIC, flag << 29 | length)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries (new names, renames) on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
