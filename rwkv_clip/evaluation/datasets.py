"""Evaluation sets of a prepared folder: zs_NAME.json with zs_NAME.tsv, and retrieval_NAME.tsv.

Tables are tab-separated UTF-8 with one header line and no quoting; pictures' paths are absolute or relative to the
table. Each set is read on its own, so that a fault in one does not keep another from being scored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

DEFAULT_TEMPLATES = ("a photo of a {}.",)


@dataclass(frozen=True)
class ZeroShotSet:
    """Pictures, each of one of several named classes."""

    name: str
    images: list[Path]
    labels: list[int]
    """Class of each picture."""
    classes: list[str]
    templates: list[str]
    """Sentences with {} for the class name."""


@dataclass(frozen=True)
class RetrievalSet:
    """Pictures and captions; a picture may have any number of captions."""

    name: str
    images: list[Path]
    captions: list[str]
    image_of_caption: list[int]
    column_of_caption: list[str]
    """The table's column that each caption comes from."""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(self.column_of_caption))


@dataclass(frozen=True)
class SetFile:
    """A set that a folder offers. `read` raises UserError, naming file and line, when it cannot be used."""

    kind: str
    """"zero_shot" or "retrieval"."""
    name: str
    read: Callable[[], ZeroShotSet | RetrievalSet]


