"""Rows of sources as the tests look at them."""

from __future__ import annotations

import shutil
from pathlib import Path

from rwkv_clip.data.sources import Source, open_source
from rwkv_clip.data.sources.base import RowError


def indexed(path: Path, **options) -> Source:
    source = open_source(path, **options)
    folder = path.parent / "index"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    source.build_index(folder)
    source.copy_rows(folder)
    return source


def read_all(source: Source) -> list:
    """Captions of each row, or the fault's kind."""
    result = []
    for i in range(len(source)):
        try:
            result.append(source.row(i).captions)
        except RowError as error:
            result.append(error.kind)
    return result


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
