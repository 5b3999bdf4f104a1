"""What the decoded pictures look like, in training and in validation."""

from __future__ import annotations

import hashlib
import io
import os
import time

import numpy as np
import pytest
import torch
from loader_data import CPU, corners, eval_loader, pixels_of, small_dataset, train_loader, write_pair
from PIL import Image

from rwkv_clip.data.batch_reader import BatchReader
from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.data.loader import Loader, check_input_size
from rwkv_clip.data.pipeline import DecoderSettings, decoder_arguments, eval_regions
from rwkv_clip.errors import UserError
from rwkv_clip.model.transform import ImageTransform

RED, GREEN, BLUE, YELLOW = (220, 30, 30), (30, 200, 40), (30, 50, 220), (230, 220, 40)
UPRIGHT = {"TL": RED, "TR": GREEN, "BL": BLUE, "BR": YELLOW}
# exif_rot6.jpg is to be turned by a quarter.
TURNED = {"TL": BLUE, "TR": RED, "BL": YELLOW, "BR": GREEN}
FLIPPED = {"TL": "TR", "TR": "TL", "BL": "BR", "BR": "BL"}

DECODABLE = [
    "anim.webp", "cmyk_adobe.jpg", "exif_rot6.jpg", "lossy.webp", "multi.mpo.jpg", "palette.png", "png_named.jpg",
    "progressive.jpg", "rgb.bmp", "rgb.jp2", "rgb.jpg", "rgb.png", "rgb.tiff", "rgba.png", "sub444.jpg",
    "trailing_garbage.jpg",
]  # fmt: skip


def dataset_of(folder, path):
    return open_dataset(write_pair(folder / "one", [path.read_bytes()]))


def train_views(dataset, count, image_size=64):
    """The first record's picture in `count` epochs, [size, size, 3] of 0 to 255."""
    with train_loader(dataset, 1, image_size=image_size) as loader:
        return [pixels_of(next(loader.epoch(epoch)).images[0]) for epoch in range(count)]


def eval_view(dataset, image_size=64):
    with eval_loader(dataset, 1, image_size=image_size) as loader:
        return pixels_of(next(loader.epoch(0)).images[0])


def fits(found, expected, tolerance):
    return all(np.abs(found[name] - expected[name]).max() <= tolerance for name in expected)


def assert_quadrants(path, folder, expected, tolerance=15):
    dataset = dataset_of(folder, path)
    assert fits(corners(eval_view(dataset)), expected, tolerance)
    flipped = {name: expected[FLIPPED[name]] for name in expected}
    seen = []
    for view in train_views(dataset, 12):
        found = corners(view)
        seen.append((fits(found, expected, tolerance), fits(found, flipped, tolerance)))
    assert all(plain or flip for plain, flip in seen)
    assert {plain for plain, _ in seen} == {True, False}, "never flipped, or always"


def test_D4_cmyk_pictures_keep_their_colours(tmp_path, fixtures):
    assert_quadrants(fixtures / "img" / "cmyk_adobe.jpg", tmp_path, UPRIGHT)


def test_D6_exif_orientation_is_applied_once_in_training_and_validation(tmp_path, fixtures):
    assert_quadrants(fixtures / "img" / "exif_rot6.jpg", tmp_path, TURNED)


@pytest.mark.parametrize("name", [name for name in DECODABLE if name not in ("cmyk_adobe.jpg", "exif_rot6.jpg")])
def test_every_format_keeps_its_colours_and_sides(tmp_path, fixtures, name):
    assert_quadrants(fixtures / "img" / name, tmp_path, UPRIGHT)


@pytest.mark.parametrize("name", ["odd_1x1.jpg", "odd_1x600.jpg", "odd_3000x2.jpg", "odd_17x13.jpg"])
def test_D10_extreme_shapes_give_finite_pictures_of_the_full_size(tmp_path, fixtures, name):
    dataset = dataset_of(tmp_path, fixtures / "img" / name)
    for view in [*train_views(dataset, 4, image_size=48), eval_view(dataset, image_size=48)]:
        assert view.shape == (48, 48, 3) and np.isfinite(view).all() and view.min() > -1 and view.max() < 256


