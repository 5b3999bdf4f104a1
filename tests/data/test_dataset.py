"""Opening data sets, and the checks before a run starts."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil

import numpy as np
import pytest

from rwkv_clip.data import checks as checks_module
from rwkv_clip.data import dataset as dataset_module
from rwkv_clip.data.checks import CACHE_NAME, check_dataset, token_fault
from rwkv_clip.data.dataset import open_dataset, read_manifest, write_manifest
from rwkv_clip.data.progress import Progress
from rwkv_clip.data.recordio import RecordWriter
from rwkv_clip.errors import UserError


def captions(*middles: list[int]) -> np.ndarray:
    """A label with one caption per list of tokens."""
    label = np.zeros((len(middles), 77), np.float32)
    for row, middle in zip(label, middles, strict=True):
        row[: len(middle) + 2] = [49406, *middle, 49407]
    return label.reshape(-1)


def write_shard(prefix, first: int, count: int, label=None) -> None:
    with RecordWriter(prefix) as writer:
        for key in range(count):
            default = captions([300 + first + key], [5], [6, 7])
            writer.write(key, default if label is None else label, b"image %d" % (first + key))


@pytest.fixture
def packed(tmp_path):
    """Three shards of 4, 1 and 7 records with a manifest."""
    first = 0
    for number, count in enumerate((4, 1, 7)):
        write_shard(tmp_path / f"train-{number:05d}", first, count)
        first += count
    write_manifest(tmp_path, [f"train-{i:05d}" for i in range(3)], ["raw", "synthetic", "generated"], {"seed": 1})
    return tmp_path


def refused(path) -> str:
    with pytest.raises(UserError) as error:
        open_dataset(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_packed_folder_is_one_numbered_sequence(packed):
    data = open_dataset(packed)
    assert len(data) == 12 and data.shard_sizes == [4, 1, 7]
    assert data.num_captions == 3 and data.label_width == 231
    assert data.caption_names == ["raw", "synthetic", "generated"]
    assert [data.read(i).label[1] for i in range(12)] == [300 + i for i in range(12)]
    assert bytes(data.read(11).payload) == b"image 11"
    assert data.describe(5).startswith("train-00002.rec key 0 ")
    assert data.manifest["packed"] == {"seed": 1}
    for i in (12, -1):
        with pytest.raises(IndexError):
            data.read(i)


def test_prefix_extension_folder_and_manifest_open_the_same_data(packed, fixtures):
    base = fixtures / "rec" / "base"
    prints = {open_dataset(f"{base}{end}").fingerprint for end in ("", ".rec", ".idx")}
    assert len(prints) == 1
    assert open_dataset(packed / "dataset.json").fingerprint == open_dataset(str(packed)).fingerprint


def test_folder_of_bare_pairs_is_read_in_name_order(packed):
    (packed / "dataset.json").unlink()
    data = open_dataset(packed)
    assert data.manifest is None and data.shard_sizes == [4, 1, 7]
    assert data.caption_names == ["raw", "synthetic", "generated"]


def test_bare_pair_of_one_caption_gets_a_plain_name(tmp_path):
    write_shard(tmp_path / "x", 0, 2, captions([1]))
    data = open_dataset(tmp_path / "x")
    assert (data.num_captions, data.caption_names) == (1, ["caption0"])


def test_prefix_with_a_dot_in_its_name_opens(tmp_path):
    write_shard(tmp_path / "yfcc.v2", 0, 3)
    assert len(open_dataset(tmp_path / "yfcc.v2")) == 3


def test_wrong_paths_say_what_is_there(packed, fixtures, tmp_path_factory):
    assert "holds no *.rec file" in refused(tmp_path_factory.mktemp("empty"))
    assert "neither a folder nor a pair" in refused("/no/such/place")
    assert "train-00000.rec" in refused(packed / "train")
    (packed / "train-00001.idx").unlink()
    assert "train-00001.rec has no index train-00001.idx" in refused(packed)
    assert "train-00001.rec has no index" in refused(packed / "train-00001.rec")


def test_folder_whose_files_are_unfinished_is_refused(tmp_path):
    writer = RecordWriter(tmp_path / "train-00000")
    writer.write(0, captions([1]), b"x")
    for path in (tmp_path, tmp_path / "train-00000"):
        assert "train-00000.rec.partial was left by an interrupted packer: pack again" in refused(path)
    # A finished shard beside it does not make a whole data set.
    write_shard(tmp_path / "train-00001", 0, 3)
    assert "is not a whole data set" in refused(tmp_path)
    writer.abort()
    assert len(open_dataset(tmp_path)) == 3


def test_D13_folder_that_an_interrupted_pack_works_in_is_refused(tmp_path):
    (tmp_path / "out.partial").mkdir()
    write_shard(tmp_path / "out.partial" / "train-00000", 0, 3)
    for path in (tmp_path / "out", tmp_path / "out.partial"):
        assert "out.partial was left by an interrupted packer: pack again" in refused(path)
    # A finished folder of that name stays usable.
    (tmp_path / "out").mkdir()
    write_shard(tmp_path / "out" / "train-00000", 0, 3)
    assert len(open_dataset(tmp_path / "out")) == 3


def test_shards_that_disagree_with_the_manifest_are_refused(packed, fixtures):
    shutil.copy(packed / "train-00000.idx", packed / "train-00002.idx")
    assert "train-00002.idx lists 4 records and dataset.json says 7" in refused(packed)
    shutil.copy(fixtures / "rec" / "base.rec", packed / "train-00000.rec")
    assert "train-00000.rec has 101504 bytes and dataset.json says" in refused(packed)
    (packed / "train-00000.rec").unlink()
    assert "cannot open the records" in refused(packed)


def test_pair_that_the_manifest_does_not_list_is_refused(packed):
    write_shard(packed / "other", 0, 1)
    assert "other.rec" in refused(packed) and "does not list" in refused(packed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "wds"}, "not a manifest"),
        ({"format_version": 2}, "format version 2 and this program reads 1"),
        ({"shards": []}, "lists no shards"),
        ({"shards": [{"name": "train-00000", "records": "4", "bytes": 1}]}, "lists no shards"),
        ({"captions": []}, "as captions"),
        ({"captions": ["c"] * 9}, "as captions"),
    ],
)
def test_manifest_of_another_form_is_refused(packed, change, says):
    manifest = read_manifest(packed) | change
    (packed / "dataset.json").write_text(json.dumps(manifest))
    assert says in refused(packed)


def test_manifest_that_is_not_json_is_refused(packed):
    (packed / "dataset.json").write_text('{"format": ')
    assert "is not JSON" in refused(packed)
    (packed / "dataset.json").write_text("[]")
    assert "is not a manifest" in refused(packed)


def test_fingerprint_changes_with_order_names_and_places(packed, tmp_path_factory):
    before = open_dataset(packed).fingerprint
    assert open_dataset(packed).fingerprint == before
    # The same records in another order: same sizes and counts.
    other = tmp_path_factory.mktemp("other")
    payloads = [b"aa", b"bbbbbbbbb"]
    for name, order in (("x", (0, 1)), ("y", (1, 0))):
        (other / name).mkdir()
        with RecordWriter(other / name / "train") as writer:
            for key, i in enumerate(order):
                writer.write(key, captions([1]), payloads[i])
    assert open_dataset(other / "x").fingerprint != open_dataset(other / "y").fingerprint
    (packed / "dataset.json").unlink()
    for end in (".rec", ".idx"):
        os.rename(packed / f"train-00000{end}", packed / f"first-00000{end}")
    assert open_dataset(packed).fingerprint != before


def test_many_shards_keep_few_files_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "_MAX_MAPPED_FILES", 3)
    for number in range(10):
        write_shard(tmp_path / f"s{number}", number, 1)
    data = open_dataset(tmp_path)
    for _ in range(2):
        assert [data.read(i).label[1] for i in range(10)] == [300 + i for i in range(10)]
        assert sum(file._view is not None for file in data.files) <= 3
    assert pickle.loads(pickle.dumps(data)).read(9).label[1] == 309


def test_D18_mixed_label_widths_name_record_and_widths(fixtures):
    data = open_dataset(fixtures / "rec" / "mixed_labels.rec")
    with pytest.raises(UserError, match=r"mixed_labels.rec key 3 has a label of 154 numbers .* wants 231") as error:
        data.check()
    assert "3 of 10 records differ" in str(error.value)


def test_D18_one_odd_record_outside_the_sample_is_found(tmp_path):
    with RecordWriter(tmp_path / "x") as writer:
        for key in range(3000):
            writer.write(key, captions([1], [2]) if key == 1501 else captions([1], [2], [3]), b"x")
    with pytest.raises(UserError, match="x.rec key 1501 has a label of 154 numbers"):
        open_dataset(tmp_path / "x").check(sample=10)


@pytest.mark.parametrize(("label", "found"), [(np.float32(7), 1), (np.zeros(78), 78), (np.zeros(77 * 9), 693)])
def test_labels_that_are_no_captions_are_refused_at_opening(tmp_path, label, found):
    write_shard(tmp_path / "x", 0, 1, label)
    assert f"has a label of {found} numbers" in refused(tmp_path / "x")


def test_D15_index_of_another_file_is_an_error_of_the_start_up_check(fixtures, tmp_path):
    for index, key in (("off_by_4", 5), ("past_end", 10)):
        shutil.copy(fixtures / "rec" / "base.rec", tmp_path / f"{index}.rec")
        shutil.copy(fixtures / "rec" / f"{index}.idx", tmp_path)
        with pytest.raises(UserError, match=f"{index}.rec key {key} at byte"):
            open_dataset(tmp_path / f"{index}").check()


def test_check_counts_samples_and_empty_captions(tmp_path):
    write_shard(tmp_path / "x", 0, 5, captions([], [3], []))
    lines = []
    report = open_dataset(tmp_path / "x").check(log=lines.append)
    assert (report.num_records, report.num_sampled, report.empty_share) == (5, 5, [1.0, 0.0, 1.0])
    assert lines == report.notes and "caption 'raw' is empty in 100.0% of 5" in lines[0]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, 5, "caption 0 starts with token 5"),
        (77, 0, "caption 1 starts with token 0"),
        (1, 49408, "49408, which is no token id"),
        (1, -1, "-1, which is no token id"),
        (1, 0.5, "0.5, which is no token id"),
        (1, np.nan, "nan, which is no token id"),
        (79, 8, "caption 1 has no end token"),
    ],
)
def test_label_that_holds_no_captions_is_told(place, value, says, tmp_path):
    label = captions([1], [2])
    assert token_fault(label) is None
    label[place] = value
    assert says in token_fault(label)
    write_shard(tmp_path / "x", 0, 1, captions([1], [2]))
    write_shard(tmp_path / "y", 0, 1, label)
    with pytest.raises(UserError, match=f"y.rec key 0: .*{says}"):
        open_dataset(tmp_path).check()


def test_undecodable_image_in_the_sample_names_its_record(packed):
    def decode(payloads):
        return ["not an image" if bytes(payload) == b"image 8" else None for payload in payloads]

    with pytest.raises(UserError, match=r"train-00002.rec key 3: its image cannot be decoded \(not an image\)"):
        open_dataset(packed).check(decode=decode)
    assert open_dataset(packed).check(sample=2, decode=decode).num_sampled == 5


def test_sound_result_is_kept_until_a_file_changes(packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert not check_dataset(open_dataset(packed), cache_folder=folder).from_cache
    assert (folder / CACHE_NAME).exists()
    kept = check_dataset(open_dataset(packed), cache_folder=folder)
    assert kept.from_cache and kept.num_sampled == 12
    assert not check_dataset(open_dataset(packed), sample=5, cache_folder=folder).from_cache
    stat = os.stat(packed / "train-00001.rec")
    os.utime(packed / "train-00001.rec", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert not check_dataset(open_dataset(packed), sample=5, cache_folder=folder).from_cache
    for nonsense in ("[3]", "{", json.dumps({open_dataset(packed).fingerprint: {"state": 3}})):
        (folder / CACHE_NAME).write_text(nonsense)
        assert not check_dataset(open_dataset(packed), sample=5, cache_folder=folder).from_cache


def test_kept_result_without_decoding_does_not_stand_for_one_with_it(packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")

    def sound(payloads):
        return [None] * len(payloads)

    data = open_dataset(packed)
    for decode, from_cache in ((None, False), (sound, False), (sound, True), (None, True)):
        assert check_dataset(data, decode=decode, cache_folder=folder).from_cache == from_cache


def test_results_of_two_data_sets_in_one_folder_are_both_kept(tmp_path):
    for name in ("train", "val"):
        write_shard(tmp_path / name, 0, 2)
        check_dataset(open_dataset(tmp_path / name), cache_folder=tmp_path)
    assert all(
        check_dataset(open_dataset(tmp_path / name), cache_folder=tmp_path).from_cache for name in ("train", "val")
    )


def test_result_that_cannot_be_kept_is_no_error(packed, tmp_path):
    report = check_dataset(open_dataset(packed), cache_folder=tmp_path / "no" / "folder")
    assert report.num_sampled == 12


def test_faulty_data_are_not_remembered_as_sound(fixtures, tmp_path):
    data = open_dataset(fixtures / "rec" / "mixed_labels")
    for _ in range(2):
        with pytest.raises(UserError):
            data.check(cache_folder=tmp_path)


def test_manifest_is_complete_or_absent(packed, monkeypatch):
    before = (packed / "dataset.json").read_text()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot write .*dataset.json: No space left"):
        write_manifest(packed, ["train-00000"], ["raw"])
    assert (packed / "dataset.json").read_text() == before


def test_long_checks_say_how_they_get_on():
    lines = []
    progress = Progress("checking the index", 100, log=lines.append, every=0.0)
    progress(25)
    assert lines[0].startswith("checking the index: 25 of 100 records (")
    quiet = Progress("checking", 100, log=lines.append, every=60.0)
    quiet(100)
    assert len(lines) == 1


def test_labels_are_read_only_views(packed):
    with pytest.raises(ValueError, match="read-only"):
        open_dataset(packed).read(0).label[0] = 1


def test_check_of_large_data_shows_its_rate(packed, monkeypatch):
    monkeypatch.setattr(checks_module, "Progress", functools.partial(Progress, every=0.0))
    lines = []
    open_dataset(packed).check(log=lines.append)
    assert any(line.startswith("checking the index: 12 of 12 records (") for line in lines)
    assert any(line.startswith("checking a sample: 12 of 12 records (") for line in lines)
