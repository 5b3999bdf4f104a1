"""Bring the records of coming batches into memory before the training thread asks for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE

import numpy as np

from .dataset import Dataset

# Threads that mostly wait for the disk; more hide more latency of network file systems.
_NUM_THREADS = 8


class ReadAhead:
    """Touches the pages of records in threads of its own.

    The data set is mapped, so reading a record that is not in memory yet stops the reading thread for as long as the
    disk takes. Here one numpy call per thread and batch touches every page of its records, without holding the
    interpreter lock. Records that are in memory already cost next to nothing.
    """

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        self._starts = np.concatenate(([0], np.cumsum(dataset.shard_sizes)))
        self._sorted_offsets: dict[int, np.ndarray] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="read-ahead")

    def request(self, ids: np.ndarray) -> None:
        """Have the records of global `ids` int64 [n] read soon; returns at once."""
        ids = np.sort(ids)
        for part in np.array_split(ids, min(_NUM_THREADS, len(ids))):
            self._threads.submit(self._touch, part)

    def close(self) -> None:
        """Drop what is waiting, and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _touch(self, ids: np.ndarray) -> None:
        shards = np.searchsorted(self._starts, ids, side="right") - 1
        for shard in np.unique(shards).tolist():
            here = ids[shards == shard]
            # Through the data set, which maps the file and counts its open maps.
            self._dataset.read(int(here[0]))
            file = self._dataset.files[shard]
            starts = file.offsets[here - self._starts[shard]]
            starts = starts[(starts >= 0) & (starts < file.size_bytes)]
            pages = _aranges(starts // PAGESIZE, (self._ends(shard, starts) - 1) // PAGESIZE + 1) * PAGESIZE
            # `take` lets go of the interpreter lock while it waits for the disk.
            np.frombuffer(file.view(), np.uint8).take(pages)

    def _ends(self, shard: int, starts: np.ndarray) -> np.ndarray:
        """Where the records that begin at `starts` end at the latest: the next record's start, or the file's end."""
        file = self._dataset.files[shard]
        offsets = self._sorted_offsets.get(shard)
        if offsets is None:
            offsets = file.offsets if (np.diff(file.offsets) > 0).all() else np.sort(file.offsets)
            self._sorted_offsets[shard] = offsets
        following = np.searchsorted(offsets, starts, side="right")
        ends = np.full(len(starts), file.size_bytes)
        listed = following < len(offsets)
        ends[listed] = np.minimum(offsets[following[listed]], file.size_bytes)
        return ends


def _aranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The integers first[i] ... last[i] - 1 of every i, one after another."""
    counts = last - first
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