def test_D11_records_stored_in_parts_reach_the_decoder_whole(fixtures):
    dataset = open_dataset(fixtures / "rec" / "split")
    batch = BatchReader(dataset).read(np.array([3, 0, 5, 1, 2, 4, 3]))
    digests = [hashlib.md5(payload).hexdigest()[:8] for payload in batch.payloads]
    expected = ["baa29832", "d0888f48", "33b5580f", "4c7ea603", "60cc09e0", "baa29832"]
    assert digests == [expected[i] for i in (3, 0, 5, 1, 2, 4, 3)]
    assert batch.labels[:, 1].tolist() == [303, 300, 305, 301, 302, 304, 303]
    with train_loader(dataset, 3, image_size=64) as loader:
        views = [pixels_of(image) for batch in loader.epoch(0) for image in batch.images]
    assert len(views) == 6
    with eval_loader(dataset, 6, image_size=64) as loader:
        assert all(fits(corners(pixels_of(image)), UPRIGHT, 15) for image in next(loader.epoch(0)).images)


def photo_like(width, height):
    """Smooth shapes with edges."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 120 * np.sin(x / (9 + 5 * c) + y / (13 + c)) * np.cos(y / 17 - c) for c in range(3)]
    pixels = np.stack(waves, -1)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 10, 120)
    return pixels.astype(np.uint8)


@pytest.mark.parametrize("width,height", [(500, 375), (375, 500), (64, 64), (301, 200), (90, 40), (33, 47)])
@pytest.mark.parametrize("image_size", [64, 48])
def test_validation_pictures_agree_with_the_public_image_transform(tmp_path, width, height, image_size):
    image = Image.fromarray(photo_like(width, height))
    out = io.BytesIO()
    image.save(out, "PNG")
    dataset = open_dataset(write_pair(tmp_path / "one", [out.getvalue()]))
    ours = eval_view(dataset, image_size)
    theirs = pixels_of(ImageTransform(image_size)(image))
    # PIL rounds to whole levels after each of its two passes, and weighs the pixels beyond the border otherwise.
    assert np.abs(ours - theirs).max() <= 6 and np.abs(ours - theirs).mean() <= 0.5


@pytest.mark.parametrize("name", ["rgb.jpg", "exif_rot6.jpg", "gray.jpg", "rgba.png", "rgba.webp", "palette_trns.png"])
def test_validation_agrees_with_the_public_transform_on_files(tmp_path, fixtures, name):
    path = fixtures / "img" / name
    with Image.open(path) as image:
        theirs = pixels_of(ImageTransform(64)(image))
    ours = eval_view(dataset_of(tmp_path, path))
    assert np.abs(ours - theirs).mean() <= 0.6 and np.abs(ours - theirs).max() <= 8


def test_the_validation_region_is_the_published_resize_and_centre_crop():
    start, end = eval_regions(np.array([[375, 500], [100, 100], [90, 33]]), 48)
    # 48 x 64 after the resize, then columns 8 to 56 of 64.
    assert np.allclose(start[0], [0, 62.5]) and np.allclose(end[0], [375, 437.5])
    assert np.allclose(start[1], 0) and np.allclose(end[1], 100)
    # 130 x 48 (rounded down from 130.9), rows 41 to 89.
    assert np.allclose(start[2], [41 * 90 / 130, 0]) and np.allclose(end[2], [89 * 90 / 130, 33])


def test_training_pictures_are_the_crops_that_were_chosen(tmp_path):
    """Red grows with x and green with y, so the corners of the picture tell the crop."""
    from rwkv_clip.data.augment import choose, cumulative_caption_weights

    width, height = 250, 200
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    out = io.BytesIO()
    Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8)).save(out, "PNG")
    dataset = open_dataset(write_pair(tmp_path / "one", [out.getvalue()]))
    for epoch, view in enumerate(train_views(dataset, 8, image_size=32)):
        choices = choose(5, epoch, np.array([0]), np.array([[height, width]]), cumulative_caption_weights(3))
        (y0, x0), (h, w) = choices.crop_start[0], choices.crop_shape[0]
        if choices.flip[0]:
            view = view[:, ::-1]
        scale = np.array([w, h]) / 32
        # Centres of the first and the last output pixel.
        assert np.allclose(view[0, 0, :2], [x0, y0] + 0.5 * scale - 0.5, atol=2.0)
        assert np.allclose(view[-1, -1, :2], [x0, y0] + 31.5 * scale - 0.5, atol=2.0)


def test_pixels_are_normalised_with_the_published_mean_and_deviation(tmp_path):
    out = io.BytesIO()
    Image.new("RGB", (20, 20), (255, 0, 128)).save(out, "PNG")
    dataset = open_dataset(write_pair(tmp_path / "one", [out.getvalue()]))
    with train_loader(dataset, 1) as loader:
        images = next(loader.epoch(0)).images
    expected = [(1 - 0.48145466) / 0.26862954, -0.4578275 / 0.26130258, (128 / 255 - 0.40821073) / 0.27577711]
    assert images.dtype == torch.float32
    assert torch.allclose(images[0].mean((1, 2)), torch.tensor(expected), atol=1e-4)


def num_threads(wanted: int) -> int:
    """The process's threads, once they are down to `wanted` or have had time to be."""
    for _ in range(50):
        count = len(os.listdir("/proc/self/task"))
        if count <= wanted:
            break
        time.sleep(0.02)
    return count


