"""Start-up checks of a data set: the whole index, and a sample of records per shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import UserError
from .dataset import CONTEXT_LENGTH, Dataset

START_TOKEN, END_TOKEN, VOCAB_SIZE = 49406, 49407, 49408
# Payloads in, per payload None or the reason why it cannot be decoded out.
Decode = Callable[[Sequence[memoryview | bytes]], list[str | None]]
_DECODE_BATCH = 64


@dataclass
class CheckReport:
    """What the start-up checks saw; `notes` are lines for the log."""

    num_records: int
    num_sampled: int = 0
    empty_captions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    notes: list[str] = field(default_factory=list)


def check_dataset(
    dataset: Dataset,
    sample: int = 1000,
    decode: Decode | None = None,
    num_threads: int = 4,
    rank: int = 0,
    ranks: int = 1,
) -> CheckReport:
    """Check every index entry and label width, and tokens and decodability of `sample` records per shard.

    Args:
        sample: records per shard, spread evenly over it.
        decode: judges encoded images, see `Decode`; None leaves images out.
        num_threads: threads for the index.
        rank, ranks: check shards rank, rank + ranks, ... only, so that ranks can share the work.

    Raises:
        UserError: naming file and key of the first fault.
    """
    report = CheckReport(len(dataset), empty_captions=np.zeros(dataset.num_captions, np.int64))
    for file in dataset.files[rank::ranks]:
        index = file.check(num_threads)
        report.notes += index.notes
        wrong = np.flatnonzero(index.widths != dataset.label_width)
        if len(wrong):
            i = int(wrong[0])
            raise UserError(
                f"{file.rec_path} key {file.key_name(i)} has a label of {index.widths[i]} numbers and the data set "
                f"wants {dataset.label_width} ({dataset.num_captions} captions x {CONTEXT_LENGTH}): {len(wrong)} of "
                f"{len(file)} records differ; leave them out with `rwkv-clip inspect --repair OUT`, or pack again"
            )
        count = min(sample, len(file))
        positions = np.linspace(0, len(file) - 1, count).astype(np.int64).tolist()
        report.num_sampled += count
        for start in range(0, count, _DECODE_BATCH):
            batch = positions[start : start + _DECODE_BATCH]
            records = [file.read(i) for i in batch]
            for i, record in zip(batch, records, strict=True):
                fault = token_fault(record.label)
                if fault:
                    raise UserError(f"{file.rec_path} key {file.key_name(i)}: {fault}; pack the data again")
                captions = record.label.reshape(-1, CONTEXT_LENGTH)
                report.empty_captions += captions[:, 1] == END_TOKEN
            if decode is None:
                continue
            reasons = decode([record.payload for record in records])
            for i, reason in zip(batch, reasons, strict=True):
                if reason is not None:
                    raise UserError(
                        f"{file.rec_path} key {file.key_name(i)}: its image cannot be decoded ({reason}); list all "
                        f"such records with `rwkv-clip inspect --verify`, leave them out with `--repair OUT`"
                    )
    return report


def token_fault(label: np.ndarray) -> str | None:
    """Why a label float32 [captions x 77] does not hold captions, or None."""
    if not ((label >= 0) & (label < VOCAB_SIZE) & (label == np.floor(label))).all():
        bad = label[~((label >= 0) & (label < VOCAB_SIZE) & (label == np.floor(label)))][0]
        return f"its label holds {bad:g}, which is no token id (0 to {VOCAB_SIZE - 1})"
    captions = label.reshape(-1, CONTEXT_LENGTH)
    for number, caption in enumerate(captions):
        if caption[0] != START_TOKEN:
            return f"caption {number} starts with token {caption[0]:g}, not the start token {START_TOKEN}"
        if END_TOKEN not in caption:
            return f"caption {number} has no end token {END_TOKEN}"
    return None
