"""Small data sets and loaders for the loader's tests."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rwkv_clip.data.dataset import Dataset, open_dataset
from rwkv_clip.data.loader import Loader
from rwkv_clip.data.pipeline import DecoderSettings
from rwkv_clip.data.recordio import RecordWriter
from rwkv_clip.data.sampler import Sampler
from rwkv_clip.model.transform import MEAN, STD

CPU = torch.device("cpu")


def jpeg_of(number: int, width: int = 24, height: int = 16) -> bytes:
    """A JPEG whose left edge, right edge and colour tell pictures and crops apart."""
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    pixels = np.stack([x, y, np.full_like(x, number * 37 % 256)], -1).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=95)
    return out.getvalue()


def label_of(number: int) -> np.ndarray:
    """Three captions [start, 1000 + number, 2000 + caption, end, 0, ...]."""
    label = np.zeros((3, 77), np.float32)
    label[:, 0], label[:, 1], label[:, 3] = 49406, 1000 + number, 49407
    label[:, 2] = 2000 + np.arange(3)
    return label.reshape(-1)


def write_pair(prefix: Path, payloads: Sequence[bytes], first: int = 0) -> Path:
    """A RecordIO pair of the payloads, keys and captions numbered from `first`; returns the prefix."""
    with RecordWriter(prefix) as writer:
        for key, payload in enumerate(payloads, first):
            writer.write(key, label_of(key), payload)
    return prefix


def small_dataset(
    folder: Path, num_records: int, shards: int = 1, payload: Callable[[int], bytes] = jpeg_of
) -> Dataset:
    """`num_records` small JPEGs over `shards` pairs; keys are the global ids."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, numbers in enumerate(np.array_split(np.arange(num_records), shards)):
        write_pair(folder / f"part-{shard}", [payload(int(number)) for number in numbers], first=int(numbers[0]))
    return open_dataset(folder)


def train_loader(
    dataset: Dataset,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 5,
    accumulation_steps: int = 1,
    max_steps_per_epoch: int | None = None,
    image_size: int = 16,
    context_length: int = 77,
    **options,
) -> Loader:
    """A CPU loader of one decoding thread with its sampler."""
    global_batch = micro_batch_size * world_size * accumulation_steps
    sampler = Sampler(
        dataset.shard_sizes, seed, global_batch, max_steps_per_epoch=max_steps_per_epoch, world_size=world_size
    )
    return Loader(
        dataset,
        sampler,
        rank=rank,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        image_size=image_size,
        context_length=context_length,
        device=CPU,
        seed=seed,
        settings=DecoderSettings(num_threads=1),
        **options,
    )


def eval_loader(
    dataset: Dataset, micro_batch_size: int, rank: int = 0, world_size: int = 1, image_size: int = 16, **options
) -> Loader:
    """A CPU validation loader."""
    return Loader(
        dataset,
        None,
        train=False,
        rank=rank,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        image_size=image_size,
        context_length=77,
        device=CPU,
        settings=DecoderSettings(num_threads=1),
        **options,
    )


def pixels_of(image: torch.Tensor) -> np.ndarray:
    """A normalised image [3, H, W] as values 0 to 255, [H, W, 3]."""
    pixels = image * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    return (255 * pixels).permute(1, 2, 0).numpy()


def corners(pixels: np.ndarray) -> dict[str, np.ndarray]:
    """Mean colours of the corner blocks (an eighth to a quarter in from the edges)."""
    near, far = len(pixels) // 16, len(pixels) // 4
    start, end = slice(near, far), slice(-far, -near)
    blocks = {"TL": (start, start), "TR": (start, end), "BL": (end, start), "BR": (end, end)}
    return {name: pixels[rows, columns].mean((0, 1)) for name, (rows, columns) in blocks.items()}
