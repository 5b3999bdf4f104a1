"""Start-up checks of a data set: the whole index, and a sample of records per shard.

A check of tens of millions of records takes minutes on cold disks, so a sound result is kept (`data_check.json` in the
run folder, or beside the data) and holds for as long as sizes and modification times stay the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..errors import UserError
from .dataset import Dataset
from .progress import Log, Progress
from .recordio import RecordFile
from .tokenizer import CONTEXT_LENGTH, END_TOKEN, START_TOKEN, VOCABULARY_SIZE

CACHE_NAME = "data_check.json"
# Encoded images in; per image None, or the reason why it cannot be decoded, out.
Decode = Callable[[Sequence[memoryview | bytes]], list[str | None]]
_DECODE_BATCH = 64
_KEPT_RESULTS = 16


@dataclass
class CheckReport:
    """What the start-up checks saw.

    Attributes:
        num_records: records of the whole data set.
        num_sampled: records whose tokens (and image, with a decoder) were read.
        empty_share: per caption kind, the share of sampled records whose caption is empty.
        notes: lines for the log.
        from_cache: an earlier check of the same files was trusted.
    """

    num_records: int
    num_sampled: int = 0
    empty_share: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    from_cache: bool = False


def check_dataset(
    dataset: Dataset,
    sample: int = 1000,
    decode: Decode | None = None,
    *,
    num_threads: int | None = None,
    cache_folder: str | os.PathLike | None = None,
    log: Log | None = None,
) -> CheckReport:
    """Check every index entry and label width, and tokens and decodability of `sample` records per shard.

    Args:
        dataset: what `open_dataset` gave.
        sample: records per shard, spread evenly over it.
        decode: judges encoded images, see `Decode`; None leaves images out.
        num_threads: default: the machine's cores, at most 16.
        cache_folder: where a sound result is kept and looked up; None: neither.
        log: takes progress lines when the check is long, and the notes.

    Raises:
        UserError: naming file and key of the first fault.
    """
    num_threads = num_threads or min(16, os.cpu_count() or 1)
    state = _state(dataset, sample)
    if cache_folder is not None:
        known = _read_cache(Path(cache_folder) / CACHE_NAME, dataset, state, decode is not None)
        if known is not None:
            return known
    report = CheckReport(len(dataset))
    progress = Progress("checking the index", len(dataset), log=log)
    # Many shards are spread over the threads, few shards are split between them.
    inner = 1 if len(dataset.files) >= num_threads else num_threads
    with ThreadPoolExecutor(num_threads // inner) as pool:
        for notes in pool.map(lambda file: _check_shard_index(dataset, file, inner, progress), dataset.files):
            report.notes += notes
    if sample > 0:
        _check_sample(dataset, sample, decode, report, log)
    if log is not None:
        for note in report.notes:
            log(note)
    if cache_folder is not None:
        _write_cache(Path(cache_folder) / CACHE_NAME, dataset, state, decode is not None, report)
    return report


def token_fault(label: np.ndarray) -> str | None:
    """Why a label float32 [captions x 77] does not hold token ids of captions, or None."""
    with np.errstate(invalid="ignore"):  # a broken label may hold anything
        outside = ~((label >= 0) & (label < VOCABULARY_SIZE) & (label == np.floor(label)))
    if outside.any():
        return f"its label holds {label[outside][0]:g}, which is no token id (0 to {VOCABULARY_SIZE - 1})"
    captions = label.reshape(-1, CONTEXT_LENGTH)
    for number, caption in enumerate(captions):
        if caption[0] != START_TOKEN:
            return f"caption {number} starts with token {caption[0]:g}, not the start token {START_TOKEN}"
        if not (caption == END_TOKEN).any():
            return f"caption {number} has no end token {END_TOKEN}"
    return None


def caption_lengths(captions: np.ndarray) -> np.ndarray:
    """Tokens between start and end token, int64 [...], of captions [..., 77]; 0 is an empty caption."""
    # The end token is the last id that is not 0; an earlier one is the literal `<end_of_text>` of a caption.
    from_the_end = (captions[..., ::-1] != 0).argmax(-1)
    return np.maximum(captions.shape[-1] - from_the_end - 2, 0)


def width_fault(dataset: Dataset, width: int) -> str | None:
    """Why a label of `width` numbers does not fit the data set, or None."""
    if width == dataset.label_width:
        return None
    return (
        f"has a label of {width} numbers and the data set wants {dataset.label_width} "
        f"({dataset.num_captions} captions x {CONTEXT_LENGTH} tokens)"
    )


def _check_shard_index(dataset: Dataset, file: RecordFile, num_threads: int, progress: Progress) -> list[str]:
    index = file.check(num_threads, progress)
    wrong = np.flatnonzero(index.widths != dataset.label_width)
    if len(wrong):
        i = int(wrong[0])
        raise UserError(
            f"{file.rec_path} key {file.key_name(i)} {width_fault(dataset, int(index.widths[i]))}; {len(wrong)} of "
            f"{len(file)} records differ: `rwkv-clip inspect {dataset.path} --repair OUT` leaves them out"
        )
    return index.notes


def _check_sample(dataset: Dataset, sample: int, decode: Decode | None, report: CheckReport, log: Log | None) -> None:
    empty = np.zeros(dataset.num_captions, np.int64)
    progress = Progress("checking a sample", sum(min(sample, len(file)) for file in dataset.files), log=log)
    for file in dataset.files:
        positions = np.linspace(0, len(file) - 1, min(sample, len(file))).astype(np.int64).tolist()
        for start in range(0, len(positions), _DECODE_BATCH):
            batch = positions[start : start + _DECODE_BATCH]
            records = [file.read(i) for i in batch]
            for i, record in zip(batch, records, strict=True):
                fault = token_fault(record.label)
                if fault is not None:
                    raise UserError(f"{file.rec_path} key {file.key_name(i)}: {fault}; pack the data again")
                empty += caption_lengths(record.label.reshape(-1, CONTEXT_LENGTH)) == 0
            reasons = [None] * len(batch) if decode is None else decode([record.payload for record in records])
            for i, reason in zip(batch, reasons, strict=True):
                if reason is not None:
                    raise UserError(
                        f"{file.rec_path} key {file.key_name(i)}: its image cannot be decoded ({reason}); "
                        f"`rwkv-clip inspect {dataset.path} --verify` lists all such records, `--repair OUT` leaves "
                        f"them out"
                    )
            progress(len(batch))
        file.release()
        report.num_sampled += len(positions)
    report.empty_share = (empty / max(1, report.num_sampled)).tolist()
    for name, share in zip(dataset.caption_names, report.empty_share, strict=True):
        if share > 0.01:
            report.notes.append(f"caption {name!r} is empty in {share:.1%} of {report.num_sampled} sampled records")


def _state(dataset: Dataset, sample: int) -> dict:
    """What a kept result holds for: the files as they are now, and how much was checked."""
    times = [
        [path.name, path.stat().st_size, path.stat().st_mtime_ns]
        for file in dataset.files
        for path in (file.rec_path, file.idx_path)
    ]
    return {"version": 2, "sample": sample, "files": times}


def _read_cache(path: Path, dataset: Dataset, state: dict, decoded: bool) -> CheckReport | None:
    kept = _kept_results(path).get(dataset.fingerprint)
    try:
        if kept is None or kept["state"] != state or (decoded and not kept["decoded"]):
            return None
        return CheckReport(**kept["report"] | {"from_cache": True})
    except (TypeError, KeyError):
        return None


def _kept_results(path: Path) -> dict:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept if isinstance(kept, dict) else {}
    except (OSError, ValueError):
        return {}


def _write_cache(path: Path, dataset: Dataset, state: dict, decoded: bool, report: CheckReport) -> None:
    """Keep a result among those of other data sets in the same folder, the latest last."""
    kept = _kept_results(path)
    kept.pop(dataset.fingerprint, None)
    kept = dict(list(kept.items())[1 - _KEPT_RESULTS :])
    kept[dataset.fingerprint] = {"state": state, "decoded": decoded, "report": asdict(report)}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(kept), encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        # Read-only data: the check is run again next time.
        partial.unlink(missing_ok=True)
