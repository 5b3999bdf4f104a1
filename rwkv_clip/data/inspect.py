"""`rwkv-clip inspect DATA`: what a packed data set holds, whether every record can be used, and repairs."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np

from ..errors import UserError, os_errors_in_words
from .arguments import path
from .dataset import Dataset, find_records, open_dataset
from .survey import Survey, percentile, survey

_SAMPLE = 20_000
_FAULTS_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("data", type=path, help="a data set's folder, a folder of .rec/.idx pairs, or one pair")
    parser.add_argument("--verify", action="store_true", help="decode every image and check every label")
    parser.add_argument("--show", type=int, metavar="K", help="draw K records with their captions (needs --out)")
    parser.add_argument("--out", type=path, metavar="FILE", help="the picture that --show draws, such as grid.png")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--rebuild-index", action="store_true", help="write each .idx anew from its .rec")
    parser.add_argument(
        "--repair", type=path, metavar="FOLDER", help="write a clean copy without the records training cannot use"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: all cores)")


def run(args: argparse.Namespace) -> int:
    """0 when all is sound, 1 when records or the index are faulty."""
    _check_arguments(args)
    # The decoder's own lines name no record; the report does.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        importlib.import_module("nvidia.nvimgcodec")
    except ImportError as error:
        raise UserError(
            f"inspect looks at images with nvImageCodec, the training decoder, which cannot be imported ({error}): "
            f"run `pip install nvidia-dali-cuda120`"
        ) from None
    with os_errors_in_words(args.data):
        result, is_sound = _look(args)
    print(json.dumps(result, indent=1) if args.json else "\n".join(text_lines(result)), flush=True)
    return 0 if is_sound else 1


def _look(args: argparse.Namespace) -> tuple[dict, bool]:
    """The report, and whether all is sound."""
    result: dict = {}
    if args.rebuild_index:
        result["rebuilt"] = _rebuild(args)
    if args.repair is not None:
        from .repair import repair

        result["repaired"] = repair(args.data, args.repair, args.workers, _log)
        args.data = args.repair
    dataset = open_dataset(args.data)
    index_faults, multipart, notes = _check_index(dataset)
    counts = survey(dataset, _ids(dataset, args.verify), args.verify, args.workers, _log)
    result |= summary(dataset, counts, index_faults, multipart, notes, args.verify)
    if args.show is not None:
        from .contact_sheet import write_contact_sheet

        result["shown"] = {"records": write_contact_sheet(dataset, args.show, args.out), "file": str(args.out)}
    return result, not (index_faults or counts.faults)


def summary(
    dataset: Dataset, counts: Survey, index_faults: list[str], multipart: int, notes: list[str], verified: bool
) -> dict:
    """The report as JSON values; `text_lines` prints it for people."""
    captions = []
    for name, lengths in zip(dataset.caption_names, counts.caption_lengths, strict=True):
        total = max(1, int(lengths.sum()))
        captions.append(
            {
                "name": name,
                "mean_tokens": round(float((lengths * np.arange(len(lengths))).sum()) / total, 2),
                "median_tokens": percentile(lengths, 0.5),
                "max_tokens": int(np.flatnonzero(lengths)[-1]) if lengths.any() else 0,
                "empty_share": round(int(lengths[0]) / total, 5),
                "full_share": round(int(lengths[75]) / total, 5),
            }
        )
    sides = {}
    for name, histogram in (("width", counts.widths), ("height", counts.heights)):
        used = np.flatnonzero(histogram)
        sides[name] = {
            "min": int(used[0]) if len(used) else 0,
            "median": percentile(histogram, 0.5),
            "max": int(used[-1]) if len(used) else 0,
        }
    return {
        "data": str(dataset.path),
        "shards": len(dataset.files),
        "records": len(dataset),
        "bytes": sum(file.size_bytes for file in dataset.files),
        "fingerprint": dataset.fingerprint,
        "caption_names": dataset.caption_names,
        "packed": (dataset.manifest or {}).get("packed"),
        "index_faults": index_faults,
        "records_in_parts": multipart,
        "notes": notes,
        "records_read": counts.num_read,
        "label_widths": {str(width): count for width, count in counts.label_widths.most_common()},
        "captions": captions,
        "formats": dict(counts.formats.most_common()),
        "image_sides": sides,
        "mean_image_bytes": round(counts.payload_bytes / max(1, sum(counts.formats.values()))),
        "repeated_images": counts.num_repeated_images,
        "verified": verified,
        "faults": [fault._asdict() for fault in counts.faults],
    }


def text_lines(result: dict) -> list[str]:
    """The report for people, line by line."""
    lines = []
    for rebuilt in result.get("rebuilt", []):
        lines.append(_rebuilt_line(rebuilt))
    if "repaired" in result:
        copied = result["repaired"]
        left_out = (
            f"{copied['left_out']:,} left out (listed in left_out.jsonl)" if copied["left_out"] else "none left out"
        )
        lines.append(f"repaired    {copied['records']:,} records copied, {left_out}")
    read, total = result["records_read"], result["records"]
    basis = "all records" if read == total else f"a sample of {read:,} records"
    lines.append(f"data        {result['data']}")
    lines.append(f"            {total:,} records, {_size(result['bytes'])}, shards: {result['shards']:,}")
    if result["index_faults"]:
        lines += [f"index       FAULTY: {fault}" for fault in result["index_faults"]]
    else:
        lines.append(f"index       every entry is a whole record; {result['records_in_parts']:,} stored in parts")
    lines += [f"note        {note}" for note in result["notes"]]
    widths = ", ".join(f"{width} ({count:,})" for width, count in result["label_widths"].items())
    lines.append(f"labels      width {widths}; from {basis}")
    for caption in result["captions"]:
        lines.append(
            f"            {caption['name']}: {caption['mean_tokens']:.1f} tokens on average, median "
            f"{caption['median_tokens']}, longest {caption['max_tokens']}, {caption['empty_share']:.2%} empty, "
            f"{caption['full_share']:.2%} fill the context"
        )
    images = max(1, sum(result["formats"].values()))
    formats = ", ".join(f"{name} {count / images:.1%}" for name, count in result["formats"].items())
    sides = "; ".join(
        f"{name} {side['min']}-{side['max']} px (median {side['median']})"
        for name, side in result["image_sides"].items()
    )
    lines.append(f"images      {formats}; {sides}; {_size(result['mean_image_bytes'])} on average")
    lines.append(f"repeated    {result['repeated_images']:,} of {read:,} images are byte for byte an earlier one")
    faults = result["faults"]
    if result["verified"]:
        lines.append(f"verified    {read:,} records decoded: {len(faults):,} cannot be used")
    elif faults:
        lines.append(f"faults      {len(faults):,} of {read:,} records cannot be used")
    lines += [f"            {fault['where']}: {fault['reason']}" for fault in faults[:_FAULTS_SHOWN]]
    if len(faults) > _FAULTS_SHOWN:
        lines.append(f"            and {len(faults) - _FAULTS_SHOWN:,} more: --json lists all")
    if faults:
        lines.append(f"            `rwkv-clip inspect {result['data']} --repair FOLDER` writes a copy without them")
    if "shown" in result:
        lines.append(f"shown       {result['shown']['records']} records in {result['shown']['file']}")
    return lines


def _check_arguments(args: argparse.Namespace) -> None:
    if (args.show is None) != (args.out is None):
        raise UserError("--show K and --out FILE go together: give both, such as --show 16 --out grid.png")
    if args.show is not None and not 1 <= args.show <= 400:
        raise UserError(f"--show {args.show}: give a number from 1 to 400")
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: give 1 or more")


def _ids(dataset: Dataset, everything: bool) -> np.ndarray:
    if everything or len(dataset) <= _SAMPLE:
        return np.arange(len(dataset))
    # Runs of neighbours, so that repeated images next to each other are seen.
    starts = np.linspace(0, len(dataset) - 20, _SAMPLE // 20).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(20))


def _check_index(dataset: Dataset) -> tuple[list[str], int, list[str]]:
    faults, notes, multipart = [], [], 0
    for file in dataset.files:
        try:
            report = file.check()
        except UserError as error:
            faults.append(str(error))
            continue
        multipart += report.num_multipart
        notes += report.notes
    return faults, multipart, notes


def _rebuild(args: argparse.Namespace) -> list[dict]:
    from .record_scan import rebuild_index

    rebuilt = []
    for rec_path in find_records(args.data):
        scan = rebuild_index(rec_path, _log)
        rebuilt.append(
            {
                "file": Path(rec_path).name,
                "records": len(scan.index.offsets),
                "lost_bytes": scan.lost_bytes,
                "torn_tail": scan.torn_tail,
            }
        )
    return rebuilt


def _rebuilt_line(rebuilt: dict) -> str:
    lost = ""
    if rebuilt["lost_bytes"]:
        why = "the file ends inside a record" if rebuilt["torn_tail"] else "they belong to no whole record"
        lost = f"; {rebuilt['lost_bytes']:,} bytes left out: {why}"
    return f"indexed     {rebuilt['file']}: {rebuilt['records']:,} records{lost}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
