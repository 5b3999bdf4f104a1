"""Packing one shard: the part of `pack` that runs in every process.

A shard is a fixed slice of the (shuffled) rows and is written by one process alone, so its bytes depend on the rows,
the seed and the shard size, never on the number of processes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import UserError
from .captions import encode_captions
from .images import BadImage, ImageChecker, Limits
from .record_format import MAX_CONTENT_BYTES
from .record_writer import RecordWriter
from .sources.base import RowError, Source


@dataclass(frozen=True)
class Job:
    """All that a process needs to pack any shard.

    Attributes:
        source: with its index built.
        order: file of int64 [rows]: which row is packed as which; None packs them in the source's order.
        folder: where finished shards go; reports: where their reports go.
        name: shards are called NAME-00000, NAME-00001, ...
        shard_size: rows per shard (records: less those that are skipped).
        limits, missing: see `images.Limits` and `captions.encode_captions`.
        strict: stop at the first row that cannot be packed.
    """

    source: Source
    order: Path | None
    folder: Path
    reports: Path
    name: str
    shard_size: int
    limits: Limits
    missing: str
    strict: bool

    @property
    def num_shards(self) -> int:
        return -(-len(self.source) // self.shard_size)

    def shard_name(self, shard: int) -> str:
        return f"{self.name}-{shard:05}"

    def is_finished(self, shard: int) -> bool:
        """Whether its report is there, and whole."""
        try:
            ShardReport.read(self.report_path(shard))
        except (FileNotFoundError, ValueError):
            return False
        return True

    def report_path(self, shard: int) -> Path:
        return self.reports / f"{shard:05}.json"

    def rows(self, shard: int) -> np.ndarray:
        """The shard's rows in the order of its records, int64."""
        start, stop = shard * self.shard_size, min((shard + 1) * self.shard_size, len(self.source))
        if self.order is None:
            return np.arange(start, stop)
        return np.array(np.load(self.order, mmap_mode="r")[start:stop])


@dataclass
class ShardReport:
    """What became of a shard's rows. A shard is finished when its whole report is on disk.

    Attributes:
        rows, packed: how many there were, how many records were written.
        notes: what was done to how many records ("image: CMYK", "caption filled in", ...).
        skipped: (row number, where it is, kind of fault, detail) of each row that was left out.
    """

    rows: int = 0
    packed: int = 0
    notes: Counter = field(default_factory=Counter)
    skipped: list[tuple[int, str, str, str]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        content = {"rows": self.rows, "packed": self.packed, "notes": dict(self.notes), "skipped": self.skipped}
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(content), encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> ShardReport:
        """Raises: FileNotFoundError, or ValueError when it was cut by a machine that went down."""
        content = json.loads(path.read_text(encoding="utf-8"))
        skipped = [tuple(entry) for entry in content["skipped"]]
        return cls(content["rows"], content["packed"], Counter(content["notes"]), skipped)


def pack_shard(job: Job, shard: int, checker: ImageChecker, tick: Callable[[], None] = lambda: None) -> ShardReport:
    """Pack one shard and write its report; `tick` is called after every row.

    The record of row i has the index's key 0, 1, 2, ... within its shard, and i as its header's id.

    Raises:
        UserError: the disk refuses a write, or under `strict` a row cannot be packed.
    """
    report = ShardReport()
    writer = RecordWriter(job.folder / job.shard_name(shard))
    try:
        for i in job.rows(shard).tolist():
            report.rows += 1
            try:
                label, payload, notes = _record(job, i, checker)
            except (RowError, BadImage) as error:
                where = job.source.where(i)
                if job.strict:
                    raise UserError(f"{where}: {error}: put it right, or pack without --strict to skip it") from None
                report.skipped.append((i, where, error.kind, error.detail))
            else:
                writer.write(report.packed, label, payload, record_id=i)
                report.packed += 1
                report.notes.update(notes)
            tick()
        if report.packed:
            writer.close()
    finally:
        writer.abort()  # does nothing after close()
    report.write(job.report_path(shard))
    return report


def _record(job: Job, i: int, checker: ImageChecker) -> tuple[np.ndarray, bytes, list[str]]:
    row = job.source.row(i)
    label, filled = encode_captions(row.captions, job.missing, row.why_none)
    payload, change = checker(row.image)
    if len(payload) + label.nbytes + 64 > MAX_CONTENT_BYTES:
        raise BadImage("file too large", f"{len(payload) >> 20} MB")
    notes = [f"picture encoded anew: {change}"] if change else []
    if filled:
        notes.append("captions filled in")
    return label, payload, notes
