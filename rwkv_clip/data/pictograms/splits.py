"""Which drawings train, and which are kept out of training for which test.

Three things are held out: one artist (all his drawings), some concepts (every artist's drawing of them), and some
skin tones (one tone of half of the people and hands, of every artist). All choices come from a hash of names, so they
are the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .artists import Drawing
from .concepts import Concept
from .lookalikes import features, lookalike

NUM_UNSEEN_CONCEPTS = 64
UNSEEN_GROUPS = ("animals-nature", "food-drink", "travel-places", "objects", "activities")
TESTS = ("unseen_artist", "unseen_concept", "unseen_skin_tone")


def fraction(*parts: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    digest = hashlib.sha256("|".join(parts).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def unseen_concepts(drawings: Sequence[Drawing], concepts: Mapping[str, Concept]) -> set[str]:
    """Codes of the concepts that training never shows.

    They can still be named: at most two words, the last of which another concept uses, too; five artists drew them;
    no two of them share a word; their kind has others enough to stay a class. Clock faces, which differ by their hands
    alone, are left out.
    """
    artists = defaultdict(set)
    for drawing in drawings:
        artists[drawing.concept.code].add(drawing.artist)
    kind_size = Counter(c.subgroup for c in concepts.values() if c.code == c.base)
    use = Counter(word for c in concepts.values() if not c.tones for word in set(c.words))
    candidates = [
        concept
        for concept in concepts.values()
        if concept.code == concept.base
        and concept.group in UNSEEN_GROUPS
        and concept.subgroup != "time"
        and kind_size[concept.subgroup] >= 7
        and len(artists[concept.code]) >= 5
        and 1 <= len(concept.words) <= 2
        and use[concept.words[-1]] >= 2
    ]
    chosen: set[str] = set()
    taken: set[str] = set()
    for concept in sorted(candidates, key=lambda c: fraction("unseen concept", c.code)):
        if len(chosen) < NUM_UNSEEN_CONCEPTS and taken.isdisjoint(concept.words):
            chosen.add(concept.code)
            taken.update(concept.words)
    return chosen


def assign(
    drawings: Sequence[Drawing], concepts: Mapping[str, Concept], held_out_artist: str
) -> tuple[dict[str, list[Drawing]], set[str]]:
    """Split name ("train" and TESTS) -> drawings, and the codes of the unseen concepts.

    Left out altogether: mixed-tone couples (they differ from two dozen others by a few pixels), and the held-out
    artist's flags and skin tones, which are nearly the same in every hand.
    """
    unseen = unseen_concepts(drawings, concepts)
    splits: dict[str, list[Drawing]] = {name: [] for name in ("train", *TESTS)}
    for drawing in sorted(drawings, key=lambda d: d.key):
        concept = drawing.concept
        if len(concept.tones) > 1:
            continue
        if concept.code in unseen:
            splits["unseen_concept"].append(drawing)
        elif drawing.artist == held_out_artist:
            if not concept.tones and concept.group != "flags":
                splits["unseen_artist"].append(drawing)
        elif concept.tones and concept.tones[0] == _held_out_tone(concept.base):
            splits["unseen_skin_tone"].append(drawing)
        else:
            splits["train"].append(drawing)
    return splits, unseen


def _held_out_tone(base: str) -> int | None:
    """The skin tone (1..5) of this emoji that is kept out of training; None for half of them."""
    return 1 + int(5 * fraction("tone", base)) if fraction("has held-out tone", base) < 0.5 else None


def without_repeats(
    train: Sequence[Drawing], thumbnails: Mapping[str, bytes], artists: Sequence[str]
) -> tuple[list[Drawing], Counter]:
    """Training drawings, each picture once, and how many went for which reason.

    Goes: a concept that another artist drew nearly the same way (the first artist's stays), and the very same picture
    under two names of one artist.
    """
    train = sorted(train, key=lambda d: (artists.index(d.artist), d.key))
    removed: Counter = Counter()
    by_concept = defaultdict(list)
    for drawing in train:
        by_concept[drawing.concept.code].append(drawing)
    repeats = set()
    for group in by_concept.values():
        rows = features([thumbnails[d.key] for d in group])
        for drawing, twin in zip(group, lookalike(rows, rows, 0.045, 0.97, earlier_only=True), strict=True):
            if twin >= 0:
                repeats.add(drawing.key)
                removed["train: drawn alike by two artists"] += 1
    kept, seen = [], set()
    for drawing in train:
        if drawing.key in repeats:
            continue
        identity = (drawing.artist, thumbnails[drawing.key])
        if identity in seen:
            removed["train: same picture under another name"] += 1
            continue
        seen.add(identity)
        kept.append(drawing)
    return kept, removed


def without_leaks(
    splits: Mapping[str, Sequence[Drawing]], train: Sequence[Drawing], thumbnails: Mapping[str, bytes]
) -> tuple[dict[str, list[Drawing]], Counter]:
    """The test drawings that look like no training drawing, and how many went for which reason."""
    train_rows = features([thumbnails[d.key] for d in train])
    train_pictures = {thumbnails[d.key] for d in train}
    tests, removed = {}, Counter()
    for name in TESTS:
        drawings = list(splits[name])
        if not drawings:
            tests[name] = []
            continue
        rows = features([thumbnails[d.key] for d in drawings])
        if name == "unseen_skin_tone":
            # Near its siblings of other tones by design: only the very same picture is a leak.
            leaks = [thumbnails[d.key] in train_pictures for d in drawings]
        else:
            leaks = (lookalike(rows, train_rows, 0.08, 0.965) >= 0).tolist()
        twins = [False] * len(drawings)
        if name == "unseen_artist":
            twins = (lookalike(rows, rows, 0.02, 0.99, earlier_only=True) >= 0).tolist()
        removed[f"{name}: looks like a training picture"] += sum(leaks)
        removed[f"{name}: looks like another of its pictures"] += sum(
            twin and not leak for twin, leak in zip(twins, leaks, strict=True)
        )
        tests[name] = [d for d, leak, twin in zip(drawings, leaks, twins, strict=True) if not (leak or twin)]
    return tests, removed
