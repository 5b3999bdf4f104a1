"""A folder of pictures with captions in .txt files, beside them or in parallel folders."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...errors import UserError
from .base import MAX_CAPTIONS, Arrays, Bytes, Row, RowError, Source, check_number_of_captions, read_image

IMAGE_SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".jp2", ".ppm", ".avif"),
}
SAMPLE_FILES = 1000


class FolderSource(Source):
    """Pictures below a folder, each with its captions in text files of the same stem.

    Two layouts, told apart by themselves:

    - beside: `a/b/0001.jpg` and `a/b/0001.txt`; each line of the text file is a caption, and the number of captions is
      the most that the first 1,000 text files hold (at most 8);
    - parallel: below the folder some subfolders hold text files and no pictures, and one or more hold pictures:
      `img/0001.jpg`, `captions/0001.txt`. Each text folder is one caption, named like the folder, its lines joined.
    """

    kind = "folder of pictures and .txt files"

    def __init__(self, path: Path):
        self.path = path

    def build_index(self, folder: Path) -> None:
        self.text_folders = self._find_text_folders()
        digest, starts = hashlib.sha256(), array("q", [0])
        names_path = folder / "names"
        with open(names_path, "wb") as names:
            for name in self._pictures():
                encoded = os.fsencode(name)
                names.write(encoded)
                digest.update(encoded + b"\0")
                starts.append(starts[-1] + len(encoded))
        if len(starts) == 1:
            raise UserError(f"{self.path} holds no picture ({', '.join(sorted(IMAGE_SUFFIXES))})")
        self._arrays = Arrays(folder)
        self._arrays.save(starts=np.frombuffer(starts, np.int64))
        self._names = Bytes(names_path)
        self._num_rows = len(starts) - 1
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
        name = self.where(i)
        if self.text_folders:
            inside = Path(name).with_suffix(".txt").relative_to(Path(name).parts[0])
            lines = [_lines(self.path / folder / inside) for folder in self.text_folders]
            captions = [None if text is None else " ".join(text) for text in lines]
            if all(text is None for text in lines):
                raise RowError("caption file missing", str(Path(self.text_folders[0]) / inside))
        else:
            path = (self.path / name).with_suffix(".txt")
            captions = _lines(path)
            if captions is None:
                raise RowError("caption file missing", path.name)
            captions = (captions + [None] * len(self.caption_names))[: len(self.caption_names)]
        return Row(read_image(self.path / name), captions)

    def _find_text_folders(self) -> list[str]:
        """Direct subfolders that hold .txt files and no picture, when others hold pictures; in name order."""
        subfolders = [entry.name for entry in _entries(self.path) if entry.is_dir()]
        holds = {name: self._holds(name) for name in subfolders}
        with_text = [name for name in subfolders if holds[name] == ".txt"]
        return with_text if any(found == "picture" for found in holds.values()) else []

    def _holds(self, subfolder: str) -> str | None:
        """What the first file of a kind that matters is; pictures win over text within a folder."""
        found = None
        for _, _, files in os.walk(self.path / subfolder, followlinks=True):
            for file in files:
                suffix = os.path.splitext(file)[1].lower()
                if suffix in IMAGE_SUFFIXES:
                    return "picture"
                if suffix == ".txt":
                    found = ".txt"
            if found:
                return found
        return found

    def _pictures(self) -> Iterator[str]:
        """Paths of all pictures relative to the folder, each folder's entries in name order."""
        stack = [""]
        while stack:
            below = stack.pop()
            folders = []
            for entry in _entries(self.path / below):
                name = os.path.join(below, entry.name)
                if entry.is_dir():
                    if not (below == "" and entry.name in self.text_folders):
                        folders.append(name)
                elif os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:
                    yield name
            stack += reversed(folders)

    def _names_of_lines(self) -> list[str]:
        most = 1
        for i in range(min(SAMPLE_FILES, self._num_rows)):
            lines = _lines((self.path / self.where(i)).with_suffix(".txt"))
            most = max(most, len(lines or ()))
        return [f"caption{i}" for i in range(min(most, MAX_CAPTIONS))]


def _entries(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from None


def _lines(path: Path) -> list[str] | None:
    """The lines of a text file that are not blank; None without such a file."""
    try:
        text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RowError("caption file cannot be read", f"{path}: {error.strerror}") from None
    return [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
