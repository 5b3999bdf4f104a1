"""A packed data set: a folder of RecordIO shards with `dataset.json`, a folder of bare pairs, or one bare pair.

`dataset.json`, written by the packer:

    {"format": "rwkv-clip dataset", "format_version": 1,
     "shards": [{"name": "train-00000", "records": 10000, "bytes": 312345678}, ...],
     "captions": ["raw", "synthetic", "generated"],       one name per caption of a record, in the label's order
     "context_length": 77, "tokenizer": "clip-bpe-49408",
     "packed": {...}}                                      how it was packed, for people
"""

from __future__ import annotations

import json
import os
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np

from ..errors import UserError
from . import tokenizer
from .record_check import refuse_short_index
from .record_writer import sync_folder
from .recordio import Record, RecordFile, pair_paths
from .tokenizer import CONTEXT_LENGTH

MANIFEST_NAME = "dataset.json"
FORMAT = "rwkv-clip dataset"
FORMAT_VERSION = 1
MAX_CAPTIONS = 8
# Captions of the published data, in the order of its labels.
PUBLISHED_CAPTIONS = ["raw", "synthetic", "generated"]
# Mapped files cost a descriptor each, and `ulimit -n` is often 1,024.
_MAX_MAPPED_FILES = 128


def open_dataset(path: str | os.PathLike) -> Dataset:
    """Open a data set folder, a folder of bare `X.rec`/`X.idx` pairs, or one pair by `X`, `X.rec` or `X.idx`.

    Raises:
        UserError: nothing usable is there, or a shard disagrees with the manifest or lacks its index.
    """
    path = Path(path)
    if path.name == MANIFEST_NAME and path.exists():
        path = path.parent
    if path.is_dir() and (path / MANIFEST_NAME).exists():
        return _open_with_manifest(path)
    files = [RecordFile(rec_path) for rec_path in find_records(path)]
    for file in files:
        # The manifest's counts say that for a packed folder; for bare pairs nothing else does.
        refuse_short_index(file)
    return Dataset(path, files)


def find_records(path: str | os.PathLike) -> list[Path]:
    """The `.rec` files of a folder in name order, or the one of a pair named by `X`, `X.rec` or `X.idx`."""
    path = Path(path)
    if path.is_dir():
        rec_paths = sorted(path.glob("*.rec"))
        interrupted = _interrupted([path] if path.name.endswith(".partial") else sorted(path.glob("*.rec.partial")))
        if interrupted:
            # Without a manifest nothing tells that finished shards are not the whole data set.
            raise UserError(f"{path} is not a whole data set{interrupted}")
        if not rec_paths:
            raise UserError(f"{path} holds no *.rec file and no {MANIFEST_NAME}: give the folder that `pack` wrote")
        return rec_paths
    rec_path, idx_path = pair_paths(path)
    if not rec_path.exists():
        near = sorted(entry.name for entry in path.parent.glob("*.rec"))[:4] if path.parent.is_dir() else []
        left = (path.with_name(path.name + ".partial"), rec_path.with_name(rec_path.name + ".partial"))
        hint = _interrupted(partial for partial in left if partial.exists())
        hint = hint or (f"; {path.parent} holds {', '.join(near)}" if near else "")
        raise UserError(f"no data at {path}: neither a folder nor a pair {rec_path.name} + {idx_path.name}{hint}")
    return [rec_path]


def _interrupted(left: Iterable[Path]) -> str:
    """Words for a message that name what an interrupted packer left, if it left anything."""
    first = next(iter(left), None)
    return f"; {first.name} was left by an interrupted packer: pack again" if first else ""


def read_manifest(folder: str | os.PathLike) -> dict:
    """`dataset.json` of a folder, its form checked."""
    path = Path(folder) / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): pack again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path} is not a manifest of `rwkv-clip pack` (its format is not {FORMAT!r})")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {manifest.get('format_version')!r} and this program reads {FORMAT_VERSION}: "
            f"use the version of rwkv-clip that packed it, or pack again"
        )
    shards, captions = manifest.get("shards"), manifest.get("captions")
    well_formed = isinstance(shards, list) and all(
        isinstance(shard, dict)
        and isinstance(shard.get("name"), str)
        and all(type(shard.get(field)) is int for field in ("records", "bytes"))
        for shard in shards
    )
    if not well_formed or not shards:
        raise UserError(f"{path} lists no shards as name, records and bytes: pack again")
    if not isinstance(captions, list) or not 1 <= len(captions) <= MAX_CAPTIONS:
        raise UserError(f"{path} names {captions!r} as captions: one to {MAX_CAPTIONS} names are needed, pack again")
    return manifest


