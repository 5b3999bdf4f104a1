"""`rwkv-clip prepare yfcc15m OUT`: the data set of the published model, from its hub to packed shards.

    OUT/download/data/train-00001-of-01507.parquet ...    as published: pictures, and one caption each as token ids
    OUT/packed/                                           shards for training

Published are 1,507 files of about 746 MB, 10,000 rows each (the last one fewer), with the columns `images` (a struct
with the file's bytes) and `texts` (77 token ids as float32: the generated description). The raw and the synthetic
captions are one array [15061515, 154] of token ids (raw in columns 0-76, synthetic in 77-153) that its authors offer
elsewhere; with `--tokens` its row i joins row i of the files in the order of their names.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from ..errors import UserError
from . import hub
from .arguments import path
from .dataset import MANIFEST_NAME
from .exclusive import exclusive
from .packing import pack
from .sources import TokenColumns, open_source
from .sources.tokens import map_array

REPOSITORY = "Kaichengalex/YFCC15M"
SUMMARY = "the published YFCC15M from the Hugging Face hub (about 1.1 TB; three times that while it is packed)"
IMAGES, TEXTS = "images", "texts"
TOKEN_COLUMNS = {"raw": (0, 76), "synthetic": (77, 153)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=path, metavar="OUT", help="folder to make; the same command goes on in it")
    parser.add_argument(
        "--tokens",
        type=path,
        metavar="FILE.npy",
        help="token ids of the raw (columns 0-76) and synthetic (77-153) captions, a row per picture; without it only "
        "the generated captions are packed",
    )
    parser.add_argument("--connections", type=int, default=8, help="files fetched side by side (%(default)s)")
    parser.add_argument("--download-only", action="store_true", help="print the command that packs, and stop")
    parser.add_argument("--workers", type=int, metavar="N", help="packing processes (default: one a core)")


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it stopped", file=sys.stderr, flush=True)
        return 130


def _run(args: argparse.Namespace) -> int:
    if not 1 <= args.connections <= 256:
        raise UserError(f"--connections is {args.connections}: give 1 to 256")
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers is {args.workers}: give 1 or more processes")
    tokens = token_columns(args.tokens)
    _check_parquet()
    out = args.out.absolute()
    download, packed = out / "download", out / "packed"
    # A second one would take the first one's unfinished files away.
    with exclusive(out, f"another `prepare` is at work in {out}"):
        listing = hub.list_files(REPOSITORY, ".parquet")
        to_pack = not args.download_only and not (packed / MANIFEST_NAME).exists()
        say_size(listing, out, download, to_pack)
        hub.download(listing, download, args.connections, _say)
        folders = {(download / file.path).parent for file in listing.files}
        if len(folders) > 1:
            raise UserError(f"{REPOSITORY} is not laid out as it was: parquet files in {len(folders)} folders")
        source = folders.pop()
        print(
            f"{len(listing.files):,} files, {_gigabytes(listing.size)}, all of the listed size in {source}", flush=True
        )
        if args.download_only:
            print(f"pack them with: {pack_command(source, packed, tokens)}")
            return 0
        names = [*(column.name for column in tokens), "generated"]
        pack(
            open_source(source, image_column=IMAGES, caption_columns=[TEXTS], tokens=tokens),
            packed,
            caption_names=names,
            num_workers=len(os.sched_getaffinity(0)) if args.workers is None else args.workers,
        )
    return 0


def token_columns(path: Path | None) -> list[TokenColumns]:
    """Where the raw and the synthetic captions stand in the array; none without it. Checked before hours of fetching.

    Raises:
        UserError: the file is not there or is not such an array.
    """
    if path is None:
        return []
    shape = map_array(path).shape
    if len(shape) != 2 or shape[1] != 154:
        raise UserError(f"--tokens {path} is {list(shape)}: [rows, 154] is needed, raw in 0-76 and synthetic in 77-153")
    return [TokenColumns(name, path.absolute(), first, last) for name, (first, last) in TOKEN_COLUMNS.items()]


def say_size(listing: hub.Listing, out: Path, download: Path, to_pack: bool) -> None:
    """Say how much is coming and how much room there is.

    Raises:
        UserError: the disk is too small.
    """
    missing = listing.missing(download)
    left = sum(file.size for file in missing)
    print(
        f"{REPOSITORY} at {listing.commit[:12]}: {len(listing.files):,} files, {_gigabytes(listing.size)}; "
        f"{_gigabytes(left)} in {len(missing):,} files to fetch"
    )
    # Packing copies the rows to where it can read them in any order, and writes the shards.
    needed = left + (2 * listing.size if to_pack else 0) - _used(out / "packed.partial")
    free = shutil.disk_usage(out).free
    packing = f", {_gigabytes(2 * listing.size)} of it for packing, half of which is given back" if to_pack else ""
    print(f"{_gigabytes(max(needed, 0))} of disk are needed{packing}; {_gigabytes(free)} are free in {out}", flush=True)
    if needed > free:
        way_out = ", or give --download-only and pack to another disk" if to_pack and left <= free else ""
        raise UserError(
            f"{out} has {_gigabytes(free)} free and {_gigabytes(needed)} are needed: name a folder on a larger disk"
            f"{way_out}"
        )


def pack_command(source: Path, packed: Path, tokens: list[TokenColumns]) -> str:
    """The `rwkv-clip pack` that this command would run."""
    words = ["rwkv-clip", "pack", source, packed, "--image-column", IMAGES, "--caption-columns", TEXTS]
    for column in tokens:
        words += ["--tokens", f"{column.name}={column.path}:{column.first}-{column.last}"]
    words += ["--caption-names", ",".join([*(column.name for column in tokens), "generated"])]
    return shlex.join(str(word) for word in words)


def _check_parquet() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the data set is parquet files, read with pyarrow ({error}): run `pip install pyarrow`"
        ) from None


def _used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _say(line: str) -> None:
    print(line, flush=True)
