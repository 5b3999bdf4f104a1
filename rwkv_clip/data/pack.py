"""`rwkv-clip pack SOURCE OUT`: check every pair and pack it into shuffled RecordIO shards (see `packing`).

SOURCE is a folder of pictures with .txt files, a .tsv, .csv or .jsonl table, .parquet files, WebDataset tars, or packed
.rec files (see `sources`); captions are text or token ids.
"""

from __future__ import annotations

import argparse
import os
import sys

from .arguments import path
from .captions import MISSING_RULES
from .images import Limits
from .packing import DEFAULT_SHARD_SIZE, pack
from .sources import KNOWN, TokenColumns, open_source
from .sources.base import MAX_CAPTIONS, Source

RULES = (
    "Rows that cannot be packed are skipped, counted, and listed with the reason in OUT/skipped.tsv: broken or missing "
    "pictures, pictures beyond the limits above, rows without any caption, rows of a table with another number of "
    "columns than the others. In a folder, each line of the .txt beside a picture is one caption, at most "
    f"{MAX_CAPTIONS} (further lines are left out); or each folder of .txt files, beside folders of pictures, is one. "
    "In JSON and parquet a caption column may hold a list of captions; a list of numbers is one caption's token ids."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    parser.description = "Check every image-caption pair and pack it into shuffled RecordIO shards."
    parser.epilog = RULES
    parser.add_argument("source", type=path, metavar="SOURCE", help=f"what to pack: {KNOWN}")
    parser.add_argument("out", type=path, metavar="OUT", help="folder to make")
    table = parser.add_argument_group("tables")
    table.add_argument("--images", type=path, metavar="DIR", help="what picture paths are relative to (the table)")
    table.add_argument("--image-column", metavar="NAME", help="column or key of the picture's path (image, file, ...)")
    table.add_argument(
        "--caption-columns",
        metavar="A,B,...",
        help="caption columns or keys in the records' order (raw, synthetic, generated, or those named caption...)",
    )
    captions = parser.add_argument_group("captions")
    captions.add_argument(
        "--tokens",
        action="append",
        default=[],
        metavar="NAME=FILE.npy:FIRST-LAST",
        help="a further caption: token ids in these columns of an array with one row per row of the source, such as "
        "raw=tokens.npy:0-76; may be given several times",
    )
    captions.add_argument("--join-by-key", action="store_true", help="a row's key is its row number in the arrays")
    captions.add_argument("--key-column", metavar="NAME", help="column or key of the row's key (else: the file's stem)")
    captions.add_argument("--caption-names", metavar="A,B,...", help="names to store instead of the source's own")
    captions.add_argument(
        "--missing-captions",
        choices=MISSING_RULES,
        default="fill",
        help="fill: take the row's first caption that is there; skip: leave the row out; keep: store an empty caption "
        "(default: %(default)s; a row without any caption is skipped unless kept)",
    )
    shards = parser.add_argument_group("shards")
    shards.add_argument("--shard-size", type=int, default=DEFAULT_SHARD_SIZE, help="rows a shard (%(default)s)")
    shards.add_argument("--name", default="data", help="shards are called NAME-00000, ... (%(default)s)")
    shards.add_argument("--seed", type=int, default=0, help="of the shuffle over all rows (%(default)s)")
    shards.add_argument("--no-shuffle", action="store_true", help="keep the source's order")
    shards.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core); one writes a shard")
    images = parser.add_argument_group("pictures")
    images.add_argument(
        "--min-side", type=int, default=limits.min_side, help="skip a shorter side below this (%(default)s px)"
    )
    images.add_argument(
        "--max-aspect", type=float, default=limits.max_aspect, help="skip sides that differ more often (%(default)s)"
    )
    images.add_argument(
        "--max-pixels", type=int, default=limits.max_pixels, help="skip pictures of more pixels (%(default)s)"
    )
    images.add_argument(
        "--max-side",
        type=int,
        default=limits.max_side,
        help="scale a longer side down to this and encode anew (%(default)s px; 0: never)",
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first row that cannot be packed")


def run(args: argparse.Namespace) -> int:
    limits = Limits(args.min_side, args.max_aspect, args.max_pixels, args.max_side)
    source = open_source(
        args.source,
        args.images,
        args.image_column,
        _split(args.caption_columns),
        args.key_column,
        [TokenColumns.parse(text) for text in args.tokens],
        args.join_by_key,
    )
    try:
        _pack(source, limits, args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


def _pack(source: Source, limits: Limits, args: argparse.Namespace) -> None:
    pack(
        source,
        args.out,
        limits=limits,
        missing=args.missing_captions,
        caption_names=_split(args.caption_names),
        shard_size=args.shard_size,
        name=args.name,
        seed=None if args.no_shuffle else args.seed,
        num_workers=len(os.sched_getaffinity(0)) if args.workers is None else args.workers,
        strict=args.strict,
    )


def _split(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]
