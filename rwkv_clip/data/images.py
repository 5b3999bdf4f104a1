"""Is this a picture that the training loader will decode? Checked by decoding it in full, as strictly as the loader.

The bytes stay as they are whenever the loader shows them rightly (EXIF orientation included, which it applies). They
are encoded anew, as JPEG, when it would not: alpha (the loader drops it and hidden colours show), CMYK, palettes (the
loader's GPU decoder shows them wrongly), TIFF in LAB or gray with alpha, animations, files of several pages, formats
that it cannot read (GIF, ICO, AVIF), and pictures larger than anyone trains on. Pixels that are floats are refused.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageOps

from .bad_records import MAX_PIXELS

JPEG_QUALITY = 95
MAX_FILE_BYTES = 256 << 20
# Kept as they are when only PIL is there to check them.
COMMON_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP")


class BadImage(Exception):
    """A picture that cannot be trained on.

    Attributes:
        kind: the reason in a few words, the same for all pictures of this fault; detail: what was found.
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Limits:
    """Which pictures are left out or made smaller.

    Attributes:
        min_side: the shorter side must have this many pixels.
        max_aspect: the longer side may be this many times the shorter one.
        max_pixels: pictures of more pixels are left out by their header, without decoding them.
        max_side: a longer side above this is scaled down to it; 0 keeps every size.
    """

    min_side: int = 16
    max_aspect: float = 10.0
    max_pixels: int = MAX_PIXELS
    max_side: int = 2048


@dataclass(frozen=True)
class _Header:
    codec: str
    width: int
    height: int
    num_channels: int
    num_images: int
    plain_jpeg: bool = False  # YCbCr in one of the usual subsamplings


def has_strict_decoder() -> bool:
    """Whether nvImageCodec, the decoder behind DALI, is installed."""
    try:
        return importlib.util.find_spec("nvidia.nvimgcodec") is not None
    except ModuleNotFoundError:  # no package `nvidia` at all
        return False


