"""The layout of a prepared data set, and how a folder of it appears: whole, or not at all.

    OUT/images/...               the pictures
    OUT/train.tsv                image raw synthetic generated, then columns that describe the row
    OUT/val.tsv                  the same columns, pictures that training does not show (optional)
    OUT/retrieval_NAME.tsv       image caption caption2 caption3 ...: one picture a caption
    OUT/zs_NAME.tsv, .json       image label class_name ...; classes, templates and sizes
    OUT/stats.json               counts, and the recipe that made it; written last
    OUT/ATTRIBUTION.md           where the pictures come from, and their licences

Tables are tab-separated with one header line and no quoting: a tab or line break inside a value becomes a space.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError

STATS = "stats.json"
CAPTION_COLUMNS = ("raw", "synthetic", "generated")


def is_finished(out: Path, recipe: dict[str, Any]) -> bool:
    """Whether `out` already holds the data set that `recipe` makes.

    Raises:
        UserError: `out` holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        found = json.loads((out / STATS).read_text(encoding="utf-8"))["recipe"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{out} exists and is no prepared data set: name another folder, or empty it") from None
    if found != recipe:
        raise UserError(f"{out} holds another data set ({_brief(found)}, not {_brief(recipe)}): name another folder")
    return True


def _brief(recipe: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in recipe.items()) if isinstance(recipe, dict) else repr(recipe)


def build(out: Path, recipe: dict[str, Any], make: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
    """Call `make(folder)` on a folder beside `out` and give it the name `out` when it is complete.

    Args:
        out: the data set's folder; must be absent, empty, or already made by the same recipe.
        recipe: what identifies the data set: its name, version and settings.
        make: fills the folder and returns the statistics.

    Returns:
        The statistics, or None when `out` was finished before.
    """
    if is_finished(out, recipe):
        return None
    folder = out.with_name(out.name + ".partial")
    try:
        if folder.exists():  # an interrupted run's
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        stats = {"recipe": recipe, **make(folder)}
        write_json(folder / STATS, stats)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}: choose another folder") from error
    return stats


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
    """Write one table and return its number of rows."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t".join(columns) + "\n")
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"{path.name}: {len(row)} values for {len(columns)} columns")
            file.write("\t".join(" ".join(str(value).split()) for value in row) + "\n")
            count += 1
    return count


def write_retrieval(folder: Path, name: str, rows: Iterable[Sequence[str]], extra: Sequence[str] = ()) -> int:
    """Write retrieval_NAME.tsv and return its number of pictures.

    Args:
        rows: (image, caption, caption2, caption3, *extra). Of rows with the same first caption only one is kept, since
            a caption must name one picture.
    """
    unique = {}
    for row in rows:
        unique.setdefault(row[1].lower(), row)
    columns = ("image", "caption", "caption2", "caption3", *extra)
    return write_table(folder / f"retrieval_{name}.tsv", columns, unique.values())


def write_zero_shot(
    folder: Path, name: str, rows: Sequence[tuple[str, str]], templates: Sequence[str], minimum: int = 1
) -> dict[str, Any]:
    """Write zs_NAME.tsv and .json, return the sizes that the .json states.

    Args:
        rows: (image, class name). Classes with fewer than `minimum` pictures are left out.
        templates: sentences with one {} for the class name.
    """
    size = Counter(class_name for _, class_name in rows)
    classes = sorted(c for c, count in size.items() if count >= minimum)
    label = {class_name: i for i, class_name in enumerate(classes)}
    kept = [(image, label[c], c) for image, c in rows if c in label]
    write_table(folder / f"zs_{name}.tsv", ("image", "label", "class_name"), kept)
    sizes = {
        "num_images": len(kept),
        "num_classes": len(classes),
        "chance": round(1 / len(classes), 6),
        "largest_class": round(max(size[c] for c in classes) / len(kept), 6),
    }
    write_json(folder / f"zs_{name}.json", {"name": name, **sizes, "classes": classes, "templates": list(templates)})
    return sizes
