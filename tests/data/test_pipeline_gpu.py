"""The same pictures, captions and errors from the GPU's decoders as from the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loader_data import corners, jpeg_of, pixels_of, small_dataset, write_pair

from rwkv_clip.data.dataset import Dataset, open_dataset
from rwkv_clip.data.loader import Batch, Loader
from rwkv_clip.data.pipeline import DecoderSettings
from rwkv_clip.data.sampler import Sampler
from rwkv_clip.errors import UserError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = DecoderSettings(num_threads=2, memory_padding=0)
NAMES = ["rgb.jpg", "cmyk_adobe.jpg", "exif_rot6.jpg", "gray.jpg", "progressive.jpg", "sub444.jpg", "rgb.png",
         "rgba.png", "rgb.bmp", "rgb.tiff", "rgb.jp2", "lossy.webp", "multi.mpo.jpg"]  # fmt: skip


def first_batch(dataset: Dataset, device: str, train: bool, epoch: int = 0, **options) -> Batch:
    with Loader(
        dataset,
        Sampler(dataset.shard_sizes, 3, len(dataset)) if train else None,
        rank=0,
        world_size=1,
        micro_batch_size=len(dataset),
        image_size=64,
        context_length=77,
        device=torch.device(device),
        train=train,
        seed=3,
        settings=SETTINGS,
        **options,
    ) as loader:
        return next(loader.epoch(epoch))


@pytest.fixture(scope="module")
def formats(tmp_path_factory, fixtures):
    payloads = [(fixtures / "img" / name).read_bytes() for name in NAMES]
    return open_dataset(write_pair(tmp_path_factory.mktemp("gpu") / "formats", payloads))


@pytest.mark.parametrize("train", [True, False])
def test_D4_D6_the_gpu_gives_the_pictures_that_the_cpu_gives(formats, train):
    for epoch in range(4 if train else 1):
        gpu, cpu = (first_batch(formats, device, train, epoch) for device in ("cuda", "cpu"))
        assert gpu.images.is_cuda and gpu.tokens.is_cuda and gpu.images.dtype == torch.float32
        assert torch.equal(gpu.ids, cpu.ids) and torch.equal(gpu.tokens.cpu(), cpu.tokens)
        assert torch.equal(gpu.caption_index.cpu(), cpu.caption_index)
        for i, ours, theirs in zip(gpu.ids.tolist(), gpu.images.cpu(), cpu.images, strict=True):
            difference = np.abs(pixels_of(ours) - pixels_of(theirs))
            assert difference.mean() < 4, (NAMES[i], difference.mean())
            for name, colour in corners(pixels_of(theirs)).items():
                assert np.abs(corners(pixels_of(ours))[name] - colour).max() < 8, (NAMES[i], name)


@pytest.mark.parametrize("name", ["odd_1x1.jpg", "odd_1x600.jpg", "odd_3000x2.jpg", "odd_17x13.jpg"])
def test_D10_extreme_shapes_are_decoded_on_the_gpu(tmp_path, fixtures, name):
    dataset = open_dataset(write_pair(tmp_path / "one", [(fixtures / "img" / name).read_bytes()]))
    for train in (True, False):
        images = first_batch(dataset, "cuda", train).images
        assert images.shape == (1, 3, 64, 64) and torch.isfinite(images).all()


@pytest.mark.parametrize("name", ["html_404.jpg", "zero_bytes.jpg", "trunc_header.jpg"])
def test_D1_a_bad_record_is_named_or_replaced_on_the_gpu(tmp_path, fixtures, name):
    bad = (fixtures / "img" / name).read_bytes()
    dataset = small_dataset(tmp_path, 8, payload=lambda number: bad if number == 5 else jpeg_of(number))
    with pytest.raises(UserError, match="part-0.rec key 5 .*cannot be decoded"):
        first_batch(dataset, "cuda", True)
    assert 5 not in first_batch(dataset, "cuda", True, on_bad_record="skip").ids


def test_D1_a_truncated_jpeg_in_a_foreign_file_does_not_stop_the_gpu(tmp_path, fixtures):
    """The GPU's decoders show a truncated JPEG as far as it goes; the packer refuses such files."""
    bad = (fixtures / "img" / "trunc_60pct.jpg").read_bytes()
    dataset = small_dataset(tmp_path, 8, payload=lambda number: bad if number == 5 else jpeg_of(number))
    assert torch.isfinite(first_batch(dataset, "cuda", True, on_bad_record="skip").images).all()


def test_batches_stay_valid_after_the_loader_went_on_and_closed(tmp_path):
    dataset = small_dataset(tmp_path, 64)
    with Loader(
        dataset, Sampler(dataset.shard_sizes, 3, 8), rank=0, world_size=1, micro_batch_size=8, image_size=64,
        context_length=77, device=torch.device("cuda"), seed=3, settings=SETTINGS,
    ) as loader:  # fmt: skip
        kept, copies = [], []
        for batch in loader.epoch(0):
            kept.append(batch.images)
            copies.append(batch.images.clone())
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