def test_a_closed_loader_leaves_no_threads_and_its_batches_stay_valid(tmp_path):
    dataset = small_dataset(tmp_path, 32)
    with train_loader(dataset, 4) as loader:  # whatever the libraries start once for the process
        list(loader.epoch(0))
    before = len(os.listdir("/proc/self/task"))
    kept = []
    for _ in range(5):
        with train_loader(dataset, 4) as loader:
            kept.append(next(loader.epoch(0)))
            assert len(os.listdir("/proc/self/task")) > before
    assert num_threads(before) <= before
    assert all(torch.equal(batch.images, kept[0].images) for batch in kept)


def test_a_dropped_loader_ends_its_threads_too(tmp_path):
    dataset = small_dataset(tmp_path, 8)
    before = len(os.listdir("/proc/self/task"))
    loader = train_loader(dataset, 4)
    iterator = loader.epoch(0)
    next(iterator)
    del loader, iterator
    assert num_threads(before) <= before


@pytest.mark.parametrize(
    "options", [{"num_threads": 0}, {"prefetch": 0}, {"hw_decoder_load": 1.5}, {"memory_padding": -1}]
)
def test_decoder_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(UserError):
        DecoderSettings(**options)


def test_the_decoder_on_a_gpu_gets_the_published_padding_and_the_jpeg_engine_unless_told_otherwise():
    cuda = torch.device("cuda", 0)
    published = {"hw_decoder_load": 1.0, "device_memory_padding": 211_025_920, "host_memory_padding": 140_544_512}
    assert published.items() <= decoder_arguments(cuda, DecoderSettings()).items()
    told = decoder_arguments(cuda, DecoderSettings(hw_decoder_load=0.9, memory_padding=0))
    assert {"hw_decoder_load": 0.9, "device_memory_padding": 0, "host_memory_padding": 0}.items() <= told.items()
    assert decoder_arguments(CPU, DecoderSettings())["device"] == "cpu"


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_number_of_batches_made_ahead_changes_nothing(tmp_path, prefetch):
    dataset = small_dataset(tmp_path, 12)

    def ids(depth):
        loader = Loader(
            dataset, None, train=False, rank=0, world_size=1, micro_batch_size=4, image_size=16, context_length=77,
            device=CPU, settings=DecoderSettings(num_threads=1, prefetch=depth),
        )  # fmt: skip
        with loader:
            return [batch.images for batch in loader.epoch(0)]

    assert all(torch.equal(a, b) for a, b in zip(ids(3), ids(prefetch), strict=True))


def test_an_input_size_other_than_the_models_is_refused():
    check_input_size(None, 224, "RWKV-CLIP-B-32")
    check_input_size(224, 224, "RWKV-CLIP-B-32")
    with pytest.raises(UserError, match="--input-size 256 does not fit RWKV-CLIP-B-32, which takes 224 x 224"):
        check_input_size(256, 224, "RWKV-CLIP-B-32")