def write_manifest(
    folder: str | os.PathLike, shard_names: list[str], captions: list[str], packed: dict | None = None
) -> None:
    """Write `dataset.json` for finished shards: complete on disk, or not there at all.

    Args:
        folder: where the shards are.
        shard_names: names without extension, in the data set's order.
        captions: one name per caption of a record, in the label's order.
        packed: how the data were packed (JSON values), kept for people.
    """
    folder = Path(folder)
    shards = []
    for name in shard_names:
        file = RecordFile(folder / f"{name}.rec")
        shards.append({"name": name, "records": len(file), "bytes": file.size_bytes})
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "shards": shards,
        "captions": list(captions),
        "context_length": CONTEXT_LENGTH,
        "tokenizer": tokenizer.NAME,
        "packed": packed or {},
    }
    partial = folder / f"{MANIFEST_NAME}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as out:
            json.dump(manifest, out, indent=1)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, folder / MANIFEST_NAME)
        sync_folder(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {folder / MANIFEST_NAME}: {error.strerror}") from None


def _open_with_manifest(folder: Path) -> Dataset:
    manifest = read_manifest(folder)
    files = []
    for shard in manifest["shards"]:
        rec_path = folder / f"{shard['name']}.rec"
        file = RecordFile(rec_path)
        if file.size_bytes != shard["bytes"]:
            raise UserError(
                f"{rec_path} has {file.size_bytes} bytes and {MANIFEST_NAME} says {shard['bytes']}: copy the shard "
                f"again, or pack again"
            )
        if len(file) != shard["records"]:
            raise UserError(
                f"{file.idx_path} lists {len(file)} records and {MANIFEST_NAME} says {shard['records']}: copy the "
                f"index again, or write it anew with `rwkv-clip inspect --rebuild-index {rec_path}`"
            )
        files.append(file)
    listed = {file.rec_path.name for file in files}
    extra = sorted(path.name for path in folder.glob("*.rec") if path.name not in listed)
    if extra:
        raise UserError(
            f"{folder} holds {extra[0]} ({len(extra)} such files), which {MANIFEST_NAME} does not list: move it away, "
            f"or remove {MANIFEST_NAME} to use every pair"
        )
    return Dataset(folder, files, manifest)


class Dataset:
    """Records of all shards under one numbering: global id = shard order, then index order, from 0.

    Attributes:
        path: what was opened.
        files: one RecordFile per shard.
        manifest: `dataset.json`, or None for bare pairs.
        shard_sizes: records per shard.
        label_width: floats in a record's label, as the manifest or the first record says.
        num_captions: captions per record (label_width / 77).
        caption_names: a name per caption; for bare pairs of three captions the published ones, else caption0, ...
        fingerprint: changes when names, sizes, counts or the places of records change.
    """

    def __init__(
        self, path: Path, files: list[RecordFile], manifest: dict | None = None, caption_names: list[str] | None = None
    ):
        self.path = path
        self.files = files
        self.manifest = manifest
        self.shard_sizes = [len(file) for file in files]
        self._starts = np.concatenate(([0], np.cumsum(self.shard_sizes))).tolist()
        self._mapped: OrderedDict[int, None] = OrderedDict()
        if manifest is not None:
            caption_names = [str(name) for name in manifest["captions"]]
        self.caption_names = caption_names or _first_caption_names(files[0])
        self.num_captions = len(self.caption_names)
        self.label_width = CONTEXT_LENGTH * self.num_captions
        self.fingerprint = self._fingerprint()

    def __len__(self) -> int:
        return self._starts[-1]

    def locate(self, i: int) -> tuple[int, int]:
        """Global id -> (shard number, position in the shard)."""
        if not 0 <= i < self._starts[-1]:
            raise IndexError(f"record {i} of {len(self)}")
        shard = bisect_right(self._starts, i) - 1
        return shard, i - self._starts[shard]

    def read(self, i: int) -> Record:
        """Record of global id `i`; label and payload may be read-only views of the mapped file."""
        shard, position = self.locate(i)
        file = self.files[shard]
        if file._view is None:
            self._note_mapped(shard)
        return file.read(position)

    def describe(self, i: int) -> str:
        """Where global id `i` is, for messages: `train-00003.rec key 17 (byte 80344)`."""
        shard, position = self.locate(i)
        return self.files[shard].describe(position)

    def check(self, sample: int = 1000, decode=None, **options):
        """Start-up checks of the whole index and of `sample` records per shard: see `checks.check_dataset`."""
        from .checks import check_dataset

        return check_dataset(self, sample=sample, decode=decode, **options)

    def _note_mapped(self, shard: int) -> None:
        self._mapped[shard] = None
        while len(self._mapped) > _MAX_MAPPED_FILES:
            try:
                oldest, _ = self._mapped.popitem(last=False)
            except KeyError:  # another thread emptied it
                return
            self.files[oldest].release()

    def _fingerprint(self) -> str:
        digest = sha256()
        for file in self.files:
            places = zlib.crc32(np.ascontiguousarray(file.offsets, "<i8"))
            digest.update(f"{file.rec_path.name}\0{file.size_bytes}\0{len(file)}\0{places}\n".encode())
        digest.update(f"{self.label_width}".encode())
        return digest.hexdigest()[:32]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_mapped": OrderedDict()}


def caption_names_of_width(width: int) -> list[str] | None:
    """Names for the captions of a bare pair whose labels are `width` numbers, or None if these are no captions."""
    count, rest = divmod(width, CONTEXT_LENGTH)
    if rest or not 1 <= count <= MAX_CAPTIONS:
        return None
    return list(PUBLISHED_CAPTIONS) if count == len(PUBLISHED_CAPTIONS) else [f"caption{i}" for i in range(count)]


def _first_caption_names(file: RecordFile) -> list[str]:
    width = len(file.read(0).label)
    file.release()
    names = caption_names_of_width(width)
    if names is None:
        raise UserError(
            f"{file.rec_path} key {file.key_name(0)} has a label of {width} numbers; wanted are 1 to {MAX_CAPTIONS} "
            f"captions x {CONTEXT_LENGTH} token ids: pack the data with `rwkv-clip pack`"
        )
    return names
