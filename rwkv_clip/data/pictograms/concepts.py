"""What a pictogram can show: the emoji of Unicode with their names, tags and kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .kinds import KINDS

# Code points that are no pictures of their own.
SKIPPED_GROUPS = ("component", "extras-unicode")


@dataclass(frozen=True)
class Concept:
    """One emoji, with or without a skin tone.

    Attributes:
        code: its code points in hex, joined by "-", without the presentation selector FE0F.
        base: the code of the same emoji without skin tone.
        label: its English CLDR name.
        tags: search words that the label does not contain.
        group: Unicode's group, such as "animals-nature"; subgroup: the finer one.
        tones: the distinct skin tones in it (1 light ... 5 dark).
        unicode_name, shortcode: other names, None if it has none.
    """

    code: str
    base: str
    label: str
    tags: tuple[str, ...]
    group: str
    subgroup: str
    tones: tuple[int, ...]
    unicode_name: str | None
    shortcode: str | None

    @property
    def kind(self) -> str:
        return KINDS.get(self.subgroup, "a " + self.subgroup.replace("-", " "))

    @property
    def words(self) -> list[str]:
        """The label's words of three letters or more, in lower case."""
        return re.findall(r"[a-z]{3,}", self.label.lower())


def normal_code(code: str) -> str:
    """ "1f3f4-fe0f" -> "1F3F4"."""
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def read_concepts(names: Mapping[str, bytes], groups: bytes) -> dict[str, Concept]:
    """Every emoji that has a group, by code.

    Args:
        names: files of the emojibase-data package.
        groups: openmoji.json, which names the group and subgroup of each emoji.
    """
    entries = json.loads(names["en/data.json"])
    unicode_names = _by_code(names["meta/unicode-names.json"])
    shortcodes = _by_code(names["en/shortcodes/iamcal.json"])
    group_of = {normal_code(e["hexcode"]): (e.get("group"), e.get("subgroups")) for e in json.loads(groups)}
    concepts = {}
    for entry in entries:
        base = normal_code(entry["hexcode"])
        for form in (entry, *entry.get("skins", ())):
            code = normal_code(form["hexcode"])
            group, subgroup = group_of.get(code) or group_of.get(base) or (None, None)
            if not subgroup or group in SKIPPED_GROUPS:
                continue
            label = form["label"]
            tone = form.get("tone", [])
            concepts[code] = Concept(
                code=code,
                base=base,
                label=label,
                tags=tuple(tag for tag in entry.get("tags", ()) if tag.lower() not in label.lower()),
                group=group,
                subgroup=subgroup,
                tones=tuple(sorted(set(tone if isinstance(tone, list) else [tone]))),
                unicode_name=unicode_names.get(code),
                shortcode=shortcodes.get(base),
            )
    return concepts


def _by_code(file: bytes) -> dict[str, str]:
    return {normal_code(k): v if isinstance(v, str) else v[0] for k, v in json.loads(file).items()}
