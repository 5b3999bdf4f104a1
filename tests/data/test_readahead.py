"""Reading ahead touches the right pages, and never gets in the way."""

from __future__ import annotations

import mmap
import time

import numpy as np
from loader_data import small_dataset

from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.data.readahead import ReadAhead


def touched_pages(dataset, ids, monkeypatch) -> list[set[int]]:
    """Pages per shard that a request of `ids` reads."""
    pages = [set() for _ in dataset.files]

    class Watched:
        def __init__(self, shard):
            self.shard = shard

        def take(self, places):
            pages[self.shard] |= set((places // mmap.PAGESIZE).tolist())

    frombuffer = np.frombuffer
    shard_of = {id(file.view()): shard for shard, file in enumerate(dataset.files)}
    monkeypatch.setattr(
        np,
        "frombuffer",
        lambda view, dtype, *rest: Watched(shard_of[id(view)]) if dtype is np.uint8 else frombuffer(view, dtype, *rest),
    )
    ahead = ReadAhead(dataset)
    ahead._touch(np.array(ids))
    ahead.close()
    return pages


def test_a_request_touches_every_page_of_its_records_and_no_other(tmp_path, monkeypatch):
    dataset = small_dataset(tmp_path, 30, shards=2, payload=lambda number: bytes(9000 + number))
    ids = [3, 4, 14, 29]
    expected = [set(), set()]
    for i in ids:
        shard, position = dataset.locate(i)
        start, end = dataset.files[shard].offsets[position], dataset.files[shard].part_end(position)
        expected[shard] |= set(range(start // mmap.PAGESIZE, (end - 1) // mmap.PAGESIZE + 1))
    assert touched_pages(dataset, ids, monkeypatch) == expected


def test_an_index_that_is_not_in_the_files_order_or_points_outside_is_read_ahead_too(tmp_path, fixtures):
    for index in ("unsorted", "subset", "past_end", "off_by_4"):
        (tmp_path / f"{index}.rec").write_bytes((fixtures / "rec" / "base.rec").read_bytes())
        (tmp_path / f"{index}.idx").write_bytes((fixtures / "rec" / f"{index}.idx").read_bytes())
        dataset = open_dataset(tmp_path / index)
        ahead = ReadAhead(dataset)
        for i in range(len(dataset)):
            starts = np.clip(dataset.files[0].offsets[[i]], 0, dataset.files[0].size_bytes - 1)
            assert starts < ahead._ends(0, starts) <= dataset.files[0].size_bytes
        ahead.request(np.arange(len(dataset)))  # what is broken is the reader's to report
        ahead.close()


def test_a_request_returns_at_once_and_closing_drops_what_waits(tmp_path, monkeypatch):
    dataset = small_dataset(tmp_path, 8)
    ahead = ReadAhead(dataset)
    monkeypatch.setattr(ahead, "_touch", lambda ids: time.sleep(0.2))
    start = time.perf_counter()
    for _ in range(100):
        ahead.request(np.arange(8))
    ahead.close()
    assert time.perf_counter() - start < 5
