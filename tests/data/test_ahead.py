"""Looking up picture sizes brings records into memory before the decoder asks for them."""

from __future__ import annotations

import threading

import numpy as np
from loader_data import jpeg_of, small_dataset, train_loader

from rwkv_clip.data.pipeline import encoded_list, shape_pipeline


def test_start_and_middle_of_the_coming_records_are_read_with_their_sizes():
    random = np.random.default_rng(0)
    # What follows a JPEG's end does no harm.
    payloads = [jpeg_of(i, 60, 40) + random.bytes(length) for i, length in enumerate((0, 1, 70_001, 400_000))]
    pipeline = shape_pipeline(len(payloads), 1)
    encoded = encoded_list(payloads)
    pipeline.push(encoded=encoded)
    shapes, middles = pipeline.pop(np.array)
    pipeline.close()
    assert (shapes == [40, 60, 3]).all()
    for payload, middle in zip(payloads, middles[:, 0], strict=True):
        half = len(payload) // 2
        assert middle in payload[half - 1 : half + 2]


def test_the_loader_runs_no_python_beside_the_training_thread(tmp_path):
    before = threading.active_count()
    with train_loader(small_dataset(tmp_path, 40), 8) as loader:
        for _ in loader.epoch(0):
            assert threading.active_count() == before
