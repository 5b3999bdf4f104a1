"""Read many records of a data set in parallel and count what they hold; faulty records are listed, not raised."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .bad_records import decode_faults
from .checks import caption_lengths, token_fault, width_fault
from .dataset import Dataset
from .progress import Progress
from .recordio import Record
from .tokenizer import CONTEXT_LENGTH

_CHUNK = 64
# Longer sides count as this; percentiles of what people have are exact.
_MAX_SIDE = 1 << 14


class Fault(NamedTuple):
    """A record that training could not use."""

    id: int
    where: str
    reason: str


@dataclass
class Survey:
    """Counts over the records that were read; `+=` joins two.

    Attributes:
        num_read: records looked at, `faults` included.
        label_widths: how often each label width occurs.
        caption_lengths: int64 [captions, 78], how many captions have 0, 1, ... tokens between start and end.
        formats: how often each image format occurs.
        widths, heights: int64 [16385], how many images have that side in pixels (as stored, before EXIF rotation).
        payload_bytes: bytes of all encoded images.
        payload_hashes: uint64 pieces, one number per image, to find images that occur twice.
        faults: what training could not use, in the data set's order.
    """

    num_captions: int
    num_read: int = 0
    label_widths: Counter = field(default_factory=Counter)
    caption_lengths: np.ndarray = None
    formats: Counter = field(default_factory=Counter)
    widths: np.ndarray = field(default_factory=lambda: np.zeros(_MAX_SIDE + 1, np.int64))
    heights: np.ndarray = field(default_factory=lambda: np.zeros(_MAX_SIDE + 1, np.int64))
    payload_bytes: int = 0
    payload_hashes: list[np.ndarray] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self):
        if self.caption_lengths is None:
            self.caption_lengths = np.zeros((self.num_captions, CONTEXT_LENGTH + 1), np.int64)

    def __iadd__(self, other: Survey) -> Survey:
        self.num_read += other.num_read
        self.label_widths += other.label_widths
        self.caption_lengths += other.caption_lengths
        self.formats += other.formats
        self.widths += other.widths
        self.heights += other.heights
        self.payload_bytes += other.payload_bytes
        self.payload_hashes += other.payload_hashes
        self.faults += other.faults
        return self

    @property
    def num_repeated_images(self) -> int:
        """Records whose encoded image is, byte for byte, that of an earlier one among those read."""
        hashes = np.concatenate(self.payload_hashes) if self.payload_hashes else np.zeros(0, np.uint64)
        return len(hashes) - len(np.unique(hashes))


class Judged(NamedTuple):
    """A chunk of records, in order; `records[i]` is None where reading failed and `reasons[i]` says why."""

    ids: list[int]
    records: list[Record | None]
    reasons: list[str | None]


def judge(dataset: Dataset, ids: list[int], decode: bool) -> Judged:
    """Read records and say of each, in a few words, why training could not use it (None: it could).

    Args:
        decode: decode the images fully, as training does; otherwise images are not looked at.
    """
    records: list[Record | None] = []
    reasons: list[str | None] = []
    for i in ids:
        record = reason = None
        try:
            record = dataset.read(i)
            reason = width_fault(dataset, len(record.label)) or token_fault(record.label)
        except UserError as error:
            reason = str(error).split(" is not a readable record: ")[-1].split(". If ")[0]
        records.append(record)
        reasons.append(reason)
    if decode:
        sound = [i for i, reason in enumerate(reasons) if reason is None]
        faults = decode_faults([records[i].payload for i in sound], num_threads=1)
        for i, fault in zip(sound, faults, strict=True):
            if fault is not None:
                reasons[i] = f"image: {fault}"
    return Judged(ids, records, reasons)


def survey(dataset: Dataset, ids: np.ndarray, decode: bool, workers: int | None = None, log=None) -> Survey:
    """Look at the records of `ids` with `workers` threads (default: all cores).

    Memory is constant but for 8 bytes an image (to find repeated ones) and the list of faults.
    """
    total = Survey(dataset.num_captions)
    progress = Progress("verifying" if decode else "reading", len(ids), log=log)
    chunks = (ids[start : start + _CHUNK].tolist() for start in range(0, len(ids), _CHUNK))
    for part in in_order(lambda chunk: _count(dataset, judge(dataset, chunk, decode)), chunks, workers):
        total += part
        progress(part.num_read)
    return total


def in_order(work: Callable, items: Iterable, workers: int | None = None) -> Iterator:
    """`map(work, items)` by threads: results in order, and only a few items ahead of the consumer."""
    workers = workers or os.cpu_count() or 1
    pending: deque = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _count(dataset: Dataset, judged: Judged) -> Survey:
    part = Survey(dataset.num_captions, num_read=len(judged.ids))
    labels, hashes, sides = [], [], []
    for i, record, reason in zip(*judged, strict=True):
        if reason is not None:
            part.faults.append(Fault(i, dataset.describe(i), reason))
        if record is None:
            continue
        part.label_widths[len(record.label)] += 1
        part.payload_bytes += len(record.payload)
        hashes.append(hashlib.blake2b(record.payload, digest_size=8).digest())
        form, side = image_header(record.payload)
        part.formats[form] += 1
        if side is not None:
            sides.append(side)
        if len(record.label) == dataset.label_width and token_fault(record.label) is None:
            labels.append(record.label)
    if labels:
        lengths = caption_lengths(np.stack(labels).reshape(len(labels), -1, CONTEXT_LENGTH))
        for kind in range(dataset.num_captions):
            part.caption_lengths[kind] = np.bincount(lengths[:, kind], minlength=CONTEXT_LENGTH + 1)
    if sides:
        widths, heights = np.minimum(np.array(sides), _MAX_SIDE).T
        part.widths += np.bincount(widths, minlength=_MAX_SIDE + 1)
        part.heights += np.bincount(heights, minlength=_MAX_SIDE + 1)
    part.payload_hashes.append(np.frombuffer(b"".join(hashes), np.uint64))
    return part


def image_header(payload) -> tuple[str, tuple[int, int] | None]:
    """(format, (width, height)) that an encoded image's header states; ("unreadable", None) if it states none."""
    from nvidia import nvimgcodec

    try:
        # The decoder wants bytes or an array; an array spares the copy.
        stream = nvimgcodec.CodeStream(np.frombuffer(payload, np.uint8))
        return stream.codec_name, (stream.width, stream.height)
    except Exception:  # the library raises its own kinds
        return "unreadable", None


def percentile(histogram: np.ndarray, share: float) -> int:
    """The value below which `share` of a histogram's counts lie (0 for an empty one)."""
    total = histogram.sum()
    return int(np.searchsorted(np.cumsum(histogram), share * total)) if total else 0
