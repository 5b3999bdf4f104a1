"""Records that cannot be read or decoded, met in the middle of a run."""

from __future__ import annotations

import pickle
import resource

import pytest
import torch
from loader_data import eval_loader, jpeg_of, small_dataset, train_loader, write_pair

from rwkv_clip.data.bad_records import decode_faults, replacement
from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.errors import UserError

BAD_FILES = ["trunc_60pct.jpg", "html_404.jpg", "zero_bytes.jpg"]


@pytest.fixture(scope="module")
def with_bad(tmp_path_factory, fixtures):
    """30 records; 7, 8 and 20 cannot be decoded."""
    bad = dict(zip((7, 8, 20), BAD_FILES, strict=True))

    def payload(number):
        return (fixtures / "img" / bad[number]).read_bytes() if number in bad else jpeg_of(number)

    return small_dataset(tmp_path_factory.mktemp("bad"), 30, payload=payload)


def all_ids(loader, epoch):
    return [batch.ids.tolist() for batch in loader.epoch(epoch)]


HUGE = "huge_14000x14000_gray.jpg"


@pytest.mark.parametrize("name", [*BAD_FILES, "trunc_header.jpg", HUGE])
def test_D1_D8_a_bad_record_stops_the_run_with_its_file_and_key_after_the_good_batches(tmp_path, fixtures, name):
    clean = small_dataset(tmp_path / "clean", 20)
    with train_loader(clean, 4) as loader:
        order = all_ids(loader, 0)
    bad = order[3][2]
    content = (fixtures / "img" / name).read_bytes()
    dataset = small_dataset(tmp_path / "bad", 20, payload=lambda number: content if number == bad else jpeg_of(number))
    with train_loader(dataset, 4) as loader:
        seen = []
        with pytest.raises(
            UserError, match=rf"part-0.rec key {bad} .*cannot be decoded.*--on-bad-record skip"
        ) as error:
            for batch in loader.epoch(0):
                seen.append(batch.ids.tolist())
    assert seen == order[:3]
    assert "\n" not in str(error.value)


def test_D1_skipping_replaces_bad_records_and_changes_no_step_count(with_bad, caplog):
    with train_loader(with_bad, 6, on_bad_record="skip") as loader:
        epochs = [all_ids(loader, epoch) for epoch in range(3)]
        assert [len(steps) for steps in epochs] == [5, 5, 5]
        assert set(loader.bad_records) == {7, 8, 20} and loader.num_replaced == 9
    for steps in epochs:
        ids = sum(steps, [])
        assert len(ids) == 30 and not set(ids) & {7, 8, 20}
        assert all(len(set(step)) == 6 for step in steps), "a stand-in was in its batch already"
    assert sorted(line.split(" (")[0] for line in caplog.messages) == [
        f"skipping part-0.rec key {number}" for number in (20, 7, 8)
    ]


@pytest.mark.parametrize("make_loader", [train_loader, eval_loader])
def test_D8_a_huge_picture_in_a_foreign_file_is_never_decoded(tmp_path, fixtures, make_loader, caplog):
    content = (fixtures / "img" / HUGE).read_bytes()
    dataset = small_dataset(tmp_path, 51, payload=lambda number: content if number == 25 else jpeg_of(number))
    with make_loader(dataset, 17, on_bad_record="skip") as loader:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        batches = list(loader.epoch(0))
    # One plane of its pixels takes 196 MB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000
    assert len(batches) == 3 and list(loader.bad_records) == [25]
    assert "it has 14000 x 14000 pixels, more than 64 million" in caplog.text


def test_skipping_gives_the_same_batches_at_any_number_of_ranks(with_bad):
    with train_loader(with_bad, 10, on_bad_record="skip") as loader:
        alone = {step: batch for step, batch in enumerate(loader.epoch(2))}
    for rank in range(2):
        with train_loader(with_bad, 5, rank, 2, on_bad_record="skip") as loader:
            for step, batch in enumerate(loader.epoch(2)):
                part = slice(5 * rank, 5 * rank + 5)
                assert torch.equal(batch.ids, alone[step].ids[part])
                assert torch.equal(batch.images, alone[step].images[part])


