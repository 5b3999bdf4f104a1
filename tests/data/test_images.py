from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from rwkv_clip.data import images
from rwkv_clip.data.bad_records import decode_faults
from rwkv_clip.data.images import BadImage, ImageChecker, Limits, on_white

# Rotated by its EXIF tag: the picture as a person sees it has blue where the file has red.
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 50, 220), "yellow": (230, 220, 40)}
UPRIGHT = ["red", "green", "blue", "yellow"]


@pytest.fixture(scope="module")
def check() -> ImageChecker:
    return ImageChecker(Limits(min_side=1, max_aspect=10_000))


def dali_decode(data: bytes) -> np.ndarray | None:
    """What the training pipeline's decoder makes of encoded bytes, on the CPU: uint8 [H, W, 3]; None if it fails."""
    dali = pytest.importorskip("nvidia.dali")

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline():
        encoded = dali.fn.external_source(source=lambda _: np.frombuffer(data, np.uint8), batch=False)
        return dali.fn.decoders.image(encoded, device="cpu", output_type=dali.types.RGB)

    try:
        pipe = pipeline()
        pipe.build()
        return np.asarray(pipe.run()[0].at(0))
    except RuntimeError:
        return None


def quadrants(pixels: np.ndarray) -> list[str]:
    """The colour names of the quadrants (top left, top right, bottom left, bottom right) within 15 of their means."""
    height, width = pixels.shape[:2]
    names = []
    for row in (slice(8, height // 2 - 8), slice(height // 2 + 8, height - 8)):
        for column in (slice(8, width // 2 - 8), slice(width // 2 + 8, width - 8)):
            mean = pixels[row, column].reshape(-1, 3).mean(0)
            near = [name for name, colour in COLOURS.items() if np.abs(mean - colour).max() <= 15]
            names += near or [str(mean.round())]
    return names


def encode(picture: Image.Image, format: str, **options) -> bytes:
    out = io.BytesIO()
    picture.save(out, format, **options)
    return out.getvalue()


KEPT = [
    "rgb.jpg",
    "gray.jpg",
    "progressive.jpg",
    "sub444.jpg",
    "exif_rot6.jpg",
    "multi.mpo.jpg",
    "trailing_garbage.jpg",
]
KEPT += ["rgb.png", "png_named.jpg", "lossy.webp", "rgb.bmp", "rgb.tiff", "rgb.jp2", "odd_17x13.jpg"]


@pytest.mark.parametrize("name", KEPT)
def test_what_the_loader_shows_rightly_keeps_its_bytes(fixtures, check, name):
    data = (fixtures / "img" / name).read_bytes()
    assert check(data) == (data, None)


@pytest.mark.parametrize("name", ["trunc_60pct.jpg", "trunc_header.jpg", "html_404.jpg", "zero_bytes.jpg"])
def test_D1_broken_pictures_are_refused_like_the_loader_refuses_them(fixtures, check, name):
    data = (fixtures / "img" / name).read_bytes()
    with pytest.raises(BadImage):
        check(data)
    if data:
        assert dali_decode(data) is None


@pytest.mark.parametrize("cut", [1, 2, 3, 10, 100, 1000])
@pytest.mark.parametrize("name", ["rgb.jpg", "progressive.jpg", "rgb.png", "lossy.webp"])
def test_D1_the_verdict_on_a_cut_file_is_the_loaders(fixtures, check, name, cut):
    data = (fixtures / "img" / name).read_bytes()[:-cut]
    try:
        payload, change = check(data)
    except BadImage:
        assert dali_decode(data) is None
    else:
        assert change is not None or payload == data
        assert dali_decode(payload) is not None


@pytest.mark.parametrize("name", ["rgb.jpg", "progressive.jpg", "sub444.jpg"])
def test_D1_the_quicker_check_of_jpegs_gives_the_verdict_of_a_decode_in_colour(fixtures, check, name):
    """Damage anywhere: both ways read the whole file."""
    whole = (fixtures / "img" / name).read_bytes()
    rng = np.random.default_rng(0)
    header = check._decoder.header(whole)
    assert header.plain_jpeg
    verdicts = []
    for i in range(200):
        data = bytearray(whole[: rng.integers(len(whole) // 2, len(whole))] if i % 4 == 0 else whole)
        for position in rng.integers(len(data), size=rng.integers(4)):
            data[position] = rng.integers(256)
        quick = check._decoder.decodes(bytes(data), header)
        assert quick == check._decoder.decodes(bytes(data), replace(header, plain_jpeg=False))
        verdicts.append(quick)
    assert 20 < sum(verdicts) < 180


def test_reasons_say_what_was_found(check):
    for data, reason in [
        (b"", "empty file"),
        (b"<!DOCTYPE html><html>404", "HTML page"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\0" * 5000, "zeros only"),
        (b"PK\x03\x04 a zip file", "starts with"),
    ]:
        with pytest.raises(BadImage, match=reason):
            check(data)


def test_D4_cmyk_is_encoded_anew_with_its_colours(fixtures, check):
    payload, change = check((fixtures / "img/cmyk_adobe.jpg").read_bytes())
    assert change == "CMYK"
    assert Image.open(io.BytesIO(payload)).mode == "RGB"
    assert quadrants(dali_decode(payload)) == UPRIGHT


def test_D6_a_rotated_photo_keeps_its_tag_so_that_the_decoder_turns_it_once(fixtures, check):
    payload, _ = check((fixtures / "img/exif_rot6.jpg").read_bytes())
    pixels = dali_decode(payload)
    assert pixels.shape == (160, 120, 3)
    assert quadrants(pixels) == ["blue", "red", "yellow", "green"]


@pytest.mark.parametrize("format", ["GIF", "PNG", "TIFF", "JPEG"])
def test_D6_encoding_anew_turns_the_picture_and_drops_the_tag(fixtures, format):
    """Scaled down, or of a format that is always encoded anew: turned once, never twice."""
    picture = Image.open(fixtures / "img/rgb.jpg")
    exif = Image.Exif()
    exif[0x112] = 6
    data = encode(picture, format, **({} if format == "GIF" else {"exif": exif}))
    payload, change = ImageChecker(Limits(max_side=100))(data)
    assert change in ("scaled down", "format GIF")
    pixels = dali_decode(payload)
    expected = UPRIGHT if format == "GIF" else ["blue", "red", "yellow", "green"]
    assert max(pixels.shape) == 100
    assert quadrants(pixels) == expected


def test_D8_a_huge_picture_is_refused_by_its_header(fixtures):
    with pytest.raises(BadImage, match="14000 x 14000, at most 64 million pixels"):
        ImageChecker()((fixtures / "img/huge_14000x14000_gray.jpg").read_bytes())


def test_D8_a_header_that_lies_about_its_size_costs_no_memory(check):
    """A PNG of 40 bytes that claims 65,000 x 65,000 pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 65000, 65000, 8, 2, 0, 0, 0))
    with pytest.raises(BadImage, match="too large"):
        check(bomb + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("odd_1x1.jpg", "too small"), ("odd_1x600.jpg", "too small"), ("odd_3000x2.jpg", "too small"),
     ("odd_17x13.jpg", "too small: 17 x 13")],
)  # fmt: skip
def test_D10_extreme_shapes_are_refused_by_the_documented_limits(fixtures, name, reason):
    with pytest.raises(BadImage, match=reason):
        ImageChecker(Limits(min_side=16))((fixtures / "img" / name).read_bytes())


def test_D10_the_aspect_limit_counts_whichever_side_is_longer():
    check = ImageChecker(Limits(min_side=16, max_aspect=4))
    for size, fine in [((64, 16), True), ((16, 64), True), ((65, 16), False), ((16, 65), False)]:
        data = encode(Image.new("RGB", size), "JPEG")
        if fine:
            assert check(data)[0] == data
        else:
            with pytest.raises(BadImage, match="too long"):
                check(data)


@pytest.mark.parametrize(
    ("name", "change"),
    [("rgba.png", "alpha over white"), ("rgba.webp", "alpha over white"), ("palette_trns.png", "alpha over white"),
     ("palette.png", "palette"), ("anim.webp", "animation")],
)  # fmt: skip
def test_alpha_palettes_and_animations_become_what_a_person_sees(fixtures, check, name, change):
    data = (fixtures / "img" / name).read_bytes()
    payload, found = check(data)
    assert found == change
    seen = Image.open(io.BytesIO(data))
    expected = np.asarray(on_white(seen).convert("RGB")).astype(int)
    assert np.abs(dali_decode(payload) - expected).mean() < 4


def test_opaque_alpha_is_no_reason_to_encode_anew(check):
    data = encode(Image.new("RGBA", (32, 32), (10, 200, 30, 255)), "PNG")
    assert check(data) == (data, None)


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        ("GIF", "RGB"),
        ("ICO", "RGBA"),
        ("TIFF", "CMYK"),
        ("PNG", "I;16"),
        ("PNG", "LA"),
        ("PCX", "RGB"),
        ("TIFF", "LAB"),
        ("TIFF", "LA"),
        ("TIFF", "RGBA"),
        ("TIFF", "I;16"),
        ("TIFF", "YCbCr"),
        ("JPEG2000", "RGBA"),
        ("PPM", "RGB"),
    ],
)
def test_any_format_ends_as_something_the_loader_decodes_and_the_checks_of_packed_data_accept(check, format, mode):
    picture = Image.new("RGB", (48, 48), (200, 100, 50))
    if mode == "I;16":
        picture = Image.fromarray(np.full((48, 48), 40_000, np.uint16))
    elif mode != "RGB":
        picture = picture.convert(mode)
    payload, _ = check(encode(picture, format))
    assert decode_faults([payload]) == [None]
    expected = (156,) * 3 if mode == "I;16" else (128,) * 3 if mode == "LA" else (200, 100, 50)
    tolerance = 12 if mode == "LA" else 4
    assert np.abs(dali_decode(payload).reshape(-1, 3).mean(0) - expected).max() < tolerance


@pytest.mark.parametrize("options", [dict(format="TIFF", big_tiff=True), dict(format="PPM"), dict(format="JPEG2000")])
def test_what_keeps_its_bytes_is_no_bad_record(check, options):
    data = encode(Image.new("RGB", (40, 30), (200, 100, 50)), **options)
    assert check(data) == (data, None) and decode_faults([data]) == [None]
    assert decode_faults([data[:20], b"GIF89a.."])[1].startswith("it starts with b'GIF89a..', no format that")


@pytest.mark.parametrize("format", ["TIFF", "PPM"])
def test_pixels_that_are_floats_are_refused(check, format):
    data = encode(Image.fromarray(np.full((48, 48), 120, np.float32)), format)
    with pytest.raises(BadImage, match="pixels are floats: .*: save it with 8 or 16 bits"):
        check(data)


def test_a_large_side_is_scaled_down_and_zero_keeps_it():
    data = encode(Image.new("RGB", (600, 300), (9, 9, 9)), "JPEG")
    payload, change = ImageChecker(Limits(max_side=200))(data)
    assert change == "scaled down"
    assert Image.open(io.BytesIO(payload)).size == (200, 100)
    assert ImageChecker(Limits(max_side=0))(data) == (data, None)


def test_pages_of_a_document_become_its_first_page(check):
    first, second = Image.new("RGB", (32, 32), (250, 0, 0)), Image.new("RGB", (32, 32), (0, 250, 0))
    payload, change = check(encode(first, "TIFF", save_all=True, append_images=[second]))
    assert change == "several pages"
    assert dali_decode(payload)[16, 16].tolist() == pytest.approx([250, 0, 0], abs=4)


@pytest.mark.parametrize(
    "name", ["trunc_60pct.jpg", "trunc_header.jpg", "html_404.jpg", "rgb.jpg", "rgba.png", "rgb.jp2"]
)
def test_without_nvimagecodec_pillow_gives_the_same_verdict_on_common_faults(fixtures, check, monkeypatch, name):
    monkeypatch.setattr(images, "has_strict_decoder", lambda: False)
    pillow = ImageChecker(Limits(min_side=1, max_aspect=10_000))
    data = (fixtures / "img" / name).read_bytes()
    try:
        check(data)
    except BadImage:
        with pytest.raises(BadImage):
            pillow(data)
    else:
        pillow(data)
    with pytest.raises(BadImage):
        pillow((fixtures / "img/rgb.jpg").read_bytes()[:-2])


def test_random_damage_never_escapes_as_another_error(fixtures, check):
    rng = np.random.default_rng(0)
    sources = [(fixtures / "img" / name).read_bytes() for name in ("rgb.jpg", "rgba.png", "anim.webp", "rgb.tiff")]
    for _ in range(150):
        data = bytearray(sources[rng.integers(len(sources))])
        for position in rng.integers(0, len(data), rng.integers(1, 20)):
            data[position] = rng.integers(256)
        try:
            payload, _ = check(bytes(data))
        except BadImage:
            continue
        assert payload
