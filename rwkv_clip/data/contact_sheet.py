"""A picture of some records with their captions, as training sees them."""

from __future__ import annotations

import math
import os
import textwrap

import numpy as np

from ..errors import UserError
from .checks import token_fault
from .dataset import Dataset
from .tokenizer import CONTEXT_LENGTH, decode

_TILE = 224
_LINE_HEIGHT = 13
_COLUMNS_OF_TEXT = 36
_LINES_PER_CAPTION = 4
_MARGIN = 8


def sample_ids(count: int, size: int) -> np.ndarray:
    """`count` ids (all, if there are fewer) spread evenly over `size` records."""
    return np.linspace(0, size - 1, min(count, size)).astype(np.int64)


def write_contact_sheet(dataset: Dataset, count: int, path: str | os.PathLike) -> int:
    """Draw `count` records, spread over the data set, with their captions into an image file.

    Images come from nvImageCodec, which the training pipeline decodes with. A record that cannot be used gets a grey
    tile with the reason. Returns the number of records drawn.

    Raises:
        UserError: the file cannot be written, or Pillow does not know its extension.
    """
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    ids = sample_ids(count, len(dataset)).tolist()
    columns = max(1, math.ceil(math.sqrt(len(ids))))
    tiles = [_tile(dataset, i) for i in ids]
    grid = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    heights = [_TILE + max(len(text) for _, text in row) * _LINE_HEIGHT + 2 * _MARGIN for row in grid]
    width = _TILE + 2 * _MARGIN
    sheet = Image.new("RGB", (columns * width, sum(heights)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default_imagefont()  # load_default()'s has no letter with an accent
    top = _MARGIN
    for row, height in zip(grid, heights, strict=True):
        for column, (image, text) in enumerate(row):
            left = column * width + _MARGIN
            if image is None:
                draw.rectangle((left, top, left + _TILE, top + _TILE), fill="lightgrey")
            else:
                picture = ImageOps.contain(Image.fromarray(image), (_TILE, _TILE))
                sheet.paste(picture, (left + (_TILE - picture.width) // 2, top + (_TILE - picture.height) // 2))
            for number, line in enumerate(text):
                draw.text((left, top + _TILE + number * _LINE_HEIGHT), line, fill="black", font=font)
        top += height
    try:
        sheet.save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the picture {path}: {error}") from None
    return len(ids)


def _tile(dataset: Dataset, i: int) -> tuple[np.ndarray | None, list[str]]:
    """One record's image, uint8 [H, W, 3] or None, and the lines of text under it."""
    shard, position = dataset.locate(i)
    lines = _wrapped(f"{dataset.files[shard].rec_path.stem} key {dataset.files[shard].key_name(position)}", 2)
    try:
        record = dataset.read(i)
    except UserError as error:
        return None, lines + _wrapped(str(error), 8)
    image = decode_image(record.payload)
    lines.append("image cannot be decoded" if image is None else f"{image.shape[1]} x {image.shape[0]} px")
    if len(record.label) != dataset.label_width:
        return image, lines + _wrapped(f"label of {len(record.label)} numbers, not {dataset.label_width}", 4)
    fault = token_fault(record.label)
    if fault is not None:
        return image, lines + _wrapped(fault, 4)
    for name, text in zip(dataset.caption_names, decode(record.label.reshape(-1, CONTEXT_LENGTH)), strict=True):
        lines += _wrapped(f"{name}: {text}", _LINES_PER_CAPTION)
    return image, lines


def decode_image(payload) -> np.ndarray | None:
    """An encoded image as uint8 [H, W, 3], EXIF rotation applied, or None if it cannot be decoded."""
    from nvidia import nvimgcodec

    decoder = nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
    )
    try:
        image = decoder.decode([nvimgcodec.CodeStream(bytes(payload))])[0]
    except Exception:  # the library raises its own kinds for headers that it cannot read
        return None
    return None if image is None else np.asarray(image.cpu())


def _wrapped(text: str, max_lines: int) -> list[str]:
    """At most `max_lines` lines of what Pillow's built-in font can draw."""
    drawable = text.encode("latin-1", "replace").decode("latin-1")
    lines = textwrap.wrap(drawable, _COLUMNS_OF_TEXT)
    return lines if len(lines) <= max_lines else [*lines[: max_lines - 1], lines[max_lines - 1][:-3] + "..."]