def test_a_resume_knows_the_bad_records_that_the_saved_run_met(with_bad):
    with train_loader(with_bad, 6, on_bad_record="skip") as loader:
        list(loader.epoch(0))
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        uninterrupted = list(loader.epoch(1, start_step=2))
    with train_loader(with_bad, 6, on_bad_record="skip") as loader:
        loader.load_state_dicts([state, {"bad_records": {}}])
        assert set(loader.bad_records) == {7, 8, 20}
        resumed = list(loader.epoch(1, start_step=2))
    assert all(torch.equal(a.images, b.images) for a, b in zip(uninterrupted, resumed, strict=True))


def test_a_validation_pass_masks_bad_records(with_bad):
    with eval_loader(with_bad, 8, on_bad_record="skip") as loader:
        seen = [int(i) for batch in loader.epoch(0) for i in batch.ids[batch.valid]]
    assert seen == [i for i in range(30) if i not in (7, 8, 20)]


def test_a_bad_record_behind_the_end_of_the_last_epoch_stops_nothing(with_bad):
    # Batches made ahead hold records that this run never asks for.
    with train_loader(with_bad, 3, max_steps_per_epoch=1) as loader:
        good_epochs = []
        for epoch in range(10):
            try:
                good_epochs.append(all_ids(loader, epoch))
            except UserError:
                break
        assert good_epochs
    with train_loader(with_bad, 3, max_steps_per_epoch=1) as loader:
        assert [all_ids(loader, epoch) for epoch in range(len(good_epochs))] == good_epochs


def test_data_without_one_good_record_ends_with_an_error_when_skipping(tmp_path):
    dataset = small_dataset(tmp_path, 6, payload=lambda number: b"<html>no</html>")
    with train_loader(dataset, 2, on_bad_record="skip") as loader, pytest.raises(UserError, match="none of the 6"):
        next(loader.epoch(0))


def test_D18_a_label_of_another_width_is_named_with_both_widths(fixtures):
    with train_loader(open_dataset(fixtures / "rec" / "mixed_labels"), 5) as loader:
        with pytest.raises(UserError, match=r"mixed_labels.rec key (3|6|8) .*label of (154|1|77) numbers.*wants 231"):
            for epoch in range(2):
                list(loader.epoch(epoch))


def test_D15_an_index_of_another_packing_is_named(tmp_path, fixtures):
    (tmp_path / "base.rec").write_bytes((fixtures / "rec" / "base.rec").read_bytes())
    (tmp_path / "base.idx").write_bytes((fixtures / "rec" / "off_by_4.idx").read_bytes())
    with train_loader(open_dataset(fixtures / "rec" / "base"), 1) as loader:
        order = all_ids(loader, 0)
    seen = []
    with train_loader(open_dataset(tmp_path / "base"), 1) as loader:
        with pytest.raises(UserError, match=r"base.rec key 5 "):
            for batch in loader.epoch(0):
                seen.append(batch.ids.tolist())
    assert seen == order[: order.index([5])]


def test_decode_faults_agrees_with_the_pipeline_on_every_picture(tmp_path, fixtures):
    files = [path for path in sorted((fixtures / "img").iterdir()) if "huge" not in path.name]
    faults = decode_faults([path.read_bytes() for path in files])
    for path, fault in zip(files, faults, strict=True):
        dataset = open_dataset(write_pair(tmp_path / path.stem, [path.read_bytes()]))
        with eval_loader(dataset, 1) as loader:
            if fault is None:
                assert torch.isfinite(next(loader.epoch(0)).images).all(), path.name
            else:
                with pytest.raises(UserError, match="cannot be decoded"):
                    next(loader.epoch(0))
    broken = {path.name for path, fault in zip(files, faults, strict=True) if fault}
    assert broken == {*BAD_FILES, "trunc_header.jpg"}


def test_a_stand_in_is_the_next_good_record_outside_the_batch():
    assert replacement(3, {3, 4}, {3, 5, 6}, 10) == 7
    assert replacement(9, {9}, {9, 0}, 10) == 1
    # Every other record is in the batch: the next good one.
    assert replacement(1, {1, 2}, {0, 1, 2, 3}, 4) == 3


def test_an_unknown_rule_for_bad_records_is_refused(with_bad):
    with pytest.raises(UserError, match="raise or skip"):
        train_loader(with_bad, 2, on_bad_record="ignore")
