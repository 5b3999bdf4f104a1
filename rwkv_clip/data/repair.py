"""Write a clean copy of a data set: every record that training can use, and no other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import UserError, os_errors_in_words
from .dataset import MANIFEST_NAME, Dataset, caption_names_of_width, find_records, read_manifest, write_manifest
from .exclusive import exclusive, refuse_unreplaceable
from .progress import Log, Progress
from .record_scan import scan_records
from .recordio import RecordFile, RecordWriter
from .survey import Judged, in_order, judge

_CHUNK = 64


def open_damaged(path: str | os.PathLike, log: Log | None = None) -> Dataset:
    """Open data whose manifest, index or labels `open_dataset` may refuse.

    A shard whose index is missing or does not fit is scanned for its records. Bare pairs take the label width that
    most records have.
    """
    path = Path(path)
    path = path.parent if path.name == MANIFEST_NAME else path
    names = None
    if path.is_dir() and (path / MANIFEST_NAME).exists():
        manifest = read_manifest(path)
        names = [str(name) for name in manifest["captions"]]
        rec_paths = [path / f"{shard['name']}.rec" for shard in manifest["shards"]]
    else:
        rec_paths = find_records(path)
    files, widths = [], []
    for rec_path in rec_paths:
        try:
            file = RecordFile(rec_path)
            widths.append(file.check().widths)
        except UserError as error:
            if not rec_path.exists() or rec_path.stat().st_size == 0:
                if log is not None:
                    log(f"left out: {error}")
                continue
            scan = scan_records(rec_path, log)
            if log is not None:
                log(
                    f"{rec_path.name} is scanned because its index cannot be used: {len(scan.index.offsets)} records "
                    f"found, {scan.lost_bytes} bytes lost ({error})"
                )
            file = RecordFile.with_index(rec_path, scan.index)
            widths.append(file.check().widths)
        files.append(file)
    if not files:
        raise UserError(f"{path} holds no record that can be saved")
    if names is None:
        values, counts = np.unique(np.concatenate(widths), return_counts=True)
        names = caption_names_of_width(int(values[counts.argmax()]))
        if names is None:
            raise UserError(
                f"most labels of {path} have {values[counts.argmax()]} numbers, which are no captions of 77 token ids: "
                f"pack the data again with `rwkv-clip pack`"
            )
    return Dataset(path, files, caption_names=names)


def repair(path: str | os.PathLike, out: str | os.PathLike, workers: int | None = None, log: Log | None = None) -> dict:
    """Copy the usable records of `path` into the new folder `out`, shard by shard, keys and order kept.

    Records that are left out are listed in `out/left_out.jsonl` with file, key and reason. `out` appears when it is
    complete.

    Returns:
        {"records": kept, "left_out": number, "shards": number}.

    Raises:
        UserError: `out` holds files, the disk refuses a write, or no record is usable.
    """
    out = Path(os.path.realpath(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: give another one for the clean copy")
    refuse_unreplaceable(out)
    dataset = open_damaged(path, log)
    with _new_folder(out) as folder:
        counts = _copy_shards(dataset, path, folder, workers, log)
    if not counts["shards"]:
        raise UserError(f"no record of {path} is usable: {out / 'left_out.jsonl'} says why, record by record")
    return counts


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name `out` when the block ends well, and is removed when it does not."""
    partial = out.with_name(f"{out.name}.partial")
    if (partial / "recipe.json").exists():
        raise UserError(f"{partial} is an unfinished packing: give another folder for the clean copy")
    with os_errors_in_words(partial), exclusive(partial, f"another process is writing {partial}"):
        try:
            folder = partial / "data"
            if folder.exists():  # that of a process that was killed
                shutil.rmtree(folder)
            folder.mkdir()
            yield folder
            if out.exists():
                out.rmdir()
            folder.rename(out)
        finally:
            shutil.rmtree(partial)


def _copy_shards(
    dataset: Dataset, path: str | os.PathLike, out: Path, workers: int | None, log: Log | None
) -> dict[str, int]:
    progress = Progress("copying", len(dataset), log=log)
    shard_names: list[str] = []
    kept = left_out = 0
    with open(out / "left_out.jsonl", "w", encoding="utf-8", errors="surrogateescape") as listing:
        for shard, file in enumerate(dataset.files):
            with RecordWriter(out / file.rec_path.stem) as writer:
                for judged in in_order(lambda ids: judge(dataset, ids, decode=True), _chunks(dataset, shard), workers):
                    left_out += _copy(dataset, judged, writer, listing)
                    progress(len(judged.ids))
                if writer.num_records == 0:
                    writer.abort()
                    continue
            kept += writer.num_records
            shard_names.append(file.rec_path.stem)
            file.release()
    if shard_names:
        source = {"repaired_from": str(Path(path).resolve()), "records_left_out": left_out}
        write_manifest(out, shard_names, dataset.caption_names, source)
    return {"records": kept, "left_out": left_out, "shards": len(shard_names)}


def _chunks(dataset: Dataset, shard: int) -> Iterator[list[int]]:
    first = sum(dataset.shard_sizes[:shard])
    last = first + dataset.shard_sizes[shard]
    for start in range(first, last, _CHUNK):
        yield list(range(start, min(start + _CHUNK, last)))


def _copy(dataset: Dataset, judged: Judged, writer: RecordWriter, listing) -> int:
    """Write the sound records, list the others; returns how many were left out."""
    left_out = 0
    for i, record, reason in zip(*judged, strict=True):
        shard, position = dataset.locate(i)
        file = dataset.files[shard]
        if reason is None:
            writer.write(file.key_name(position), record.label, record.payload, record_id=file.header(position)[2])
        else:
            left_out += 1
            line = {"file": file.rec_path.name, "key": file.key_name(position), "reason": reason}
            listing.write(json.dumps(line, ensure_ascii=False) + "\n")
    return left_out
