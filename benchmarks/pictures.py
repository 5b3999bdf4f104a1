"""Photo-like JPEGs made up for the benchmarks, no two alike, packed as one RecordIO pair."""

from __future__ import annotations

import io
import multiprocessing
import os
from pathlib import Path

import numpy as np
from PIL import Image

from rwkv_clip.data.recordio import RecordWriter


def make_pair(prefix: Path, num_records: int, width: int = 500, height: int = 375) -> None:
    """Write `prefix`.rec and .idx: JPEGs of this size (about 37 KB at 500 x 375), three short captions each."""
    label = np.zeros((3, 77), np.float32)
    label[:, :4] = 49406, 320, 1125, 49407
    jobs = ((key, width, height) for key in range(num_records))
    # Not forked: the caller may hold threads of torch, DALI or CUDA.
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(os.sched_getaffinity(0))) as pool, RecordWriter(prefix) as writer:
        for key, payload in enumerate(pool.imap(_encoded, jobs, chunksize=64)):
            label[:, 2] = 300 + key % 40000
            writer.write(key, label.reshape(-1), payload)


def _encoded(job: tuple[int, int, int]) -> bytes:
    """Gradients, soft blobs and a little noise, as a JPEG."""
    key, width, height = job
    rng = np.random.default_rng(key)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), np.uint8))
    blobs = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    ramp = (x * rng.uniform(-1, 1) / width + y * rng.uniform(-1, 1) / height)[..., None] * 60
    pixels = blobs * 0.7 + 40 + ramp + rng.standard_normal((height, width, 1), np.float32) * 5
    out = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=82)
    return out.getvalue()
