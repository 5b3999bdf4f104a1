"""Each artist's drawings, matched to the concepts that they show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .concepts import Concept, normal_code


@dataclass(frozen=True)
class Drawing:
    """One artist's picture of one concept, as SVG text."""

    artist: str
    concept: Concept
    svg: str

    @property
    def key(self) -> str:
        return f"{self.artist}/{self.concept.code.lower()}"

    @property
    def path(self) -> str:
        """Where its JPEG lies, relative to the data set's folder."""
        return f"images/{self.key}.jpg"


def icon_set(artist: str, files: Mapping[str, bytes], concepts: Mapping[str, Concept]) -> Iterator[Drawing]:
    """The drawings of an Iconify package: matched by code point, or by name where the package lists no code points."""
    icons = json.loads(files["icons.json"])
    codes = {normal_code(code): name for code, name in json.loads(files["chars.json"]).items()}
    if not codes:
        codes = _codes_by_name(icons["icons"], concepts)
    for code, name in codes.items():
        icon = icons["icons"].get(name)
        if icon is None or code not in concepts:
            continue
        width = icon.get("width", icons.get("width", 16))
        height = icon.get("height", icons.get("height", 16))
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{icon.get("left", 0)} {icon.get("top", 0)} {width} {height}" width="{width}" height="{height}">'
            f"{icon['body']}</svg>"
        )
        yield Drawing(artist, concepts[code], svg)


def svg_files(artist: str, files: Mapping[str, bytes], concepts: Mapping[str, Concept]) -> Iterator[Drawing]:
    """The drawings of a package of files named by code point, `.../1F436.svg`."""
    for name in sorted(files):
        if name.endswith(".svg"):
            code = normal_code(name.rpartition("/")[2][: -len(".svg")])
            if code in concepts:
                yield Drawing(artist, concepts[code], files[name].decode("utf-8", "replace"))


def _codes_by_name(icon_names: Mapping[str, object], concepts: Mapping[str, Concept]) -> dict[str, str]:
    """Concept code -> icon name, where an icon is named like a concept's label or Unicode name."""
    by_name: dict[str, str] = {}
    for code, concept in concepts.items():
        by_name.setdefault(squash(concept.label), code)
    for code, concept in concepts.items():
        if concept.unicode_name and not concept.tones:
            by_name.setdefault(squash(concept.unicode_name), code)
    codes: dict[str, str] = {}
    for name in icon_names:
        plain = re.sub(r"^flag-for-(flag-)?", "flag-", name)
        code = by_name.get(squash(name)) or by_name.get(squash(plain))
        if code is not None:
            codes.setdefault(code, name)
    return codes


def squash(text: str) -> str:
    """Letters and digits only, in lower case, so that "fox-face" meets "Fox face"."""
    return re.sub(r"[^a-z0-9]", "", text.lower().replace("&", "and"))
