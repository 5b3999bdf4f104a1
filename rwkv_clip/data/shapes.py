"""`rwkv-clip prepare shapes OUT`: rendered shapes whose captions name colour, size and height; needs Pillow alone.

A quarter of all (colour, shape) pairs is never in training, each colour and each shape being there in other pairs:
a model that tells these pairs apart has learned to combine. It stands in for real pictures where these cannot be
fetched; its scores say nothing about them. No caption says left or right, since training flips pictures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from . import prepared

VERSION = 1
DEFAULT_SIZE = 64
NUM_TRAIN = 13_000
# Drawn this many times larger, then scaled down, for smooth edges.
OVERSAMPLING = 4

COLOURS = {
    "red": (214, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (245, 210, 50),
    "green": (50, 160, 70),
    "teal": (30, 150, 150),
    "blue": (45, 90, 210),
    "purple": (125, 60, 170),
    "pink": (240, 130, 175),
    "brown": (125, 80, 45),
    "black": (25, 25, 25),
}
BACKGROUNDS = {
    "white": (255, 255, 255),
    "gray": (185, 185, 190),
    "cream": (250, 238, 205),
    "pale blue": (190, 222, 245),
}
SIZES = {"small": 0.13, "medium": 0.19, "large": 0.26}  # radius, in sides of the picture
ROWS = {"top": 0.28, "middle": 0.5, "bottom": 0.72}
TEMPLATES = ["a picture of {}.", "a drawing of {}.", "{}"]
SHORT_FORMS = ("a picture of {}", "a drawing of {}", "an illustration of {}", "{}")


def _polygon(*points: tuple[float, float]) -> Callable:
    """A shape given by its corners around (0, 0), in radii."""

    def draw(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour, background) -> None:
        pen.polygon([(x + radius * a, y + radius * b) for a, b in points], fill=colour)

    return draw


def _regular(corners: int, inner: float = 1.0) -> Callable:
    """A regular polygon, or a star when every second corner lies at `inner` radii."""
    turn = math.pi / corners if inner != 1.0 else 2 * math.pi / corners
    count = 2 * corners if inner != 1.0 else corners
    radii = [inner if inner != 1.0 and i % 2 else 1.0 for i in range(count)]
    return _polygon(*((r * math.sin(i * turn), -r * math.cos(i * turn)) for i, r in enumerate(radii)))


def _circle(pen, x, y, radius, colour, background) -> None:
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _ring(pen, x, y, radius, colour, background) -> None:
    _circle(pen, x, y, radius, colour, background)
    _circle(pen, x, y, 0.55 * radius, background, background)


def _moon(pen, x, y, radius, colour, background) -> None:
    _circle(pen, x, y, radius, colour, background)
    _circle(pen, x + 0.5 * radius, y - 0.2 * radius, 0.85 * radius, background, background)


def _heart(pen, x, y, radius, colour, background) -> None:
    for side in (-0.48, 0.48):
        _circle(pen, x + side * radius, y - 0.35 * radius, 0.52 * radius, colour, background)
    _polygon((-0.97, -0.18), (0.97, -0.18), (0, 1.0))(pen, x, y, radius, colour, background)


SHAPES: dict[str, Callable] = {
    "circle": _circle,
    "square": _polygon((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
    "triangle": _regular(3),
    "diamond": _polygon((0, -1), (0.65, 0), (0, 1), (-0.65, 0)),
    "pentagon": _regular(5),
    "star": _regular(5, 0.42),
    "cross": _polygon(
        *((a, b) for a, b in ((-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3))),
        *((a, b) for a, b in ((0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3))),
    ),
    "arrow": _polygon((-1, -0.25), (0.1, -0.25), (0.1, -0.8), (1, 0), (0.1, 0.8), (0.1, 0.25), (-1, 0.25)),
    "bar": _polygon((-1, -0.3), (1, -0.3), (1, 0.3), (-1, 0.3)),
    "ring": _ring,
    "moon": _moon,
    "heart": _heart,
}


@dataclass(frozen=True)
class Scene:
    """One shape on one background."""

    colour: str
    shape: str
    size: str
    row: str
    background: str

    @property
    def thing(self) -> str:
        return _with_article(f"{self.colour} {self.shape}")

    def draw(self, size: int, choice: random.Random) -> Image.Image:
        """The picture, `size` pixels a side, moved and scaled a little by chance."""
        side = size * OVERSAMPLING
        background = BACKGROUNDS[self.background]
        picture = Image.new("RGB", (side, side), background)
        x = side * choice.uniform(0.28, 0.72)
        y = side * (ROWS[self.row] + choice.uniform(-0.03, 0.03))
        radius = side * SIZES[self.size] * choice.uniform(0.9, 1.1)
        colour = tuple(min(255, max(0, c + choice.randint(-12, 12))) for c in COLOURS[self.colour])
        SHAPES[self.shape](ImageDraw.Draw(picture), x, y, radius, colour, background)
        return picture.resize((size, size), Image.Resampling.BOX)

    def captions(self, choice: random.Random) -> tuple[str, str, str]:
        """(raw, synthetic, generated)."""
        raw = choice.choice(
            (
                f"{self.colour} {self.shape}",
                f"{self.shape}_{self.colour}_{choice.randint(1, 999):03}.png",
                f"{self.size} {self.colour} {self.shape} clip art",
                f"{self.shape}, {self.colour}, {self.background} background",
            )
        )
        synthetic = choice.choice(SHORT_FORMS).format(self.thing)
        what = _with_article(f"{self.size} {self.colour} {self.shape}")
        place = "in the middle" if self.row == "middle" else f"at the {self.row}"
        generated = f"{what[0].upper()}{what[1:]} {place} of {_with_article(self.background)} background."
        return raw, synthetic, generated


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def held_out_pairs() -> set[tuple[str, str]]:
    """The (colour, shape) pairs that training never shows: a quarter, evenly spread over colours and shapes."""
    return {
        (colour, shape)
        for (i, colour), (j, shape) in product(enumerate(COLOURS), enumerate(SHAPES))
        if (i + 3 * j) % 4 == 0
    }


def scenes(held_out: bool) -> Iterator[Scene]:
    """Every scene of the training or of the held-out pairs, in a fixed order."""
    pairs = held_out_pairs()
    for values in product(COLOURS, SHAPES, SIZES, ROWS, BACKGROUNDS):
        if (values[:2] in pairs) == held_out:
            yield Scene(*values)


def recipe(size: int) -> dict[str, Any]:
    return {"name": "shapes", "version": VERSION, "size": size}


def make(folder: Path, size: int) -> dict[str, Any]:
    """Fill `folder` and return its statistics (see `prepared` for the layout)."""
    choice = random.Random(0)
    train = choice.choices(list(scenes(held_out=False)), k=NUM_TRAIN)
    test = list(scenes(held_out=True))
    rows = {}
    for split, split_scenes in (("train", train), ("test", test)):
        (folder / "images" / split).mkdir(parents=True)
        rows[split] = []
        for number, scene in enumerate(split_scenes):
            path = f"images/{split}/{number:05}.jpg"
            scene.draw(size, choice).save(folder / path, quality=90)
            rows[split].append((path, *scene.captions(choice), scene.colour, scene.shape))
    columns = ("image", *prepared.CAPTION_COLUMNS, "colour", "shape")
    paths = [row[0] for row in rows["test"]]
    retrieval = [(row[0], row[3].rstrip("."), row[1], row[3], *row[4:]) for row in rows["test"]]
    classes = {
        "unseen_pair": [scene.thing for scene in test],
        "unseen_pair_shape": [_with_article(scene.shape) for scene in test],
        "unseen_pair_colour": [f"{scene.colour} things" for scene in test],
    }
    (folder / "ATTRIBUTION.md").write_text("Drawn by `rwkv-clip prepare shapes`; free of any licence (CC0-1.0).\n")
    return {
        "train": prepared.write_table(folder / "train.tsv", columns, rows["train"]),
        "val": prepared.write_table(folder / "val.tsv", columns, rows["test"]),
        "retrieval": {"unseen_pair": prepared.write_retrieval(folder, "unseen_pair", retrieval, ("colour", "shape"))},
        "zero_shot": {
            name: prepared.write_zero_shot(folder, name, list(zip(paths, labels, strict=True)), TEMPLATES)
            for name, labels in classes.items()
        },
        "held_out_pairs": sorted(" ".join(pair) for pair in held_out_pairs()),
    }