class ImageChecker:
    """Checks encoded pictures and encodes anew those that need it.

    Args:
        limits: what is left out or made smaller.
        decoder_messages: returns what the decoder wrote to stderr since the last call, where that is captured: the
            decoder gives its reasons nowhere else.
    """

    def __init__(self, limits: Limits | None = None, decoder_messages: Callable[[], str] = lambda: ""):
        self.limits = limits or Limits()
        self.decoder_messages = decoder_messages
        self._decoder = _NvDecoder() if has_strict_decoder() else _PillowDecoder()
        # A header with absurd sizes is refused by `limits`, not by Pillow's own guard.
        Image.MAX_IMAGE_PIXELS = None

    def __call__(self, data: bytes) -> tuple[bytes, str | None]:
        """Check one picture.

        Returns:
            (payload, None) with the bytes as they were, or (new JPEG bytes, why they were encoded anew).

        Raises:
            BadImage: with the reason.
        """
        if not data:
            raise BadImage("empty file")
        if len(data) > MAX_FILE_BYTES:
            raise BadImage("file too large", f"{len(data) >> 20} MB, at most {MAX_FILE_BYTES >> 20} MB")
        header = self._decoder.header(data)
        if header is None:
            return self._rescue(data, self._decoder_reason())
        self._check_size(header.width, header.height)
        reason = self._why_encode_anew(data, header)
        if not self._decoder.decodes(data, header):
            return self._rescue(data, self._decoder_reason())
        return (data, None) if reason is None else (self._encode(data), reason)

    def _check_size(self, width: int, height: int) -> None:
        short, long = sorted((width, height))
        if width * height > self.limits.max_pixels:
            raise BadImage("too large", f"{width} x {height}, at most {self.limits.max_pixels / 1e6:g} million pixels")
        if short < self.limits.min_side:
            raise BadImage("too small", f"{width} x {height}, the shorter side needs {self.limits.min_side} pixels")
        if long > self.limits.max_aspect * short:
            raise BadImage("too long", f"{width} x {height}, the sides may differ {self.limits.max_aspect:g} times")

    def _why_encode_anew(self, data: bytes, header: _Header) -> str | None:
        if header.codec == "jpeg":
            if header.num_channels not in (1, 3):
                return "CMYK"
        elif header.num_images > 1:
            return "several pages"
        else:
            reason = _hidden_trouble(data)
            if reason is not None:
                return reason
        if self.limits.max_side and max(header.width, header.height) > self.limits.max_side:
            return "scaled down"
        return None

    def _rescue(self, data: bytes, decoder_reason: str) -> tuple[bytes, str]:
        """Encode anew what the loader cannot read and Pillow can, in full."""
        try:
            picture = Image.open(io.BytesIO(data))
        except Exception:  # Pillow's readers fail in many ways on broken headers
            raise BadImage("not a picture", _what_is_it(data)) from None
        if picture.format in ("JPEG", "MPO"):  # Pillow would fill the missing part with gray
            raise BadImage("cannot be decoded", decoder_reason)
        self._check_size(*picture.size)
        return self._encode(data), f"format {picture.format}"

    def _encode(self, data: bytes) -> bytes:
        """The first frame, upright, over white, at most `max_side` large, as JPEG."""
        limit = self.limits.max_side
        try:
            picture = Image.open(io.BytesIO(data))
            if picture.mode == "F":
                raise BadImage("pixels are floats", "nothing tells their black and white: save it with 8 or 16 bits")
            if limit:
                picture.draft("RGB", (limit, limit))
            picture = on_white(ImageOps.exif_transpose(picture))
            if limit and max(picture.size) > limit:
                picture.thumbnail((limit, limit), Image.Resampling.LANCZOS)
            out = io.BytesIO()
            picture.save(out, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        except BadImage:
            raise
        except Exception as error:
            raise BadImage("cannot be decoded", f"{type(error).__name__}: {error}"[:200]) from None
        return out.getvalue()

    def _decoder_reason(self) -> str:
        """The decoder's last message without its colours and names."""
        lines = [line for line in self.decoder_messages().splitlines() if "ERROR" in line]
        return lines[-1].rpartition("] ")[2].replace("\x1b[0m", "")[:200] if lines else ""


def on_white(picture: Image.Image) -> Image.Image:
    """RGB or gray version of a picture of any mode, transparent parts white."""
    if picture.mode.startswith("I;16") or picture.mode == "I":
        return picture.convert("I").point(lambda value: value / 256).convert("L")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGB", picture.size, "white")
        white.paste(picture, mask=picture.getchannel("A"))
        return white
    return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")


def _hidden_trouble(data: bytes) -> str | None:
    """What the loader would show wrongly although it decodes it."""
    try:
        picture = Image.open(io.BytesIO(data))
        if getattr(picture, "is_animated", False) and picture.format not in ("PNG", "MPO"):
            return "animation"
        if picture.mode in ("CMYK", "LAB", "F"):
            return picture.mode
        if picture.has_transparency_data and picture.convert("RGBA").getchannel("A").getextrema()[0] < 255:
            return "alpha over white"
        if picture.mode == "P":
            return "palette"
        if picture.mode == "LA" and picture.format == "TIFF":  # shown with the alpha as its green
            return "gray with alpha"
    except Exception:  # the strict decoder has the last word on what is broken
        return None
    return None


def _what_is_it(data: bytes) -> str:
    start = data[:400].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "it is an HTML page"
    if b"<svg" in start:
        return "it is SVG: draw it as PNG first"
    if not data.strip(b"\0"):
        return "it holds zeros only"
    return f"it starts with {data[:12]!r}"


class _NvDecoder:
    """nvImageCodec on the CPU: the code and the settings that DALI's decoders run."""

    def __init__(self):
        from nvidia import nvimgcodec

        self._open = nvimgcodec.CodeStream
        self._decode = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
            max_num_cpu_threads=1,
        ).decode
        self._colour = nvimgcodec.DecodeParams(color_spec=nvimgcodec.ColorSpec.SRGB)
        # All of the file is read and checked, but only the luma is turned into pixels: a third less work.
        self._luma = nvimgcodec.DecodeParams(color_spec=nvimgcodec.ColorSpec.GRAY)
        subsampling = getattr(nvimgcodec, "ChromaSubsampling", None)  # older versions do not tell it
        self._usual = tuple(getattr(subsampling, f"CSS_{name}", None) for name in (420, 422, 444, 440))
        self._ycc = nvimgcodec.ColorSpec.SYCC

    def header(self, data: bytes) -> _Header | None:
        try:
            stream = self._open(data)
            subsampling = getattr(stream, "chroma_subsampling", "unknown")
            plain = stream.codec_name == "jpeg" and stream.color_spec == self._ycc and subsampling in self._usual
            num_images = getattr(stream, "num_images", 1)
            return _Header(stream.codec_name, stream.width, stream.height, stream.num_channels, num_images, plain)
        except RuntimeError:
            return None

    def decodes(self, data: bytes, header: _Header) -> bool:
        try:
            params = self._luma if header.plain_jpeg else self._colour
            return self._decode(self._open(data), params=params) is not None
        except RuntimeError:
            return False


class _PillowDecoder:
    """Stands in where nvImageCodec is missing: strict about the end of a JPEG, which Pillow itself is not."""

    def header(self, data: bytes) -> _Header | None:
        try:
            picture = Image.open(io.BytesIO(data))
        except Exception:
            return None
        if picture.format not in COMMON_FORMATS:
            return None
        codec = "jpeg" if picture.format in ("JPEG", "MPO") else picture.format.lower()
        return _Header(codec, *picture.size, len(picture.getbands()), 1)

    def decodes(self, data: bytes, header: _Header) -> bool:
        try:
            picture = Image.open(io.BytesIO(data))
            picture.load()
        except Exception:
            return False
        # The end marker must follow the last scan; what comes after it does no harm.
        return picture.format not in ("JPEG", "MPO") or data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda")
