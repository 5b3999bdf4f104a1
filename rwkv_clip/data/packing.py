"""Packing a source into shuffled shards: what `rwkv-clip pack` does.

While it works everything is in OUT.partial; OUT appears when it is complete. Killed at any moment, the same call goes
on with the shards that are missing. The same rows, seed and settings give the same bytes at any number of workers.
Rows that cannot be packed are skipped, counted, and listed in OUT/skipped.tsv with the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, os_errors_in_words
from . import pack_workers
from .bad_records import MAX_PIXELS
from .dataset import MANIFEST_NAME, read_manifest, write_manifest
from .exclusive import exclusive, refuse_unreplaceable
from .images import Limits, has_strict_decoder
from .pack_shard import Job, ShardReport
from .progress import Progress
from .sources.base import Source

VERSION = 1
DEFAULT_SHARD_SIZE = 10_000
REPORT_NAME, SKIPPED_NAME = "pack_report.json", "skipped.tsv"


def pack(
    source: Source,
    out: Path,
    *,
    limits: Limits | None = None,
    missing: str = "fill",
    caption_names: list[str] | None = None,
    shard_size: int = DEFAULT_SHARD_SIZE,
    name: str = "data",
    seed: int | None = 0,
    num_workers: int = 1,
    strict: bool = False,
) -> dict[str, Any]:
    """Pack `source` into the folder `out`.

    Args:
        source: from `open_source`.
        out: must be absent, empty, or the finished result of the same packing (then nothing is done).
        limits, missing: see `images.Limits` and `captions.encode_captions`.
        caption_names: names to store for the captions; default: the source's.
        shard_size: rows a shard.
        seed: of the shuffle over all rows; None keeps the source's order.
        num_workers: processes; 0 packs in this one.
        strict: a row that cannot be packed is an error.

    Returns:
        The report: rows, packed, and counts of what was skipped and changed, by reason.

    Raises:
        UserError: the source or `out` cannot be used, nothing could be packed, or a row failed under `strict`.
    """
    limits = limits or Limits()
    _check_settings(limits, shard_size, name, num_workers)
    out = Path(os.path.realpath(out))  # the folder takes the place of what a link leads to, not of the link
    with os_errors_in_words(out):
        finished = _finished_recipe(out)
    if finished is None:
        refuse_unreplaceable(out)
    partial = out.with_name(out.name + ".partial")
    start = time.monotonic()
    with _working_folder(partial):
        finished = _finished_recipe(out)  # again: another packer may have ended just now
        (partial / "index").mkdir(exist_ok=True)
        source.build_index(partial / "index")
        if caption_names is not None:
            if len(caption_names) != len(source.caption_names):
                raise UserError(
                    f"--caption-names gives {len(caption_names)} names and the source has {len(source.caption_names)} "
                    f"captions a row ({', '.join(source.caption_names)})"
                )
            source.caption_names = caption_names
        _check_caption_names(source.caption_names)
        recipe = _recipe(source, limits, missing, shard_size, name, seed)
        if finished is not None:
            if finished != recipe:
                raise UserError(f"{out} holds another packing ({_difference(finished, recipe)}): name another folder")
            print(
                f"{out} is packed already; nothing to do (files of single pictures are not looked at: to pack changed "
                "ones, name another folder)"
            )
            return json.loads((out / REPORT_NAME).read_text(encoding="utf-8"))
        if not has_strict_decoder():
            print(
                "warning: nvidia-nvimgcodec is not installed; pictures are checked with Pillow, which is less strict "
                "than the training loader (install the package's requirements to check with the same decoder)",
                file=sys.stderr,
            )
        job = _job(source, partial, recipe, limits, missing, strict)
        source.copy_rows(partial / "index", _say)
        todo = [shard for shard in range(job.num_shards) if not job.is_finished(shard)]
        if len(todo) < job.num_shards:
            print(f"going on: {job.num_shards - len(todo)} of {job.num_shards} shards are there already")
        print(f"packing {len(source):,} rows ({source.kind}; captions: {', '.join(source.caption_names)})", flush=True)
        rows = sum(len(job.rows(shard)) for shard in todo)
        pack_workers.run(job, todo, num_workers, Progress("packing", rows, "rows", _say))
        report = _finish(job, recipe, out, partial)
    _print_summary(report, out, time.monotonic() - start)
    return report


def _check_settings(limits: Limits, shard_size: int, name: str, num_workers: int) -> None:
    if shard_size < 1:
        raise UserError(f"--shard-size is {shard_size}: give 1 or more rows")
    if num_workers < 0:
        raise UserError(f"--workers is {num_workers}: give 1 or more processes")
    if not name or "/" in name or name.startswith("."):
        raise UserError(f"--name is {name!r}: give the start of a file name")
    if limits.min_side < 1 or not limits.max_aspect >= 1 or limits.max_pixels < 1 or limits.max_side < 0:
        raise UserError(
            f"--min-side {limits.min_side}, --max-aspect {limits.max_aspect:g}, --max-pixels {limits.max_pixels} and "
            f"--max-side {limits.max_side}: at least 1, 1, 1 and 0 are needed"
        )
    if limits.max_side == 0 and limits.max_pixels > MAX_PIXELS:
        raise UserError(
            f"--max-pixels {limits.max_pixels} with --max-side 0 keeps pictures that training refuses (more than "
            f"{MAX_PIXELS // 10**6} million pixels): give a --max-side to scale them down to"
        )
    if 0 < limits.max_side < limits.min_side:
        raise UserError(f"--max-side {limits.max_side} is below --min-side {limits.min_side}")


def _check_caption_names(names: list[str]) -> None:
    for name in names:
        if not name.strip() or "=" in name or "," in name:  # training is told of them by NAME=WEIGHT,NAME=WEIGHT
            raise UserError(
                f"a caption is called {name!r}: give names that are not empty, without = and comma, by --caption-names"
            )
        if names.count(name) > 1:
            raise UserError(
                f"{names.count(name)} captions are called {name!r}: give each its own name by --caption-names"
            )


def _finished_recipe(out: Path) -> dict[str, Any] | None:
    """The recipe of the packing that `out` holds; None when there is nothing."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / MANIFEST_NAME).is_file():
        raise UserError(f"{out} exists and is no packed data set: name another folder, or empty it")
    return read_manifest(out)["packed"].get("recipe", {})


