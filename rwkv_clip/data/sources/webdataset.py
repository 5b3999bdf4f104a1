"""WebDataset tars: files that share a key are one row."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ..children import map_in_processes
from .base import (
    Arrays,
    Bytes,
    CaptionLists,
    Row,
    RowError,
    Source,
    choose_caption_columns,
)
from .folder import IMAGE_SUFFIXES

SAMPLE_ROWS = 1000
IMAGE, JSON = "image", "json"


class WebDatasetSource(Source):
    """One tar or a folder of tars. The key of a member is its name up to the first dot after the last slash.

    A row has a picture member (.jpg, .png, ...), and captions: its text members (`.txt` is the caption "txt",
    `.raw.txt` the caption "raw"), or without any the values of the `.json` member under usual caption names, each one
    caption or a list of some (see `CaptionLists`). With `caption_columns` each name is looked up among the text
    members, then in the `.json`.
    """

    kind = "WebDataset tars"

    def __init__(self, tars: list[Path], caption_columns: list[str] | None = None):
        self.tars = tars
        self.caption_columns = caption_columns
        self._files = [Bytes(tar) for tar in tars]

    def build_index(self, folder: Path) -> None:
        print(f"finding the rows of {len(self.tars)} tars", flush=True)
        parts = map_in_processes(_index_tar, self.tars)
        names: dict[str, int] = {}
        for _, _, _, _, kinds in parts:
            for kind in kinds:
                names.setdefault(kind, len(names))
        starts, kinds, places, tar_numbers, headers = [], [], [], [], []
        members = 0
        for number, (row_starts, header_places, member_kinds, member_places, own_names) in enumerate(parts):
            translate = np.array([names[name] for name in own_names], np.int16)
            starts.append(row_starts + members)
            headers.append(header_places)
            kinds.append(translate[member_kinds] if len(member_kinds) else np.zeros(0, np.int16))
            places.append(member_places)
            tar_numbers.append(np.full(len(row_starts), number, np.int32))
            members += len(member_kinds)
        self._num_rows = sum(len(part) for part in starts)
        if not self._num_rows:
            raise UserError(f"{self.tars[0].parent} holds no tar members that belong to a picture")
        self._kinds = list(names)
        self._arrays = Arrays(folder)
        self._arrays.save(
            starts=np.concatenate([*starts, [members]]).astype(np.int64),
            headers=np.concatenate(headers),
            kinds=np.concatenate(kinds),
            places=np.concatenate(places),
            tars=np.concatenate(tar_numbers),
        )
        self._understand()
        digest = hashlib.sha256()
        for array in (*starts, *places, *kinds):
            digest.update(np.ascontiguousarray(array).tobytes())
        listed = [(tar.name, tar.stat().st_size, tar.stat().st_mtime_ns) for tar in self.tars]
        self.fingerprint = f"{digest.hexdigest()}/{listed}/{self.caption_names}"

    def __len__(self) -> int:
        return self._num_rows

    def where(self, i: int) -> str:
        tar = int(self._arrays["tars"][i])
        return f"{self.tars[tar].name} {self._key(i)}"

    def row(self, i: int) -> Row:
        members = self._members(i)
        if IMAGE not in members:
            raise RowError("no picture", f"only {', '.join(members)}")
        captions: dict[str, Any] = {}
        for name in self.caption_columns:
            if name in members and name not in (IMAGE, JSON):
                captions[name] = self._read(i, members[name]).decode("utf-8", "replace")
        if JSON in members and not captions.keys() >= set(self.caption_columns):
            try:
                value = json.loads(self._read(i, members[JSON]))
            except (ValueError, RecursionError) as error:
                raise RowError("not JSON", str(error)[:80]) from None
            if isinstance(value, dict):
                captions = value | captions
        return Row(self._read(i, members[IMAGE]), self._lists.of(captions))

    def _understand(self) -> None:
        found: dict[str, None] = {}
        keys: dict[str, None] = {}
        rows = []
        for i in range(min(SAMPLE_ROWS, self._num_rows)):
            members = self._members(i)
            found.update(dict.fromkeys(members))
            if JSON in members:
                try:
                    value = json.loads(self._read(i, members[JSON]))
                except (ValueError, RecursionError, RowError):  # the row says so when it is packed
                    continue
                rows += [value] if isinstance(value, dict) else []
                keys.update(dict.fromkeys(value if isinstance(value, dict) else ()))
        texts = [name for name in found if name not in (IMAGE, JSON)]
        if self.caption_columns or not texts:
            what = f"{self.tars[0]}"
            self.caption_columns = choose_caption_columns([*texts, *keys], IMAGE, self.caption_columns, what)
        else:
            self.caption_columns = texts
        self._lists = CaptionLists(self.caption_columns, rows, str(self.tars[0]))
        self.caption_names = self._lists.names

    def _members(self, i: int) -> dict[str, tuple[int, int]]:
        """Kind -> (start, end) of each member of row `i`, the first of a kind."""
        start, stop = int(self._arrays["starts"][i]), int(self._arrays["starts"][i + 1])
        kinds, places = self._arrays["kinds"][start:stop], self._arrays["places"][start:stop]
        members: dict[str, tuple[int, int]] = {}
        for kind, (begin, end) in zip(kinds.tolist(), places.tolist(), strict=True):
            members.setdefault(self._kinds[kind], (begin, end))
        return members

    def _read(self, i: int, place: tuple[int, int]) -> bytes:
        return self._files[int(self._arrays["tars"][i])].read(*place)

    def key(self, i: int) -> str:
        return self._key(i).rpartition("/")[2]

    def _key(self, i: int) -> str:
        """The key with its folders, read from the tar's own header (long names take several blocks of it)."""
        with open(self.tars[int(self._arrays["tars"][i])], "rb") as file:
            file.seek(int(self._arrays["headers"][i]))
            with tarfile.open(fileobj=file, mode="r:") as tar:
                return _split(tar.next().name)[0]


