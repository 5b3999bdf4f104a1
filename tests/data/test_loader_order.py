"""Which records, captions and crops the ranks get, and what a resume gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from loader_data import eval_loader, jpeg_of, small_dataset, train_loader

from rwkv_clip.data.augment import choose, cumulative_caption_weights
from rwkv_clip.errors import UserError


@pytest.fixture(scope="module")
def hundred(tmp_path_factory):
    return small_dataset(tmp_path_factory.mktemp("hundred"), 100, shards=3)


def ids_of(batches) -> list[int]:
    return [int(i) for batch in batches for i in batch.ids]


def same(a, b) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("images", "tokens", "caption_index", "ids"))


def test_L1_every_rank_takes_the_same_number_of_full_batches_in_every_epoch(hundred):
    for rank in range(3):
        with train_loader(hundred, 8, rank, world_size=3) as loader:
            assert loader.steps_per_epoch == 4
            for epoch in range(4):
                assert [len(batch.images) for batch in loader.epoch(epoch)] == [8] * 4


def test_pictures_come_in_the_dtype_asked_for_and_are_no_part_of_dalis_memory(hundred):
    with train_loader(hundred, 8) as loader, train_loader(hundred, 8, dtype=torch.bfloat16) as other:
        for plain, rounded in zip(loader.epoch(0), other.epoch(0), strict=True):
            assert plain.images.dtype == torch.float32 and rounded.images.dtype == torch.bfloat16
            assert torch.equal(plain.images.to(torch.bfloat16), rounded.images)
            # PyTorch's own memory can grow, what came from elsewhere cannot.
            assert plain.images.untyped_storage().resizable()


def test_L4_no_picture_is_on_two_ranks_in_an_epoch(tmp_path):
    dataset = small_dataset(tmp_path, 40)
    for epoch in range(2):
        seen = []
        for rank in range(4):
            with train_loader(dataset, 2, rank, world_size=4) as loader:
                seen += ids_of(loader.epoch(epoch))
        assert sorted(seen) == list(range(40))


def test_L6_a_batch_larger_than_the_data_states_both(tmp_path):
    dataset = small_dataset(tmp_path, 63, payload=lambda number: b"never decoded")
    with pytest.raises(UserError, match=r"63 records.*64.*2 ranks x 32"):
        train_loader(dataset, 32, world_size=2)


def test_L7_short_epochs_take_their_steps_and_the_next_goes_on_where_they_stopped(tmp_path):
    dataset = small_dataset(tmp_path, 10)
    with train_loader(dataset, 2, max_steps_per_epoch=2) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        epochs = [ids_of(loader.epoch(epoch)) for epoch in range(3)]
    assert [len(ids) for ids in epochs] == [4, 4, 4]
    assert max(Counter(sum(epochs, [])).values()) == 2 and len(set(sum(epochs[:2], []))) == 8


def test_L9_one_seed_gives_one_run_and_another_seed_another(hundred):
    def run(seed):
        with train_loader(hundred, 20, seed=seed) as loader:
            return [batch for epoch in range(2) for batch in loader.epoch(epoch)]

    first, again, other = run(1), run(1), run(2)
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert ids_of(first) != ids_of(other)
    assert ids_of(first[:5]) != ids_of(first[5:])
    # The same record looks different in another epoch.
    image = {int(i): picture for batch in first[:5] for i, picture in zip(batch.ids, batch.images, strict=True)}
    later = {int(i): picture for batch in first[5:] for i, picture in zip(batch.ids, batch.images, strict=True)}
    assert sum(torch.equal(image[i], later[i]) for i in image) < 10


def test_work_done_ahead_leaves_the_next_batch_nothing_to_read_and_is_the_same_work(hundred):
    def run(ahead: bool):
        given, reads_while_asked = [], 0
        with train_loader(hundred, 20) as loader:
            loader.work_ahead()  # nothing has begun
            reads = []
            read = loader._reader.read
            loader._reader.read = lambda ids: reads.append(1) or read(ids)
            for epoch in range(2):
                batches = loader.epoch(epoch)
                for _ in range(loader.steps_per_epoch):
                    before = len(reads)
                    given.append(next(batches))
                    reads_while_asked += len(reads) - before if len(given) > 1 else 0
                    if ahead:
                        loader.work_ahead()
        return given, reads_while_asked

    (plain, asked), (ahead, asked_ahead) = run(False), run(True)
    assert all(same(a, b) for a, b in zip(plain, ahead, strict=True))
    assert asked > 0 and asked_ahead == 0


def test_a_broken_record_met_ahead_is_spoken_of_when_its_batch_is_asked_for(tmp_path):
    dataset = small_dataset(tmp_path, 20, payload=lambda number: jpeg_of(number) if number != 7 else b"no picture")
    with train_loader(dataset, 4) as loader:
        batches, good = loader.epoch(0), []
        with pytest.raises(UserError, match="key 7 .* holds an image that cannot be decoded"):
            while True:
                good.append(next(batches))
                loader.work_ahead()
    with train_loader(dataset, 4, on_bad_record="skip") as loader:
        order = [batch.ids.tolist() for batch in loader.epoch(0)]
    assert [batch.ids.tolist() for batch in good] == order[: len(good)] and len(good) < 5


def test_L10_captions_are_drawn_alike_and_anew_in_each_epoch():
    weights = cumulative_caption_weights(3)
    ids = np.arange(3000)
    shapes = np.tile([20, 30], (3000, 1))
    captions = np.stack([choose(1, epoch, ids, shapes, weights).caption for epoch in range(8)])
    for epoch in captions:
        assert all(0.30 <= (epoch == caption).mean() <= 0.37 for caption in range(3))
    assert all(len(set(captions[:, i].tolist())) > 1 for i in range(100))
    # Independent of its neighbours, so of the other ranks' samples too.
    assert abs(np.corrcoef(captions[0, 0::2], captions[0, 1::2])[0, 1]) < 0.08


def test_L10_tokens_are_those_of_the_drawn_caption(hundred):
    with train_loader(hundred, 50, caption_weights=[1, 0, 3]) as loader:
        batches = list(loader.epoch(0))
    index = torch.cat([batch.caption_index for batch in batches])
    tokens = torch.cat([batch.tokens for batch in batches])
    ids = torch.cat([batch.ids for batch in batches])
    assert tokens.dtype == torch.int64 and tokens.shape == (100, 77)
    assert torch.equal(tokens[:, 2], 2000 + index)
    assert torch.equal(tokens[:, 1], 1000 + ids)
    assert 1 not in index and 10 < (index == 0).sum() < 40


@pytest.mark.parametrize("weights", [[1, 1], [0, 0, 0], [1, -1, 1], [1, float("nan"), 1]])
def test_caption_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(UserError, match="caption weights"):
        cumulative_caption_weights(3, weights)


def test_L11_two_nodes_with_the_same_local_rank_read_different_records(tmp_path):
    small_dataset(tmp_path, 24)
    script = (
        "import json, os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from loader_data import train_loader; from rwkv_clip.data.dataset import open_dataset\n"
        "loader = train_loader(open_dataset(sys.argv[1]), 4, int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))\n"
        "print(json.dumps([b.ids.tolist() for b in loader.epoch(0)]))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), os.path.dirname(__file__)],
            env=os.environ | {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    steps = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert sorted(np.ravel(steps)) == list(range(24))


def test_a_global_batch_holds_the_same_pixels_at_any_number_of_ranks_and_any_accumulation(hundred):
    def steps(world_size, accumulation_steps):
        """Per optimizer step: record -> (pixels, caption)."""
        result = [{} for _ in range(4)]
        size = 24 // world_size // accumulation_steps
        for rank in range(world_size):
            with train_loader(hundred, size, rank, world_size, accumulation_steps=accumulation_steps) as loader:
                for i, batch in enumerate(loader.epoch(1)):
                    rows = zip(batch.ids.tolist(), batch.images, batch.caption_index.tolist(), strict=True)
                    result[i // accumulation_steps] |= {row: (image, caption) for row, image, caption in rows}
        return result

    whole = steps(1, 1)
    for world_size, accumulation_steps in ((2, 1), (1, 3), (3, 2)):
        for expected, found in zip(whole, steps(world_size, accumulation_steps), strict=True):
            assert expected.keys() == found.keys() and len(expected) == 24
            for i, (image, caption) in expected.items():
                assert torch.equal(image, found[i][0]) and caption == found[i][1]


@pytest.mark.parametrize("start", [(0, 3), (1, 1), (0, 5)])
def test_a_resume_inside_an_epoch_gives_what_an_uninterrupted_run_gives(hundred, start):
    epoch, step = start
    with train_loader(hundred, 10, accumulation_steps=2) as loader:
        uninterrupted = [list(loader.epoch(number)) for number in range(2)]
    with train_loader(hundred, 10, accumulation_steps=2) as loader:
        resumed = list(loader.epoch(epoch, start_step=step))
        resumed += [batch for later in range(epoch + 1, 2) for batch in loader.epoch(later)]
    expected = sum(uninterrupted, [])[(epoch * 5 + step) * 2 :]
    assert len(resumed) == len(expected) and all(same(a, b) for a, b in zip(expected, resumed, strict=True))


def test_a_loader_goes_to_any_position_it_is_asked_for(hundred):
    with train_loader(hundred, 20) as loader:
        first = list(loader.epoch(0))
        abandoned = loader.epoch(1)
        next(abandoned)
        assert all(same(a, b) for a, b in zip(first, loader.epoch(0), strict=True))
        with pytest.raises(RuntimeError, match="ended when loader.epoch"):
            next(abandoned)
        with pytest.raises(ValueError, match="no step 6 of epoch 0"):
            loader.epoch(0, start_step=6)


def test_the_next_epoch_is_under_way_when_one_ends(hundred, monkeypatch):
    with train_loader(hundred, 20) as loader:
        starts = []
        start = loader._start
        monkeypatch.setattr(loader, "_start", lambda position: (starts.append(position), start(position)))
        for epoch in range(3):
            list(loader.epoch(epoch))
    assert len(starts) == 1


def test_a_shorter_context_takes_the_first_tokens_and_the_end_token_last(hundred):
    with train_loader(hundred, 20, context_length=3) as loader:
        tokens = next(loader.epoch(0)).tokens
    assert tokens.shape == (20, 3)
    assert (tokens[:, 0] == 49406).all() and (tokens[:, 1] >= 1000).all() and (tokens[:, 2] == 49407).all()


def test_a_context_longer_than_the_stored_captions_is_refused(hundred):
    with pytest.raises(UserError, match="context length 80.*77"):
        train_loader(hundred, 20, context_length=80)


@pytest.mark.parametrize("world_size", [1, 3])
def test_validation_shows_every_record_once_and_pads_with_a_mask(hundred, world_size):
    seen, steps = [], set()
    for rank in range(world_size):
        with eval_loader(hundred, 16, rank, world_size) as loader:
            for _ in range(2):  # a second pass is like the first
                batches = list(loader.epoch(0))
            steps.add((len(batches), loader.steps_per_epoch))
        assert all(batch.images.shape == (16, 3, 16, 16) for batch in batches)
        assert all((batch.tokens[:, 2] == 2002).all() for batch in batches)
        seen += [int(i) for batch in batches for i in batch.ids[batch.valid]]
    assert sorted(seen) == list(range(100)) and len(steps) == 1


def test_validation_of_less_than_one_batch_works(tmp_path):
    dataset = small_dataset(tmp_path, 3)
    with eval_loader(dataset, 8, rank=1, world_size=2, eval_caption=0) as loader:
        (batch,) = loader.epoch(0)
    assert not batch.valid.any() and torch.isfinite(batch.images).all()
    with pytest.raises(UserError, match="caption 3 was asked"):
        eval_loader(dataset, 8, eval_caption=3)
