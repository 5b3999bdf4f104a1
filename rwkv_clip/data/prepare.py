"""`rwkv-clip prepare NAME OUT`: build a ready data set, in the layout that `prepared` describes, or fetch YFCC15M."""

from __future__ import annotations

import argparse
import importlib
import shlex
import time
from pathlib import Path

from ..errors import UserError
from . import prepared, yfcc15m
from .arguments import path

# Each module offers DEFAULT_SIZE, recipe(size) -> dict and make(folder, size) -> statistics.
DATA_SETS = {
    "pictograms": ("rwkv_clip.data.pictograms.build", "emoji drawings of seven artists (needs npm and the network)"),
    "shapes": ("rwkv_clip.data.shapes", "rendered shapes with held-out combinations (needs neither)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (_, summary) in DATA_SETS.items():
        subparser = names.add_parser(name, help=summary, description=summary)
        subparser.add_argument("out", type=path, metavar="OUT", help="folder to make")
        subparser.add_argument("--size", type=int, help="longer side of the pictures in pixels")
        subparser.set_defaults(prepare=_build)
    subparser = names.add_parser("yfcc15m", help=yfcc15m.SUMMARY, description=yfcc15m.SUMMARY)
    yfcc15m.add_arguments(subparser)
    subparser.set_defaults(prepare=yfcc15m.run)


def run(args: argparse.Namespace) -> int:
    return args.prepare(args)


def _build(args: argparse.Namespace) -> int:
    module = importlib.import_module(DATA_SETS[args.name][0])
    size = module.DEFAULT_SIZE if args.size is None else args.size
    if not 16 <= size <= 1024:
        raise UserError(f"--size is {size}: give 16 to 1024 pixels")
    start = time.monotonic()
    out = args.out.absolute()
    stats = prepared.build(out, module.recipe(size), lambda folder: module.make(folder, size))
    if stats is None:
        print(f"{out} is ready already; nothing to do")
        _say_next(out)
        return 0
    print(f"{stats['train']:,} training pairs in {out} ({time.monotonic() - start:.0f} s)")
    for name, count in stats["retrieval"].items():
        print(f"  retrieval {name}: {count:,} pictures")
    for name, sizes in stats["zero_shot"].items():
        print(f"  zero-shot {name}: {sizes['num_images']:,} pictures, {sizes['num_classes']} classes")
    _say_next(out)
    return 0


def _say_next(out: Path) -> None:
    table, packed = (shlex.quote(str(path)) for path in (out / "train.tsv", out.with_name(f"{out.name}-packed")))
    print(f"next: rwkv-clip pack {table} {packed}")
