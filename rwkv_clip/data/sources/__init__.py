"""Where pairs come from. `open_source` tells the kinds apart by what is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import UserError
from .base import Source
from .folder import FolderSource
from .tables import CsvSource, JsonlSource, TsvSource

TABLES = {".tsv": TsvSource, ".csv": CsvSource, ".jsonl": JsonlSource, ".ndjson": JsonlSource}


def open_source(
    path: Path,
    images: Path | None = None,
    image_column: str | None = None,
    caption_columns: Sequence[str] | None = None,
) -> Source:
    """The source at `path`; its index is not built yet.

    Args:
        path: a folder of pictures with .txt files, or a .tsv, .csv or .jsonl table.
        images, image_column, caption_columns: see `TableSource`.

    Raises:
        UserError: nothing is there, or nothing that can be packed.
    """
    if not path.exists():
        raise UserError(f"no source at {path}: give a folder of pictures, or a {', '.join(TABLES)} table")
    if path.is_dir():
        if images or image_column or caption_columns:
            raise UserError(f"--images, --image-column and --caption-columns are for tables, and {path} is a folder")
        return FolderSource(path)
    make = TABLES.get(path.suffix.lower())
    if make is None:
        raise UserError(f"{path} is no source that can be packed: give a folder, or a {', '.join(TABLES)} table")
    if images is not None and not images.is_dir():
        raise UserError(f"--images {images} is no folder")
    return make(path, images, image_column, caption_columns)
