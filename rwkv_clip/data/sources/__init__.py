"""Where pairs come from. `open_source` tells the kinds apart by what is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import UserError, os_errors_in_words
from .base import Source
from .folder import FolderSource
from .parquet import ParquetSource
from .records import RecordsSource
from .tables import CsvSource, JsonlSource, TsvSource
from .tokens import TokenColumns, WithTokens
from .webdataset import WebDatasetSource

TABLES = {".tsv": TsvSource, ".csv": CsvSource, ".jsonl": JsonlSource, ".ndjson": JsonlSource}
KNOWN = (
    "a folder of pictures with .txt files, a .tsv, .csv or .jsonl table, .parquet files, WebDataset .tar files, or "
    "packed .rec files"
)


def open_source(
    path: Path,
    images: Path | None = None,
    image_column: str | None = None,
    caption_columns: Sequence[str] | None = None,
    key_column: str | None = None,
    tokens: Sequence[TokenColumns] = (),
    join_by_key: bool = False,
) -> Source:
    """The source at `path`; its index is not built yet.

    Args:
        path: see KNOWN.
        images, image_column, caption_columns, key_column: see `TableSource` and `ParquetSource`.
        tokens, join_by_key: see `WithTokens`.

    Raises:
        UserError: nothing is there, or nothing that can be packed, or an option does not go with it.
    """
    with os_errors_in_words(path):
        if images is not None and not images.is_dir():
            raise UserError(f"--images {images} is no folder")
        source = _open(path, images, image_column, list(caption_columns) if caption_columns else None, key_column)
    if tokens:
        return WithTokens(source, list(tokens), join_by_key)
    if join_by_key:
        raise UserError("--join-by-key joins --tokens to the rows, and there are none")
    return source


def _open(
    path: Path, images: Path | None, image_column: str | None, captions: list[str] | None, key_column: str | None
) -> Source:
    suffix = path.suffix.lower()
    if path.is_file() and suffix in TABLES:
        return TABLES[suffix](path, images, image_column, captions, key_column)
    if found := _files(path, ".parquet"):
        return ParquetSource(found, images, image_column, captions, key_column)
    given = {"--images": images, "--image-column": image_column, "--key-column": key_column}
    tars = _files(path, ".tar")
    if not tars:
        given["--caption-columns"] = captions
    for option, value in given.items():
        if value is not None:
            raise UserError(f"{option} is for tables with columns, and {path} is none")
    if tars:
        return WebDatasetSource(tars, captions)
    with_suffix = Path(f"{path}.rec")
    if (path.is_dir() and any(path.glob("*.rec"))) or suffix in (".rec", ".idx") or with_suffix.exists():
        return RecordsSource(path)
    if (path / "stats.json").exists() and (path / "train.tsv").exists():
        raise UserError(f"{path} is a prepared data set: pack {path / 'train.tsv'}")
    if path.is_dir():
        return FolderSource(path)
    if not path.exists():
        raise UserError(f"no source at {path}: give {KNOWN}")
    raise UserError(f"{path} is no source that can be packed: give {KNOWN}")


def _files(path: Path, suffix: str) -> list[Path]:
    """The file itself, or the folder's files, with this suffix."""
    if path.is_dir():
        return sorted(path.glob(f"*{suffix}"))
    return [path] if path.is_file() and path.suffix.lower() == suffix else []