@contextlib.contextmanager
def _working_folder(partial: Path) -> Iterator[None]:
    """`partial`, for one packer at a time. One without a recipe, in which no work was begun, is removed again."""
    with os_errors_in_words(partial), exclusive(partial, f"another packer is writing {partial}"):
        try:
            yield
        finally:
            if partial.exists() and not (partial / "recipe.json").exists():
                shutil.rmtree(partial)


def _fresh(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def _recipe(
    source: Source, limits: Limits, missing: str, shard_size: int, name: str, seed: int | None
) -> dict[str, Any]:
    """What decides the bytes of the result."""
    return {
        "version": VERSION,
        "source": hashlib.sha256(source.fingerprint.encode()).hexdigest()[:32],
        "rows": len(source),
        "captions": source.caption_names,
        "missing_captions": missing,
        "shard_size": shard_size,
        "name": name,
        "shuffle_seed": seed,
        "min_side": limits.min_side,
        "max_aspect": limits.max_aspect,
        "max_pixels": limits.max_pixels,
        "max_side": limits.max_side,
        "decoder": "nvimgcodec" if has_strict_decoder() else "pillow",
    }


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    changed = [key for key in wanted if found.get(key) != wanted[key]]
    return ", ".join(f"{key} {found.get(key)!r}, not {wanted[key]!r}" for key in changed[:3])


def _job(source: Source, partial: Path, recipe: dict[str, Any], limits: Limits, missing: str, strict: bool) -> Job:
    """Set up the working folder, keeping the shards that an interrupted run of the same recipe finished."""
    recipe_path = partial / "recipe.json"
    data, reports = partial / "data", partial / "reports"
    before = None
    with contextlib.suppress(FileNotFoundError, ValueError):  # a machine that went down may leave it empty
        before = json.loads(recipe_path.read_text(encoding="utf-8"))
    if before != recipe:
        if before is not None:
            print(f"starting anew: an unfinished packing had {_difference(before, recipe)}")
        recipe_path.unlink(missing_ok=True)
        for folder in (data, reports):
            _fresh(folder)
        new = partial / "recipe.json.new"
        new.write_text(json.dumps(recipe), encoding="utf-8")
        os.replace(new, recipe_path)
    for left_over in (*data.glob("*.partial"), *reports.glob("*.partial")):
        left_over.unlink()
    order = None
    if recipe["shuffle_seed"] is not None:
        order = partial / "index" / "order.npy"
        np.save(order, shuffled(len(source), recipe["shuffle_seed"]))
    return Job(source, order, data, reports, recipe["name"], recipe["shard_size"], limits, missing, strict)


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of 0 ... count - 1, int64 [count], that depends on count and seed alone.

    Rows are sorted by SplitMix64 (Steele, Lea, Flood 2014) of their number, so no library's version matters.
    """
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable")


def _finish(job: Job, recipe: dict[str, Any], out: Path, partial: Path) -> dict[str, Any]:
    """Write manifest and reports, then give the folder its name."""
    skipped: Counter = Counter()
    notes: Counter = Counter()
    names, packed = [], 0
    skipped_path = job.folder / SKIPPED_NAME
    with open(skipped_path, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        file.write("row\twhere\treason\tdetail\n")
        for shard in range(job.num_shards):
            report = ShardReport.read(job.report_path(shard))
            packed += report.packed
            notes += report.notes
            if report.packed:
                names.append(job.shard_name(shard))
            for row, where, kind, detail in report.skipped:
                skipped[kind] += 1
                file.write("\t".join(_field(value) for value in (row, where, kind, detail)) + "\n")
    if not packed:
        shutil.rmtree(partial)
        raise UserError(f"none of the {len(job.source):,} rows could be packed: {_counts(skipped)}")
    if not skipped:
        skipped_path.unlink()
    report = {
        "rows": len(job.source),
        "packed": packed,
        "skipped": dict(sorted(skipped.items())),
        "notes": dict(sorted(notes.items())),
    }
    (job.folder / REPORT_NAME).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write_manifest(job.folder, names, job.source.caption_names, {**report, "recipe": recipe})
    try:
        if out.exists():
            out.rmdir()
        job.folder.rename(out)
    except OSError as error:
        raise UserError(f"cannot give {job.folder} its name {out}: {error.strerror}") from None
    shutil.rmtree(partial)
    return report


def _field(value: int | str) -> str:
    """A value in one line of text; halves of UTF-16 pairs, which JSON may hold and no file can, become U+FFFD."""
    # U+DC80 to U+DCFF stand for the bytes of names that are no text, and are written as these bytes.
    return " ".join(re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", str(value)).split())


def _counts(counts: Counter | dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _say(line: str) -> None:
    print(line, flush=True)


def _print_summary(report: dict[str, Any], out: Path, seconds: float) -> None:
    size = sum(path.stat().st_size for path in out.glob("*.rec"))
    shards = len(list(out.glob("*.rec")))
    print(
        f"packed {report['packed']:,} of {report['rows']:,} rows into {shards} shard{'s' * (shards != 1)} "
        f"({size / 1e6:,.1f} MB) in {out} ({seconds:.1f} s)"
    )
    for name, count in report["notes"].items():
        print(f"  {name}: {count:,}")
    if report["skipped"]:
        print(f"  skipped {sum(report['skipped'].values()):,}: {_counts(report['skipped'])}; see {out / SKIPPED_NAME}")
        lines = (out / SKIPPED_NAME).open(encoding="utf-8", errors="surrogateescape")
        with lines:
            next(lines)
            for _, line in zip(range(5), lines, strict=False):
                where, reason, detail = line.rstrip("\n").split("\t")[1:]
                print(f"    {where}: {reason}{': ' + detail if detail else ''}")
