"""A picture of what a model retrieves: each row a caption and the first pictures found for it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from torch import Tensor

from .datasets import RetrievalSet

QUERIES = 8
FOUND = 5
SIDE = 96
TEXT_WIDTH = 220
FRAME = 4
RIGHT, WRONG = (40, 160, 70), (200, 60, 50)


def retrieval_picture(dataset: RetrievalSet, image_features: Tensor, text_features: Tensor) -> np.ndarray:
    """uint8 [H, W, 3] for TensorBoard (`dataformats="HWC"`): some captions, and the 5 best pictures of each.

    image_features: [I, D], text_features: [T, D], in the set's order. The caption's own picture has a green frame,
    others a red one.
    """
    from PIL import Image, ImageDraw

    # Of the last column, which in prepared sets is the one written as a sentence.
    candidates = [i for i, column in enumerate(dataset.column_of_caption) if column == dataset.columns[-1]]
    count = min(QUERIES, len(candidates))
    queries = [candidates[i * len(candidates) // count] for i in range(count)]
    found = min(FOUND, len(dataset.images))
    cell = SIDE + 2 * FRAME
    canvas = Image.new("RGB", (TEXT_WIDTH + found * cell, count * cell), "white")
    draw = ImageDraw.Draw(canvas)
    best = (text_features[queries] @ image_features.T).topk(found, dim=1).indices.tolist()
    for row, (query, images) in enumerate(zip(queries, best, strict=True)):
        caption = dataset.captions[query].encode("ascii", "replace").decode()
        lines = textwrap.wrap(caption, 34)[:7]
        draw.multiline_text((8, row * cell + 8), "\n".join(lines), fill="black")
        for column, image in enumerate(images):
            left, top = TEXT_WIDTH + column * cell, row * cell
            colour = RIGHT if image == dataset.image_of_caption[query] else WRONG
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill=colour)
            canvas.paste(_thumbnail(dataset.images[image]), (left + FRAME, top + FRAME))
    return np.asarray(canvas)


def _thumbnail(path: Path):
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return ImageOps.pad(ImageOps.exif_transpose(image).convert("RGB"), (SIDE, SIDE), color="white")
