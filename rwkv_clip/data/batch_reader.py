"""Read the records of a whole batch at once, without copying the images."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .dataset import Dataset
from .record_format import LENGTH_MASK, MAGIC, PART, START


class EncodedBatch(NamedTuple):
    """Records as the data set holds them."""

    labels: np.ndarray  # float32 [n, label_width]
    payloads: list[memoryview | bytes]  # encoded images; read-only views of the mapped files where possible


class BatchReader:
    """Reads batches of a data set by global id.

    Headers and labels of records in one part are gathered by a few array operations for the whole batch, and images
    are handed on as views. Python's share is under 2 µs a record, because the training thread pays for it. Everything
    else (records in several parts, faults) takes the data set's own path and its error messages.
    """

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        self._starts = np.concatenate(([0], np.cumsum(dataset.shard_sizes)))

    def read(self, ids: np.ndarray) -> EncodedBatch:
        """Records of global `ids` int64 [n], in that order.

        Raises:
            UserError: a record cannot be read, or its label is not as wide as the data set's.
        """
        width = self._dataset.label_width
        labels = np.empty((len(ids), width), np.float32)
        payloads: list[memoryview | bytes] = [b""] * len(ids)
        shards = np.searchsorted(self._starts, ids, side="right") - 1
        for shard in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == shard)
            # Through the data set, which maps the file and counts its open maps.
            self._read_one(int(ids[rows[0]]), int(rows[0]), labels, payloads)
            rows = rows[1:]
            if len(rows):
                self._read_shard(shard, ids, rows, labels, payloads)
        return EncodedBatch(labels, payloads)

    def _read_shard(self, shard: int, ids: np.ndarray, rows: np.ndarray, labels: np.ndarray, payloads: list) -> None:
        file, width = self._dataset.files[shard], self._dataset.label_width
        view = file.view()
        words = np.frombuffer(view, "<u4", file.size_bytes // 4)
        offsets = file.offsets[ids[rows] - self._starts[shard]]
        label_starts = offsets + START.size
        whole = (offsets >= 0) & (offsets % 4 == 0) & (label_starts + 4 * width <= file.size_bytes)
        first = np.where(whole, offsets, 0) >> 2
        packed = words[first + 1].astype(np.int64)
        payload_starts = label_starts + 4 * width
        ends = offsets + PART.size + packed
        # A packed word below 2^29 is flag 0, the whole record in one part.
        whole &= (words[first] == MAGIC) & (packed <= LENGTH_MASK) & (words[first + 2] == width)
        whole &= (payload_starts <= ends) & (ends <= file.size_bytes)
        simple = rows[whole]
        # Every `width` neighbouring words of the file as a row: whole labels are copied, not number by number.
        runs = np.lib.stride_tricks.as_strided(words.view("<f4"), (len(words) - width + 1, width), (4, 4))
        labels[simple] = runs[label_starts[whole] >> 2]
        for row, start, end in zip(simple.tolist(), payload_starts[whole].tolist(), ends[whole].tolist(), strict=True):
            payloads[row] = view[start:end]
        for row in rows[~whole].tolist():
            self._read_one(int(ids[row]), row, labels, payloads)

    def _read_one(self, i: int, row: int, labels: np.ndarray, payloads: list) -> None:
        record = self._dataset.read(i)
        if len(record.label) != self._dataset.label_width:
            raise UserError(
                f"{self._dataset.describe(i)} has a label of {len(record.label)} numbers and the data set wants "
                f"{self._dataset.label_width}: leave such records out with `rwkv-clip inspect --repair OUT`, or pack "
                f"again"
            )
        labels[row] = record.label
        payloads[row] = record.payload
