"""A folder of pictures with captions in .txt files, beside them or in parallel folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...errors import UserError
from .base import MAX_CAPTIONS, Arrays, Bytes, Row, RowError, Source, check_number_of_captions, read_file

IMAGE_SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".jp2", ".ppm", ".avif"),
}
TEXT_SUFFIXES = (".txt", ".TXT")
# Sources of other kinds, which are named when there are no pictures.
OTHER_SUFFIXES = {".parquet", ".tar", ".tsv", ".csv", ".jsonl", ".ndjson"}
SAMPLE_FILES = 1000


class FolderSource(Source):
    """Pictures below a folder, each with its captions in text files of the same stem.

    Two layouts, told apart by themselves:

    - beside: `a/b/0001.jpg` and `a/b/0001.txt`; each line of the text file is a caption, and the number of captions is
      the most that the first 1,000 text files hold (at most 8);
    - parallel: below the folder some subfolders hold text files and no pictures, and one or more hold pictures:
      `img/0001.jpg`, `captions/0001.txt`. Each text folder is one caption, named like the folder, its lines joined.
      If any of the first 1,000 pictures has its text beside it, it is the other layout.
    """

    kind = "folder of pictures and .txt files"

    def __init__(self, path: Path):
        self.path = path

    def build_index(self, folder: Path) -> None:
        digest, starts = hashlib.sha256(), array("q", [0])
        with_pictures, with_texts = set(), set()  # direct subfolders; "" is the folder itself
        other = None
        names_path = folder / "names"
        with open(names_path, "wb") as names:
            for name, entry in self._files():
                encoded, suffix = os.fsencode(name), os.path.splitext(name)[1]
                top = name.partition(os.sep)[0] if os.sep in name else ""
                if suffix.lower() in IMAGE_SUFFIXES:
                    with_pictures.add(top)
                    names.write(encoded)
                    digest.update(encoded + b"\0")
                    starts.append(starts[-1] + len(encoded))
                elif suffix in TEXT_SUFFIXES:
                    with_texts.add(top)
                    digest.update(encoded + _state(entry).encode() + b"\0")
                elif other is None and suffix.lower() in OTHER_SUFFIXES:
                    other = name
        if len(starts) == 1:
            hint = "" if other is None else f"; it holds {other}: give {_to_give(self.path / other)}"
            raise UserError(f"{self.path} holds no picture ({', '.join(sorted(IMAGE_SUFFIXES))}){hint}")
        self._arrays = Arrays(folder)
        self._arrays.save(starts=np.frombuffer(starts, np.int64))
        self._names = Bytes(names_path)
        self._num_rows = len(starts) - 1
        self.text_folders = self._parallel(with_pictures, with_texts)
        self.caption_names = self.text_folders or self._names_of_lines()
        check_number_of_captions(len(self.caption_names), str(self.path))
        self.fingerprint = f"{digest.hexdigest()}/{self.caption_names}"

    def __len__(self) -> int:
        return self._num_rows

    def where(self, i: int) -> str:
        starts = self._arrays["starts"]
        return os.fsdecode(self._names.read(int(starts[i]), int(starts[i + 1])))

    def key(self, i: int) -> str:
        return Path(self.where(i)).stem

    def row(self, i: int) -> Row:
        name = Path(self.where(i))
        if self.text_folders:
            inside = Path(*(name.parts[1:] or name.parts))
            lines = [_lines(self.path / folder / inside) for folder in self.text_folders]
            captions = [None if text is None else " ".join(text) for text in lines]
        else:
            lines = [_lines(self.path / name)]
            count = len(self.caption_names)
            captions = ((lines[0] or []) + [None] * count)[:count]
        missing = all(text is None for text in lines)
        why_none = f"there is no {name.with_suffix('.txt').name}" if missing else ""
        return Row(read_file(self.path / name), captions, why_none)

    def _files(self) -> Iterator[tuple[str, os.DirEntry]]:
        """All that is no folder, by its path relative to the folder; each folder's entries in name order."""
        stack = [""]
        while stack:
            below = stack.pop()
            folders = []
            for entry in _entries(self.path / below):
                name = os.path.join(below, entry.name)
                if _is_folder(entry):
                    folders.append(name)
                else:
                    yield name, entry
            stack += reversed(folders)

    def _parallel(self, with_pictures: set[str], with_texts: set[str]) -> list[str]:
        """The text folders of the parallel layout in name order; none in the other one."""
        text_folders = sorted(with_texts - with_pictures - {""})
        if not with_pictures - {""} or not text_folders:
            return []
        for i in range(min(SAMPLE_FILES, self._num_rows)):
            picture = self.path / self.where(i)
            if any(picture.with_suffix(suffix).exists() for suffix in TEXT_SUFFIXES):
                return []
        return text_folders

    def _names_of_lines(self) -> list[str]:
        most = 1
        for i in range(min(SAMPLE_FILES, self._num_rows)):
            with contextlib.suppress(RowError):  # the row says so when it is packed
                most = max(most, len(_lines(self.path / self.where(i)) or ()))
        return [f"caption{i}" for i in range(min(most, MAX_CAPTIONS))]


def _entries(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from None


def _is_folder(entry: os.DirEntry) -> bool:
    """Whether to go into an entry.

    Raises:
        UserError: it is a link to a folder that holds it, so that there would be no end.
    """
    try:
        if not entry.is_dir():
            return False
    except OSError:  # a link that leads to itself
        return False
    if entry.is_symlink():
        target, holder = os.path.realpath(entry.path), os.path.realpath(os.path.dirname(entry.path))
        if os.path.commonpath([target, holder]) == target:
            raise UserError(f"{entry.path} is a link to {target}, a folder that holds it: remove the link")
    return True


def _state(entry: os.DirEntry) -> str:
    """Changes when the file's content does, as far as can be told without reading it."""
    try:
        status = entry.stat()
    except OSError:  # a link that leads nowhere
        return ""
    return f" {status.st_size} {status.st_mtime_ns}"


def _to_give(file: Path) -> Path:
    """What to call the source that this file is, or is a part of."""
    return file.parent if file.suffix.lower() in (".parquet", ".tar") else file


def _lines(picture: Path) -> list[str] | None:
    """The lines of a text file that are not blank; None without such a file.

    Args:
        picture: the file's path, but for its suffix.
    """
    for suffix in TEXT_SUFFIXES:
        try:
            data = read_file(picture.with_suffix(suffix), "caption file")
        except RowError as error:
            if error.kind == "caption file missing":
                continue
            raise
        # Notepad and others call UTF-16 "Unicode" and put this mark before it.
        utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        text = data.decode("utf-16" if utf16 else "utf-8-sig", "replace")
        return [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return None