def find_sets(folder: Path | str, names: Sequence[str] = (), limit: int = 0) -> list[SetFile]:
    """The sets in a prepared folder, in the order of their names.

    names: only these. limit: at most so many pictures of each set, the same ones in every run and process.
    Raises UserError for a folder without sets and for a name that it does not have.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder} is no folder: give one with zs_*.json or retrieval_*.tsv, as `rwkv-clip prepare` makes"
        )
    found = [
        SetFile("zero_shot", path.stem.removeprefix("zs_"), lambda path=path: read_zero_shot(path, limit))
        for path in sorted(folder.glob("zs_*.json"))
    ] + [
        SetFile("retrieval", path.stem.removeprefix("retrieval_"), lambda path=path: read_retrieval(path, limit))
        for path in sorted(folder.glob("retrieval_*.tsv"))
    ]
    if not found:
        raise UserError(f"nothing to evaluate in {folder}: it has no zs_*.json and no retrieval_*.tsv")
    unknown = set(names) - {each.name for each in found}
    if unknown:
        has = ", ".join(dict.fromkeys(each.name for each in found))
        raise UserError(f"{folder} has no set named {', '.join(sorted(unknown))}: it has {has}")
    return [each for each in found if not names or each.name in names]


def read_zero_shot(description: Path, limit: int = 0) -> ZeroShotSet:
    """Read zs_NAME.json (classes, templates) and the zs_NAME.tsv beside it (image, label, perhaps class_name)."""
    content = _read_json(description)
    classes = [_class_name(entry, description) for entry in _list(content, "classes", description)]
    if not classes:
        raise UserError(f"{description} has no classes")
    templates = [_template(entry, description) for entry in content.get("templates") or DEFAULT_TEMPLATES]
    table = description.with_suffix(".tsv")
    columns, rows = read_table(table, ("image", "label"))
    image_at, label_at = columns.index("image"), columns.index("label")
    name_at = columns.index("class_name") if "class_name" in columns else None
    images, labels = [], []
    for line, row in rows:
        label = int(row[label_at]) if re.fullmatch(r"\d+", row[label_at]) else -1
        if not 0 <= label < len(classes):
            raise UserError(f"{table} line {line}: label {row[label_at]!r} is none of 0 to {len(classes) - 1}")
        if name_at is not None and _clean(row[name_at]) != classes[label]:
            raise UserError(
                f"{table} line {line}: class {label} is {row[name_at]!r}, but {classes[label]!r} in {description.name}"
            )
        images.append(_image(table, line, row[image_at]))
        labels.append(label)
    kept = choose(_names(images, table), limit)
    return ZeroShotSet(
        description.stem.removeprefix("zs_"), [images[i] for i in kept], [labels[i] for i in kept], classes, templates
    )


def read_retrieval(table: Path, limit: int = 0) -> RetrievalSet:
    """Read retrieval_NAME.tsv: image, caption, caption2, ...; empty captions are left out, an image may come again."""
    columns, rows = read_table(table, ("image", "caption"))
    image_at = columns.index("image")
    caption_at = [i for i, column in enumerate(columns) if re.fullmatch(r"caption\d*", column)]
    captions_of: dict[Path, list[tuple[str, str]]] = {}
    for line, row in rows:
        own = captions_of.setdefault(_image(table, line, row[image_at]), [])
        own.extend((row[i].strip(), columns[i]) for i in caption_at if row[i].strip())
    images = [image for image, captions in captions_of.items() if captions]
    if not images:
        raise UserError(f"{table} has no captions")
    images = [images[i] for i in choose(_names(images, table), limit)]
    triples = [(text, i, column) for i, image in enumerate(images) for text, column in captions_of[image]]
    texts, image_of, column_of = (list(values) for values in zip(*triples, strict=True))
    return RetrievalSet(table.stem.removeprefix("retrieval_"), images, texts, image_of, column_of)


def read_table(path: Path, needed: Sequence[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """(columns, [(line number, values)]) of a tab-separated file; raises UserError for a missing column or value."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    columns = lines[0].rstrip("\r").split("\t")
    missing = [column for column in needed if column not in columns]
    if missing:
        raise UserError(f"{path} has no column '{missing[0]}': its header has {', '.join(columns)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        values = line.rstrip("\r").split("\t")
        if len(values) != len(columns):
            raise UserError(f"{path} line {number}: {len(values)} values for {len(columns)} columns")
        rows.append((number, values))
    if not rows:
        raise UserError(f"{path} has no rows")
    return columns, rows


def choose(names: Sequence[str], limit: int) -> list[int]:
    """Positions of at most `limit` names (0: all), in order: the same names in every process and on every machine."""
    if not limit or limit >= len(names):
        return list(range(len(names)))
    # Python's own hash of a string differs from process to process.
    by_digest = sorted(range(len(names)), key=lambda i: (hashlib.sha256(names[i].encode()).digest(), i))
    return sorted(by_digest[:limit])


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold an object with 'classes', found {type(content).__name__}")
    return content


def _list(content: dict, key: str, path: Path) -> list:
    value = content.get(key)
    if not isinstance(value, list):
        raise UserError(f"{path}: '{key}' must be a list, found {type(value).__name__}")
    return value


def _class_name(entry: object, path: Path) -> str:
    """A class name for a sentence: underscores and repeated white space become single spaces."""
    if not isinstance(entry, str) or re.fullmatch(r"\s*[\[({].*[\])}]\s*", entry, re.DOTALL):
        raise UserError(
            f"{path}: the class {entry!r} is a list or the like, not a name: write one name, such as 'angry'"
        )
    name = _clean(entry)
    if not name:
        raise UserError(f"{path}: the class name {entry!r} is empty")
    return name


def _clean(name: str) -> str:
    return " ".join(name.replace("_", " ").split())


def _template(entry: object, path: Path) -> str:
    if not isinstance(entry, str) or entry.count("{}") != 1:
        raise UserError(f"{path}: the template {entry!r} must be a sentence with one {{}} for the class name")
    return entry


def _image(table: Path, line: int, value: str) -> Path:
    if not value.strip():
        raise UserError(f"{table} line {line}: no image")
    return table.parent / value


def _names(images: Sequence[Path], table: Path) -> list[str]:
    """Pictures as seen from the table, so that a folder gives the same choice wherever it lies."""
    folder = table.parent.absolute()
    absolute = [image.absolute() for image in images]
    return [str(image.relative_to(folder) if image.is_relative_to(folder) else image) for image in absolute]