def _split(name: str) -> tuple[str, str]:
    """ "a/b.c.txt" -> ("a/b", "c.txt")."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension.lower()


def _kind(extension: str) -> str | None:
    """What a member is by its extension: the picture, the JSON object, a caption's name; None if none of them."""
    last = extension.rpartition(".")[2]
    if f".{last}" in IMAGE_SUFFIXES:
        return IMAGE
    if last in ("txt", "text", "caption"):
        return extension.removesuffix(".txt")
    return JSON if extension == "json" else None


def _index_tar(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Rows of one tar: their first members, their first members' headers, and all members' kinds and places."""
    starts, headers, kinds, places = [], [], [], []
    names: dict[str, int] = {}
    last = None
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members = []  # they would fill the memory
                key, extension = _split(member.name)
                kind = _kind(extension) if member.isfile() else None
                if kind is None:
                    continue
                if key != last:
                    starts.append(len(kinds))
                    headers.append(member.offset)
                    last = key
                kinds.append(names.setdefault(kind, len(names)))
                places.append((member.offset_data, member.offset_data + member.size))
            # The module ends as quietly at a damaged header, or at the end of a cut file, as at the block of zeros that
            # ends an archive.
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"no member and no end of the archive at byte {tar.offset:,}")
    except (tarfile.TarError, OSError) as error:
        if not starts:
            raise UserError(
                f"{path} cannot be read as an uncompressed tar ({error}): copy or unpack it again"
            ) from None
        print(
            f"warning: {path} is cut or damaged ({error}): {len(starts):,} rows before that are used", file=sys.stderr
        )
    return (
        np.array(starts, np.int64),
        np.array(headers, np.int64),
        np.array(kinds, np.int16),
        np.array(places, np.int64).reshape(-1, 2),
        list(names),
    )
