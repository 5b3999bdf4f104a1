"""Reading a batch equals reading its records one by one, on sound files and on broken ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rwkv_clip.data.batch_reader import BatchReader
from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.errors import UserError


def test_a_batch_holds_what_its_records_hold(tmp_path, fixtures):
    for name in ("base", "mix_formats", "split"):
        for extension in ("rec", "idx"):
            (tmp_path / f"{name}.{extension}").write_bytes((fixtures / "rec" / f"{name}.{extension}").read_bytes())
    dataset = open_dataset(tmp_path)
    ids = np.random.default_rng(0).permutation(len(dataset))
    batch = BatchReader(dataset).read(ids)
    for row, i in enumerate(ids.tolist()):
        record = dataset.read(i)
        assert bytes(batch.payloads[row]) == bytes(record.payload)
        assert np.array_equal(batch.labels[row], record.label)


def test_images_are_not_copied(fixtures):
    dataset = open_dataset(fixtures / "rec" / "base")
    payloads = BatchReader(dataset).read(np.arange(10)).payloads
    view = dataset.files[0].view()
    assert all(payload.obj is view.obj for payload in payloads)


@pytest.mark.parametrize("i,width", [(3, 154), (6, 1), (8, 77)])
def test_D18_a_label_of_another_width_is_named_wherever_it_is_in_the_batch(fixtures, i, width):
    reader = BatchReader(open_dataset(fixtures / "rec" / "mixed_labels"))
    for ids in ([i, 0], [0, i], [0, 1, i, 2]):
        with pytest.raises(UserError, match=f"mixed_labels.rec key {i} .*label of {width} numbers.*wants 231"):
            reader.read(np.array(ids))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_gives_the_same_records_or_a_clear_error(tmp_path, fixtures, data):
    name = data.draw(st.sampled_from(["base", "split"]))
    rec = bytearray((fixtures / "rec" / f"{name}.rec").read_bytes())
    idx = (fixtures / "rec" / f"{name}.idx").read_text().split("\n")
    offsets = [int(line.split()[1]) for line in idx if line]
    # Damage near the records' headers, and index entries that point astray.
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.sampled_from(offsets)) + data.draw(st.integers(0, 15))
        rec[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        key = data.draw(st.integers(1, len(offsets) - 1))
        idx[key] = f"{key}\t{data.draw(st.integers(0, len(rec) + 100))}"
    cut = data.draw(st.integers(len(rec) // 2, len(rec)))
    (tmp_path / "x.rec").write_bytes(rec[:cut])
    (tmp_path / "x.idx").write_text("\n".join(idx))
    try:
        dataset = open_dataset(tmp_path / "x")
    except UserError:
        return
    try:
        records = [dataset.read(i) for i in range(len(dataset))]
        sound = all(len(record.label) == dataset.label_width for record in records)
    except UserError:
        sound = False
    if not sound:
        with pytest.raises(UserError):
            BatchReader(dataset).read(np.arange(len(dataset)))
        return
    batch = BatchReader(dataset).read(np.arange(len(dataset)))
    for row, record in enumerate(records):
        assert bytes(batch.payloads[row]) == bytes(record.payload)
        assert np.array_equal(batch.labels[row], record.label, equal_nan=True)
