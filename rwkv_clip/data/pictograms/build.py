"""`rwkv-clip prepare pictograms OUT`: emoji drawings of seven artists with three captions each.

Real pictures with real names in 20 MB of downloads: enough to train a small model in minutes and to see that it
recognises an artist, concepts and combinations that it has never seen.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from .. import prepared
from ..progress import Progress
from . import packages
from .artists import Drawing, icon_set, svg_files
from .captions import TEMPLATES, captions, phrase
from .concepts import Concept, read_concepts
from .kinds import SKIN_TONES
from .render import Rendered, render, require_renderer
from .splits import assign, fraction, without_leaks, without_repeats

VERSION = 1
DEFAULT_SIZE = 72
MINIMUM_PER_KIND = 6
TONE_TEMPLATES = ["a picture of a person with {}.", "a hand with {}.", "{}"]


def recipe(size: int) -> dict[str, Any]:
    return {"name": "pictograms", "version": VERSION, "size": size}


def make(folder: Path, size: int) -> dict[str, Any]:
    """Fill `folder` and return its statistics (see `prepared` for the layout)."""
    require_renderer()
    print(f"fetching {len(packages.PACKAGES)} packages from the npm registry (about 20 MB)", flush=True)
    drawings, concepts = _drawings()
    splits, unseen = assign(drawings, concepts, packages.HELD_OUT_ARTIST.artist)
    used = [drawing for split in splits.values() for drawing in split]
    rendered, failed = _render_all(folder, used, size)
    splits = {name: [d for d in split if d.key in rendered] for name, split in splits.items()}
    thumbnails = {key: picture.thumbnail for key, picture in rendered.items()}
    artists = [package.artist for package in packages.TRAINING_ARTISTS]
    train, removed = without_repeats(splits["train"], thumbnails, artists)
    tests, leaks = without_leaks(splits, train, thumbnails)
    removed += leaks
    random.Random(0).shuffle(train)

    def table(drawings: Iterable[Drawing]) -> list[tuple[str, ...]]:
        return [
            (d.path, *captions(d, rendered[d.key].colours), d.artist, d.concept.code, d.concept.group) for d in drawings
        ]

    columns = ("image", *prepared.CAPTION_COLUMNS, "artist", "concept", "group")
    stats: dict[str, Any] = {
        "train": prepared.write_table(folder / "train.tsv", columns, table(train)),
        "val": prepared.write_table(folder / "val.tsv", columns, table(tests["unseen_artist"])),
        "train_by_artist": dict(Counter(d.artist for d in train)),
        "train_concepts": len({d.concept.code for d in train}),
    }
    stats["retrieval"] = {
        name: prepared.write_retrieval(
            folder,
            name,
            [_retrieval_row(d, rendered[d.key]) for d in one_per_concept(drawings)],
            ("artist", "concept"),
        )
        for name, drawings in tests.items()
    }
    stats["zero_shot"] = _zero_shot(folder, tests)
    stats["removed"] = dict(removed)
    stats["not_drawn"] = dict(failed)
    stats["unseen_concepts"] = sorted(concepts[code].label for code in unseen)
    keep = {d.path for split in (train, *tests.values()) for d in split}
    for drawing in used:
        if drawing.path not in keep:
            (folder / drawing.path).unlink(missing_ok=True)
    (folder / "ATTRIBUTION.md").write_text(_attribution(), encoding="utf-8")
    return stats


def _drawings() -> tuple[list[Drawing], dict]:
    names = packages.fetch(packages.NAMES)
    held_out = packages.fetch(packages.HELD_OUT_ARTIST)
    concepts = read_concepts(names, held_out["data/openmoji.json"])
    drawings = list(svg_files(packages.HELD_OUT_ARTIST.artist, held_out, concepts))
    for package in packages.TRAINING_ARTISTS:
        drawings += icon_set(package.artist, packages.fetch(package), concepts)
    return drawings, concepts


def _render_all(folder: Path, drawings: list[Drawing], size: int) -> tuple[dict[str, Rendered], Counter]:
    """Drawing key -> what was drawn, and the reasons of those that were not."""
    rendered, failed = {}, Counter()
    jobs = [(d.svg, size, folder / d.path) for d in drawings]
    workers = max(1, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        results = pool.map(_render_one, jobs, chunksize=32)
        progress = Progress("drawing", len(drawings), "pictures", lambda line: print(line, flush=True))
        for drawing, result in zip(drawings, results, strict=True):
            progress()
            if isinstance(result, Rendered):
                rendered[drawing.key] = result
            else:
                failed[f"{drawing.artist}: {result}"] += 1
    return rendered, failed


def _render_one(job: tuple[str, int, Path]) -> Rendered | str:
    return render(*job)


def one_per_concept(drawings: Iterable[Drawing]) -> list[Drawing]:
    """One drawing of each concept, the artists taking turns by a hash."""
    chosen: dict[str, Drawing] = {}
    for drawing in sorted(drawings, key=lambda d: fraction("turn", d.key)):
        chosen.setdefault(drawing.concept.code, drawing)
    return sorted(chosen.values(), key=lambda d: d.key)


def _retrieval_row(drawing: Drawing, picture: Rendered) -> tuple[str, ...]:
    concept = drawing.concept
    words = " ".join((concept.label, *sorted(concept.tags)[:4]))
    generated = captions(drawing, picture.colours)[2]
    return drawing.path, f"a picture of {phrase(concept.label)}", words, generated, drawing.artist, concept.code


def _zero_shot(folder: Path, tests: dict[str, list[Drawing]]) -> dict[str, Any]:
    def classes(test: str, class_name: Callable[[Concept], str]) -> list[tuple[str, str]]:
        return [(drawing.path, class_name(drawing.concept)) for drawing in tests[test]]

    def name(concept: Concept) -> str:
        return phrase(concept.label)

    sets = (
        ("unseen_artist_kind", classes("unseen_artist", lambda c: c.kind), TEMPLATES, MINIMUM_PER_KIND),
        ("unseen_artist_name", classes("unseen_artist", name), TEMPLATES, 1),
        ("unseen_concept", classes("unseen_concept", name), TEMPLATES, 1),
        ("unseen_skin_tone", classes("unseen_skin_tone", lambda c: SKIN_TONES[c.tones[0]]), TONE_TEMPLATES, 1),
    )
    return {set_name: prepared.write_zero_shot(folder, set_name, *rest) for set_name, *rest in sets}


def _attribution() -> str:
    lines = [
        "The pictures were drawn from these packages of the npm registry, on white, and saved as JPEG.",
        "Each stays under its own licence; a copy of the pictures must carry this list.",
        "",
    ]
    for package in packages.PACKAGES:
        use = f"pictures in images/{package.artist}" if package.artist else "names and tags"
        lines.append(f"- {package.name} {package.version}: {package.licence} ({use})")
    return "\n".join(lines) + "\n"
