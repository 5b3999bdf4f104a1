"""The RecordIO reader and writer on sound files, odd indices and interrupted writes."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.data.record_format import MAGIC_BYTES
from rwkv_clip.data.record_scan import rebuild_index
from rwkv_clip.data.recordio import RecordFile, RecordWriter, pair_paths
from rwkv_clip.errors import UserError

MAGIC_AS_FLOAT = np.frombuffer(MAGIC_BYTES, np.float32)[0]


def label_of(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_D11_record_stored_in_parts_is_joined_with_the_magic(fixtures):
    file = RecordFile(fixtures / "rec" / "split.rec")
    report = file.check()
    md5 = [hashlib.md5(file.read(i).payload).hexdigest()[:8] for i in range(len(file))]
    assert md5 == ["baa29832", "d0888f48", "33b5580f", "4c7ea603", "60cc09e0", "baa29832"]
    assert [file.read(i).label[1] for i in range(6)] == [300, 301, 302, 303, 304, 305]
    assert report.num_multipart == 3 and set(report.widths.tolist()) == {231}


def test_D11_magic_inside_header_label_and_payload_comes_back(tmp_path):
    label = label_of(49406, MAGIC_AS_FLOAT, 7)
    payloads = [MAGIC_BYTES, b"", MAGIC_BYTES * 3, b"ab" + MAGIC_BYTES, b"abcd" + MAGIC_BYTES + b"x"]
    magic_as_key = int.from_bytes(MAGIC_BYTES, "little")
    with RecordWriter(tmp_path / "x") as writer:
        for key, payload in enumerate(payloads):
            writer.write(key, label, payload)
        writer.write(magic_as_key, 1.5, b"scalar label")
    file = RecordFile(tmp_path / "x.rec")
    file.check()
    for i, payload in enumerate(payloads):
        record = file.read(i)
        assert bytes(record.payload) == payload
        assert record.label.tobytes() == label.tobytes()
    assert file.header(5) == (0, 1.5, magic_as_key, 0)
    assert bytes(file.read(5).payload) == b"scalar label"


@pytest.mark.parametrize(
    "index", ["base", "spaces", "crlf", "blank_lines", "header_line", "no_final_newline", "string_keys"]
)
def test_index_variants_read_like_the_plain_index(fixtures, index):
    file = RecordFile(fixtures / "rec" / "base.rec", fixtures / "rec" / f"{index}.idx")
    file.check()
    assert file.keys.dtype == np.int64 and file.keys.tolist() == list(range(10))
    assert [file.read(i).label[1] for i in range(10)] == [300 + i for i in range(10)]


def test_word_keys_are_numbered_and_named_in_messages(fixtures):
    file = RecordFile(fixtures / "rec" / "base.rec", fixtures / "rec" / "string_keys.idx")
    assert file.read(3).key == 3
    assert file.describe(3) == "base.rec key img_000003 (byte 28592)"


def test_unsorted_index_keeps_its_order(fixtures):
    file = RecordFile(fixtures / "rec" / "base.rec", fixtures / "rec" / "unsorted.idx")
    assert file.check().notes == []
    assert file.keys.tolist() == [1, 5, 6, 0, 9, 4, 7, 2, 8, 3]
    assert [file.read(i).label[1] - 300 for i in range(10)] == file.keys.tolist()


def test_subset_index_reads_its_records_and_says_what_it_leaves_out(fixtures):
    file = RecordFile(fixtures / "rec" / "base.rec", fixtures / "rec" / "subset.idx")
    assert [file.read(i).label[1] for i in range(len(file))] == [300, 303, 306, 309]
    assert "leaves out" in file.check().notes[0]


@pytest.mark.parametrize("name", ["base", "split"])
def test_D13_an_index_that_ends_before_its_file_is_refused_until_it_is_rebuilt_or_the_rest_cut_off(
    fixtures, tmp_path, name
):
    whole = RecordFile(fixtures / "rec" / f"{name}.rec")
    lines = (fixtures / "rec" / f"{name}.idx").read_bytes().splitlines(keepends=True)
    shutil.copy(fixtures / "rec" / f"{name}.rec", tmp_path / "x.rec")
    for kept in range(1, len(lines)):
        (tmp_path / "x.idx").write_bytes(b"".join(lines[:kept]))
        end = whole.part_end(kept - 1)
        for look in (RecordFile(tmp_path / "x.rec").check, partial(open_dataset, tmp_path / "x")):
            with pytest.raises(UserError) as error:
                look()
            assert f"x.idx ends with key {kept - 1} at byte {whole.offsets[kept - 1]} " in one_line(error)
            assert f"--rebuild-index {tmp_path / 'x.rec'}" in str(error.value)
            assert f"`truncate -s {end} {tmp_path / 'x.rec'}`" in str(error.value)
    os.truncate(tmp_path / "x.rec", end)
    assert len(open_dataset(tmp_path / "x")) == len(lines) - 1
    # A file that ends inside a record keeps what its index lists.
    shutil.copy(fixtures / "rec" / f"{name}.rec", tmp_path / "x.rec")
    os.truncate(tmp_path / "x.rec", whole.size_bytes - 5)
    assert len(open_dataset(tmp_path / "x")) == len(lines) - 1
    shutil.copy(fixtures / "rec" / f"{name}.rec", tmp_path / "x.rec")
    rebuild_index(tmp_path / "x.rec")
    assert len(open_dataset(tmp_path / "x")) == len(lines)


@pytest.mark.parametrize(("index", "key"), [("off_by_4", "key 5"), ("past_end", "key 10")])
def test_D15_index_of_another_packing_names_the_key(fixtures, index, key):
    file = RecordFile(fixtures / "rec" / "base.rec", fixtures / "rec" / f"{index}.idx")
    with pytest.raises(UserError) as error:
        file.check()
    assert f"base.rec {key} at byte" in one_line(error) and f"{index}.idx" in str(error.value)
    with pytest.raises(UserError):
        file.read(int(key.split()[1]))


def test_D15_offset_into_the_middle_of_a_record_is_found(tmp_path):
    with RecordWriter(tmp_path / "x") as writer:
        writer.write(0, label_of(1), b"abcd" + MAGIC_BYTES + bytes(40))
        writer.write(1, label_of(2), b"next")
    second_part = (tmp_path / "x.rec").read_bytes().index(MAGIC_BYTES, 8)
    (tmp_path / "x.idx").write_text(f"0\t0\n7\t{second_part}\n")
    with pytest.raises(UserError, match=f"key 7 at byte {second_part} .* inner part"):
        RecordFile(tmp_path / "x.rec").check()


def test_record_listed_twice_is_refused(fixtures, tmp_path):
    index = tmp_path / "twice.idx"
    index.write_text("0\t0\n1\t10856\n2\t19680\n3\t10856\n")
    with pytest.raises(UserError, match="lists the record at byte 10856 twice, as key 1 and key 3"):
        RecordFile(fixtures / "rec" / "base.rec", index).check()
    index.write_text("0\t0\n1\t10856\n2\t10856\n")
    with pytest.raises(UserError, match="twice, as key 1 and key 2"):
        RecordFile(fixtures / "rec" / "base.rec", index).check()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lists no record"),
        ("\n\r\n  \n", "lists no record"),
        ("key\toffset\n", "lists no record"),
        ("0\t0\n1 2 x\n", "line 2 of the index"),
        ("0\t0\n12\n", "line 2 of the index"),
        ("0\t0\nkey\toffset\n", "line 2 of the index"),
        ("0\t-5\n", "line 1 of the index"),
        ("0\t99999999999999999999999\n", "line 1 of the index"),
        ("<html>\n404\n", "line 1 of the index"),
    ],
)
def test_index_that_is_none_is_refused_with_its_line(fixtures, tmp_path, text, says):
    index = tmp_path / "bad.idx"
    index.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        RecordFile(fixtures / "rec" / "base.rec", index)
    assert "bad.idx" in one_line(error)


def test_index_with_many_lines_is_read_whole(tmp_path, fixtures):
    keys = np.random.default_rng(0).permutation(200_000)
    offsets = np.arange(200_000) * 2**33 // 100_000 * 4
    index = tmp_path / "many.idx"
    index.write_text("".join(f"{key}\t{offset}\n" for key, offset in zip(keys, offsets, strict=True)))
    file = RecordFile(fixtures / "rec" / "base.rec", index)
    assert np.array_equal(file.keys, keys) and np.array_equal(file.offsets, offsets)


def test_missing_and_empty_files_are_one_line_errors(fixtures, tmp_path):
    with pytest.raises(UserError, match="rec_zero.rec is empty"):
        RecordFile(fixtures / "rec" / "rec_zero.rec")
    with pytest.raises(UserError, match="lists no record"):
        RecordFile(fixtures / "rec" / "base.rec", fixtures / "rec" / "empty.idx")
    with pytest.raises(UserError, match="No such file"):
        RecordFile(tmp_path / "none.rec")
    (tmp_path / "alone.rec").write_bytes((fixtures / "rec" / "base.rec").read_bytes())
    with pytest.raises(UserError, match="has no index alone.idx beside it.*--rebuild-index"):
        RecordFile(tmp_path / "alone.rec")


def test_prefix_and_both_extensions_name_the_same_pair(tmp_path):
    pair = (tmp_path / "a.b.rec", tmp_path / "a.b.idx")
    assert pair_paths(tmp_path / "a.b") == pair_paths(pair[0]) == pair_paths(pair[1]) == pair


def test_L13_records_past_2_and_4_gib_are_read(fixtures, tmp_path):
    source = RecordFile(fixtures / "rec" / "base.rec")
    places = [0, 2**31 + 4096, 2**32 + 8192]
    with open(tmp_path / "large.rec", "wb") as out:
        for i, place in enumerate(places):
            out.seek(place)  # a sparse file: little real disk
            out.write(source.view()[source.offsets[i] : source.offsets[i + 1]])
    (tmp_path / "large.idx").write_text("".join(f"{i}\t{place}\n" for i, place in enumerate(places)))
    file = RecordFile(tmp_path / "large.rec")
    assert [file.read(i).label[1] for i in range(3)] == [300, 301, 302]
    assert set(file.check().widths.tolist()) == {231}


def test_file_that_changes_size_after_opening_is_noticed(tmp_path):
    with RecordWriter(tmp_path / "x") as writer:
        writer.write(0, label_of(1), b"one")
    file = RecordFile(tmp_path / "x.rec")
    with open(tmp_path / "x.rec", "ab") as out:
        out.write(b"more")
    with pytest.raises(UserError, match="when opened and is"):
        file.read(0)


def test_threads_pickles_and_forks_read_the_same(fixtures):
    file = RecordFile(fixtures / "rec" / "split.rec")

    def digest(i: int) -> str:
        return hashlib.md5(file.read(i % 6).payload).hexdigest()

    want = [digest(i) for i in range(6)] * 50
    child = os.fork()
    if child == 0:
        os._exit(0 if digest(1) == want[1] else 1)
    assert os.waitpid(child, 0)[1] == 0
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(digest, range(300))) == want
    copy = pickle.loads(pickle.dumps(file))
    assert bytes(copy.read(2).payload) == bytes(file.read(2).payload)


def test_views_outlive_the_release_of_the_mapping(fixtures):
    file = RecordFile(fixtures / "rec" / "base.rec")
    record = file.read(0)
    before = hashlib.md5(record.payload).hexdigest()
    file.release()
    assert hashlib.md5(record.payload).hexdigest() == before
    assert file.read(1).label[1] == 301


# Long enough for cuts at every kind of place: the magic with every alignment, and pieces of it.
PIECES = st.sampled_from([MAGIC_BYTES, MAGIC_BYTES[:2], MAGIC_BYTES[2:], b"\0", b"abc", b"abcd"]) | st.binary(
    max_size=9
)
PAYLOADS = st.lists(PIECES, max_size=12).map(b"".join)
LABELS = st.lists(st.sampled_from([0.0, 49406.0, float(MAGIC_AS_FLOAT), 1.5]), min_size=1, max_size=6)


@given(st.lists(st.tuples(LABELS, PAYLOADS), min_size=1, max_size=6), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_written_is_read_again(tmp_path, records, scalar_labels):
    with RecordWriter(tmp_path / "x") as writer:
        for key, (label, payload) in enumerate(records):
            writer.write(key, label[0] if scalar_labels else np.array(label, np.float32), payload)
    file = RecordFile(tmp_path / "x.rec")
    report = file.check()
    assert len(file) == len(records) and report.unlisted_bytes == 0
    for i, (label, payload) in enumerate(records):
        record = file.read(i)
        want = np.array(label[:1] if scalar_labels else label, np.float32)
        assert (record.key, record.label.tobytes(), bytes(record.payload)) == (i, want.tobytes(), payload)
        assert file.header(i)[0] == (0 if scalar_labels else len(label)) and file.header(i)[2] == i
        assert report.widths[i] == len(want)


def exercise(rec_path, idx_path) -> str:
    """Open, check and read everything; "sound" or "refused". Any other exception is a crash of the reader."""
    try:
        file = RecordFile(rec_path, idx_path)
        file.check(num_threads=1)
        outcome = "sound"
    except UserError as error:
        assert "\n" not in str(error)
        outcome = "refused"
    try:
        file = RecordFile(rec_path, idx_path)
        for i in range(len(file)):
            try:
                record = file.read(i)
                bytes(record.payload), record.label.tobytes()
                file.describe(i)
            except UserError:
                assert outcome == "refused"
    except UserError:
        pass
    return outcome


@given(
    st.sampled_from(["base", "split", "mixed_labels"]),
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=6),
    st.one_of(st.none(), st.floats(0, 1)),
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=3)), max_size=2),
)
@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_give_user_errors_and_nothing_else(fixtures, tmp_path, name, edits, cut, index_edits):
    offsets = RecordFile(fixtures / "rec" / f"{name}.rec").offsets
    data = bytearray((fixtures / "rec" / f"{name}.rec").read_bytes())
    for where, content in edits:
        # Half of the edits hit a record's first 40 bytes, where the structure is.
        if where < 0.5:
            start = int(offsets[int(where * 2 * len(offsets)) % len(offsets)]) + int(where * 1e6) % 40
        else:
            start = int((where - 0.5) * 2 * (len(data) - 1))
        data[start : start + len(content)] = content
    if cut is not None:
        del data[int(cut * len(data)) :]
    index = bytearray((fixtures / "rec" / f"{name}.idx").read_bytes())
    for where, content in index_edits:
        start = int(where * len(index))
        index[start : start + len(content)] = content
    (tmp_path / "x.rec").write_bytes(data)
    (tmp_path / "x.idx").write_bytes(index)
    exercise(tmp_path / "x.rec", tmp_path / "x.idx")


@given(st.binary(max_size=200), st.binary(max_size=60) | st.text("0123456789\t\n -", max_size=40).map(str.encode))
@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_refused(tmp_path, data, index):
    (tmp_path / "x.rec").write_bytes(data)
    (tmp_path / "x.idx").write_bytes(index)
    assert exercise(tmp_path / "x.rec", tmp_path / "x.idx") == "refused"


def test_writer_leaves_nothing_under_final_names_after_an_exception(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with RecordWriter(tmp_path / "x") as writer:
            writer.write(0, label_of(1), b"one")
            assert sorted(os.listdir(tmp_path)) == ["x.idx.partial", "x.rec.partial"]
            raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_aborted_writer_leaves_an_older_pair_alone(tmp_path):
    with RecordWriter(tmp_path / "x") as writer:
        writer.write(0, label_of(1), b"old")
    writer = RecordWriter(tmp_path / "x")
    writer.write(0, label_of(1), b"new")
    writer.abort()
    assert bytes(RecordFile(tmp_path / "x.rec").read(0).payload) == b"old"
    assert sorted(os.listdir(tmp_path)) == ["x.idx", "x.rec"]


def test_D13_killed_writer_leaves_nothing_that_opens(tmp_path):
    code = (
        "import sys, numpy as np; from rwkv_clip.data.recordio import RecordWriter\n"
        "writer = RecordWriter(sys.argv[1])\n"
        "for key in range(10**9):\n"
        "    writer.write(key, np.zeros(231, np.float32), bytes(9000))\n"
        "    if key == 200: print('200', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "200\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert sorted(os.listdir(tmp_path)) == ["x.idx.partial", "x.rec.partial"]
    with pytest.raises(UserError, match="cannot open the records .*x.rec"):
        RecordFile(tmp_path / "x.rec")


def test_writer_names_the_index_last(tmp_path, monkeypatch):
    order = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (order.append(target.name), replace(source, target)))
    with RecordWriter(tmp_path / "x") as writer:
        writer.write(0, label_of(1), b"one")
    assert order == ["x.rec", "x.idx"]


def test_writer_reports_a_full_disk_and_cleans_up(tmp_path, monkeypatch):
    writer = RecordWriter(tmp_path / "x")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer.write(0, label_of(1), b"one")
    with pytest.raises(UserError, match="cannot finish .*x.rec: No space left on device"):
        writer.close()
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError, match="cannot write .*No such file or directory"):
        RecordWriter(tmp_path / "no" / "x")


def test_record_beyond_the_format_limit_is_refused(tmp_path):

    with RecordWriter(tmp_path / "x") as writer:
        with pytest.raises(UserError, match="is 536870912 bytes and RecordIO's limit is 536870911"):
            writer.write(0, label_of(1), memoryview(np.zeros(2**29 - 28, np.uint8)))
        writer.write(1, label_of(1), b"small")
    assert len(RecordFile(tmp_path / "x.rec")) == 1


def test_mapping_may_be_released_while_another_thread_reads(fixtures):
    file = RecordFile(fixtures / "rec" / "base.rec", fixtures / "rec" / "string_keys.idx")
    stop, faults = threading.Event(), []

    def read():
        while not stop.is_set():
            if file.read(0).label[1] != 300:
                faults.append(1)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        file.release()
        assert file.key_name(9) == "img_000009"
    stop.set()
    thread.join(5)
    assert not faults and not thread.is_alive()
