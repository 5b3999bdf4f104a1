"""One drawing on white: SVG text in, JPEG file, small copy and colour names out."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import UserError

JPEG_QUALITY = 90
THUMBNAIL_SIZE = 16


@dataclass(frozen=True)
class Rendered:
    """What the rest of the build needs of a picture.

    Attributes:
        thumbnail: RGB bytes of the picture at 16 x 16, for finding pictures that look alike.
        colours: names of its one or two main colours.
    """

    thumbnail: bytes
    colours: tuple[str, ...]


def require_renderer() -> None:
    """Raise a UserError when the SVG renderer is not installed."""
    try:
        import resvg_py  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the pictograms are drawn with resvg-py, which cannot be imported ({error}): run `pip install resvg-py`, "
            "or build the rendered set with `rwkv-clip prepare shapes OUT`"
        ) from None


def render(svg: str, size: int, path: Path) -> Rendered | str:
    """Draw `svg` with its longer side `size` pixels into the JPEG `path`.

    Returns:
        A `Rendered`, or the reason why there is no picture, as text.
    """
    import resvg_py

    wide, high = _aspect(svg)
    # The longer side is given and the shorter one follows. Fonts of the machine stay out of the result.
    side = {"width": size} if wide >= high else {"height": size}
    try:
        png = resvg_py.svg_to_bytes(svg_string=svg, skip_system_fonts=True, dpi=96.0, **side)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the renderer is no Exception
        return f"cannot be drawn: {type(error).__name__}: {str(error)[:80]}"
    picture = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    if picture.getchannel("A").getextrema()[1] < 40:
        return "transparent all over"
    on_white = Image.new("RGB", picture.size, "white")
    on_white.paste(picture, mask=picture.getchannel("A"))
    darkest, brightest = on_white.convert("L").getextrema()
    if brightest - darkest < 12:
        return "blank"
    path.parent.mkdir(parents=True, exist_ok=True)
    on_white.save(path, "JPEG", quality=JPEG_QUALITY)
    small = on_white.resize((THUMBNAIL_SIZE, THUMBNAIL_SIZE), Image.Resampling.BOX)
    return Rendered(small.tobytes(), main_colours(picture))


def _aspect(svg: str) -> tuple[float, float]:
    """Width and height of the view box; a square where it has none."""
    tag = svg[svg.find("<svg") :]
    tag = tag[: tag.find(">")]
    if 'viewBox="' not in tag:
        return 1.0, 1.0
    _, _, width, height = tag.split('viewBox="')[1].split('"')[0].replace(",", " ").split()
    return float(width), float(height)


def main_colours(picture: Image.Image) -> tuple[str, ...]:
    """Names of the one or two colours that cover most of an RGBA picture's opaque pixels."""
    small = np.asarray(picture.resize((24, 24))).reshape(-1, 4)
    opaque = small[small[:, 3] > 128][:, :3]
    if not len(opaque):
        return ("black",)
    ranked = Counter(_names(opaque).tolist()).most_common(2)
    return tuple(name for name, count in ranked if count >= 0.2 * len(opaque)) or (ranked[0][0],)


def _names(pixels: np.ndarray) -> np.ndarray:
    """A colour name for each RGB pixel, uint8 [N, 3] -> str [N]."""
    hsv = np.asarray(Image.fromarray(pixels[None]).convert("HSV"))[0].astype(int)
    hue, saturation, value = hsv[:, 0] * 360 // 256, hsv[:, 1], hsv[:, 2]
    rules = [
        (value < 60, "black"),
        ((saturation < 36) & (value > 225), "white"),
        (saturation < 36, "gray"),
        # brown is a dark orange, beige and pink are pale ones
        ((hue < 45) & (value < 185) & (hue >= 12), "brown"),
        ((hue < 12) & (value < 115), "brown"),
        ((hue >= 15) & (hue < 45) & (saturation < 120), "beige"),
        (((hue < 15) | (hue >= 345)) & (saturation < 130), "pink"),
        (hue < 12, "red"),
        (hue < 42, "orange"),
        ((hue < 70) & (value < 130), "brown"),
        (hue < 70, "yellow"),
        (hue < 165, "green"),
        (hue < 195, "teal"),
        (hue < 258, "blue"),
        (hue < 300, "purple"),
        (hue < 345, "pink"),
    ]
    return np.select([mask for mask, _ in rules], [name for _, name in rules], "red")
