"""Three captions a drawing: raw like a web page's, a short synthetic one, a longer generated description."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from .artists import Drawing
from .concepts import Concept

TEMPLATES = [
    "a picture of {}.",
    "a drawing of {}.",
    "an illustration of {}.",
    "a small icon of {}.",
    "a cartoon of {}.",
    "an emoji of {}.",
    "this is {}.",
    "{}",
]
SHORT_FORMS = ("a picture of {}", "a drawing of {}", "an illustration of {}", "a small icon of {}", "a cartoon of {}")

# First words after which no article is missing: it is there, or the name is a plural or a mass noun.
_NO_ARTICLE = re.compile(r"(an?|the|no|two|three|four|five|six|hundred|men|women|people|money|crossed|folded)\b", re.I)
_SINGULAR_IN_S = re.compile(r"(ss|us|is|lens|claus|cross|tennis|dress|octopus|fleur-de-lis)$", re.I)
_VOWEL_SOUND = re.compile(r"(?!uni|eu|one\b|ufo|us\b)[aeiou]", re.I)


def with_article(name: str) -> str:
    """ "dog" -> "a dog", "owl" -> "an owl"; a plural or a name that has its article stays."""
    if _NO_ARTICLE.match(name) or name[:1].isdigit():
        return name
    head = re.split(r" (?:with|in|on|of|and|over) ", name)[0].split()[-1]
    if head.lower().endswith("s") and not _SINGULAR_IN_S.search(head):
        return name
    return f"{'an' if _VOWEL_SOUND.match(name) else 'a'} {name}"


def phrase(label: str) -> str:
    """A CLDR name as a noun phrase: "man mage: dark skin tone" -> "a man mage with dark skin tone"."""
    base, colon, rest = label.partition(": ")
    if not colon:
        return with_article(label)
    if base == "flag":
        return f"the flag of {rest}"
    if base == "keycap":
        return f"a keypad key with {rest}"
    looks, members, facing = [], [], ""
    for part in rest.split(", "):
        if part == "facing right":
            facing = " facing right"
        elif re.search(r"skin tone|hair|beard|bald", part):
            looks.append("a bald head" if part == "bald" else part)
        else:
            members.append(part)
    text = with_article(base)
    if members:
        text += " of " + " and ".join(members)
    if looks:
        text += " with " + " and ".join(looks)
    return text + facing


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def captions(drawing: Drawing, colours: Sequence[str]) -> tuple[str, str, str]:
    """(raw, synthetic, generated) captions of one drawing; the same on every machine."""
    concept = drawing.concept
    choice = random.Random(drawing.key)
    tags = list(concept.tags)
    choice.shuffle(tags)
    raw = choice.choice(_raw_forms(concept, tags))
    name = phrase(concept.label)
    synthetic = choice.choice(SHORT_FORMS).format(name)
    generated = name[:1].upper() + name[1:]
    if concept.kind != name:
        generated += f", {concept.kind}"
    if tags:
        generated += f", which suggests {listed(tags[:3])}"
    return raw, synthetic, f"{generated}, mostly in {listed(colours)}."


def _raw_forms(concept: Concept, tags: Sequence[str]) -> list[str]:
    label = concept.label
    forms = [label, f"{label} emoji", f"{label} icon vector", re.sub(r"\W+", "_", label.lower()).strip("_") + ".png"]
    if tags:
        forms += [f"{label} {' '.join(tags[:2])}", f"{label} - {', '.join(tags[:3])}"]
    if concept.unicode_name and not concept.tones:
        forms.append(f"{concept.unicode_name} symbol")
    if concept.shortcode and not concept.tones:
        forms.append(f":{concept.shortcode}: {label}")
    return forms
