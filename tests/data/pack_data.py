"""Sources to pack, and ways to pack them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from PIL import Image

from rwkv_clip.data.packing import pack
from rwkv_clip.data.sources import open_source

ROOT = Path(__file__).parents[2]


def make_table(folder: Path, count: int, fixtures: Path | None = None) -> Path:
    """`count` rows with a picture and three captions each; the pictures differ by their gray value."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["image\traw\tsynthetic\tgenerated"]
    for i in range(count):
        Image.new("L", (24, 24), i % 256).save(folder / f"{i:05}.jpg")
        lines.append(f"{i:05}.jpg\traw {i}\tsynthetic {i}\tgenerated {i}")
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
    return folder / "pairs.tsv"


def make_parquet(folder: Path, counts: list[int]) -> list[Path]:
    """Files of so many rows with a picture and a caption each."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder.mkdir()
    files = []
    for number, count in enumerate(counts):
        pictures, captions = [], [f"caption {i} of file {number}" for i in range(count)]
        for i in range(count):
            out = io.BytesIO()
            Image.new("RGB", (24, 24), (number, i % 256, 9)).save(out, "JPEG")
            pictures.append(out.getvalue())
        files.append(folder / f"{number}.parquet")
        parquet.write_table(pyarrow.table({"image": pictures, "caption": captions}), files[-1])
    return files


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def pack_command(table: Path, out: Path, shard_size: int) -> list[str]:
    """The command line in a process of its own, with two workers."""
    options = ["--shard-size", str(shard_size), "--workers", "2"]
    return [sys.executable, "-m", "rwkv_clip.cli", "pack", str(table), str(out), *options]


def pack_here(source: Path, out: Path, **options) -> dict:
    """Pack in this process."""
    return pack(open_source(source), out, num_workers=0, **options)
