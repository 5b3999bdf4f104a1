"""`rwkv-clip inspect`: the report, full verification, the contact sheet, index rebuild and repair."""

from __future__ import annotations

import json
import os
import shutil
import sys

import numpy as np
import pytest

from rwkv_clip.cli import main
from rwkv_clip.data.contact_sheet import write_contact_sheet
from rwkv_clip.data.dataset import open_dataset, write_manifest
from rwkv_clip.data.record_format import MAGIC_BYTES
from rwkv_clip.data.record_scan import scan_records
from rwkv_clip.data.recordio import RecordFile, RecordWriter
from rwkv_clip.data.repair import repair
from rwkv_clip.data.survey import in_order, percentile, survey
from rwkv_clip.data.tokenizer import tokenize_numpy
from rwkv_clip.errors import UserError

BROKEN_IMAGES = ["trunc_60pct.jpg", "html_404.jpg", "zero_bytes.jpg", "trunc_header.jpg"]


@pytest.fixture(autouse=True)
def quiet_decoder(monkeypatch):
    monkeypatch.setenv("PYNVIMGCODEC_VERBOSITY", "0")


@pytest.fixture
def pairs(fixtures, tmp_path):
    """A writable copy of the RecordIO test files, each pair complete."""
    for name in ("base", "split", "mixed_labels", "mix_formats"):
        for extension in (".rec", ".idx"):
            shutil.copy(fixtures / "rec" / f"{name}{extension}", tmp_path)
    return tmp_path


@pytest.fixture
def with_broken_images(fixtures, tmp_path):
    """Two shards of five records with one kind of fault each here and there, and a manifest."""
    good = (fixtures / "img" / "rgb.jpg").read_bytes()
    label = tokenize_numpy(["a dog on a beach", "", "two dogs " * 60]).astype(np.float32).reshape(-1)
    folder = tmp_path / "packed"
    folder.mkdir()
    for shard in range(2):
        with RecordWriter(folder / f"train-{shard:05d}") as writer:
            for key in range(5):
                name = BROKEN_IMAGES[shard * 2 + key // 3] if key in (1, 3) else None
                payload = (fixtures / "img" / name).read_bytes() if name else good + b"%d%d" % (shard, key)
                writer.write(key + 10 * shard, label, payload)
    write_manifest(folder, ["train-00000", "train-00001"], ["raw", "synthetic", "generated"])
    return folder


def inspect_json(capsys, *arguments) -> tuple[int, dict]:
    status = main(["inspect", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_report_counts_labels_captions_and_images(with_broken_images, capsys):
    status, result = inspect_json(capsys, with_broken_images)
    assert status == 0 and not result["verified"]
    assert (result["records"], result["shards"], result["records_read"]) == (10, 2, 10)
    assert result["label_widths"] == {"231": 10}
    raw, synthetic, generated = result["captions"]
    assert (raw["name"], raw["mean_tokens"], raw["max_tokens"], raw["empty_share"]) == ("raw", 5.0, 5, 0.0)
    assert (synthetic["mean_tokens"], synthetic["empty_share"]) == (0.0, 1.0)
    assert (generated["median_tokens"], generated["full_share"]) == (75, 1.0)
    assert result["formats"] == {"jpeg": 7, "unreadable": 3}
    assert result["image_sides"]["width"] == {"min": 160, "median": 160, "max": 160}
    assert result["repeated_images"] == 0


def test_formats_sizes_and_repeated_images_are_counted(pairs, capsys):
    _, result = inspect_json(capsys, pairs / "mix_formats.rec")
    assert result["formats"] == {"jpeg": 6, "png": 4, "webp": 1, "bmp": 1}
    assert result["image_sides"]["height"]["min"] == 1
    _, result = inspect_json(capsys, pairs / "base")
    assert result["repeated_images"] == 5


def test_D11_records_in_parts_are_counted(pairs, capsys):
    status, result = inspect_json(capsys, pairs / "split", "--verify")
    assert (status, result["records"], result["records_in_parts"], result["faults"]) == (0, 6, 3, [])


def test_verify_lists_every_record_that_training_cannot_use(with_broken_images, capsys):
    status, result = inspect_json(capsys, with_broken_images, "--verify", "--workers", 3)
    assert status == 1 and result["verified"]
    assert [fault["where"].split(" (")[0] for fault in result["faults"]] == [
        "train-00000.rec key 1",
        "train-00000.rec key 3",
        "train-00001.rec key 11",
        "train-00001.rec key 13",
    ]
    assert all(fault["reason"].startswith("image: ") for fault in result["faults"])
    assert main(["inspect", str(with_broken_images), "--verify"]) == 1
    text = capsys.readouterr().out
    assert "10 records decoded: 4 cannot be used" in text and "train-00001.rec key 13" in text
    assert "--repair FOLDER" in text


def test_verify_judges_images_as_the_training_decoder_does(fixtures, tmp_path):
    images = sorted(path for path in (fixtures / "img").iterdir() if "huge" not in path.name)
    label = tokenize_numpy(["x"]).astype(np.float32).reshape(-1)
    with RecordWriter(tmp_path / "x") as writer:
        for key, path in enumerate(images):
            writer.write(key, label, path.read_bytes())
    counts = survey(open_dataset(tmp_path / "x"), np.arange(len(images)), decode=True)
    assert sorted(images[fault.id].name for fault in counts.faults) == sorted(BROKEN_IMAGES)


def test_D18_mixed_label_widths_are_listed(pairs, capsys):
    status, result = inspect_json(capsys, pairs / "mixed_labels")
    assert status == 1
    assert result["label_widths"] == {"231": 7, "154": 1, "1": 1, "77": 1}
    assert [fault["id"] for fault in result["faults"]] == [3, 6, 8]


def test_D15_index_of_another_file_is_reported(pairs, fixtures, capsys):
    shutil.copy(fixtures / "rec" / "off_by_4.idx", pairs / "base.idx")
    status, result = inspect_json(capsys, pairs / "base")
    assert status == 1 and "key 5" in result["index_faults"][0]
    assert main(["inspect", str(pairs / "base")]) == 1
    assert "FAULTY" in capsys.readouterr().out


def test_unusable_data_end_with_one_line_and_status_2(pairs, capsys):
    for path in (pairs / "none", pairs / "base.idx" / "x"):
        assert main(["inspect", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_missing_decoder_is_named(pairs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    assert main(["inspect", str(pairs / "base")]) == 2
    assert "pip install nvidia-dali-cuda120" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--show", "3"], "--show K and --out FILE go together"),
        (["--out", "x.png"], "--show K and --out FILE go together"),
        (["--show", "0", "--out", "x.png"], "--show 0"),
        (["--workers", "0"], "--workers 0"),
    ],
)
def test_wrong_options_are_refused(pairs, capsys, arguments, says):
    assert main(["inspect", str(pairs / "base"), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_large_data_are_sampled_unless_verified(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rwkv_clip.data.inspect._SAMPLE", 100)
    label = tokenize_numpy(["x"]).astype(np.float32).reshape(-1)
    with RecordWriter(tmp_path / "x") as writer:
        for key in range(500):
            writer.write(key, label, b"\xff\xd8 no image")
    _, result = inspect_json(capsys, tmp_path / "x")
    assert 50 < result["records_read"] <= 100
    status, result = inspect_json(capsys, tmp_path / "x", "--verify")
    assert (status, result["records_read"], len(result["faults"])) == (1, 500, 500)
    main(["inspect", str(tmp_path / "x"), "--verify"])
    assert "and 480 more" in capsys.readouterr().out


def test_contact_sheet_shows_what_training_sees(with_broken_images, fixtures, tmp_path, capsys):
    from PIL import Image

    assert main(["inspect", str(with_broken_images), "--show", "4", "--out", str(tmp_path / "grid.png")]) == 0
    sheet = Image.open(tmp_path / "grid.png").convert("RGB")
    assert sheet.width == 2 * 240 and sheet.height > 2 * 240
    # Tiles 0 and 1 are records 0 and 3: the quadrants, and a grey tile for the broken one.
    red, yellow = sheet.getpixel((8 + 40, 8 + 70)), sheet.getpixel((8 + 180, 8 + 150))
    assert red[0] > 180 and red[1] < 80 and yellow[0] > 180 and yellow[1] > 180 and yellow[2] < 90
    assert sheet.getpixel((240 + 100, 100)) == (211, 211, 211)


def test_contact_sheet_that_cannot_be_written_is_one_line(pairs, capsys):
    for out in ("/no/such/folder/grid.png", str(pairs / "grid.nonsense")):
        assert main(["inspect", str(pairs / "base"), "--show", "2", "--out", out]) == 2
        assert "cannot write the picture" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["base", "split", "mixed_labels"])
def test_rebuilt_index_is_the_one_that_was_lost(pairs, fixtures, capsys, name):
    (pairs / f"{name}.idx").write_bytes(b"")
    assert main(["inspect", str(pairs / f"{name}.rec"), "--rebuild-index"]) in (0, 1)
    assert (pairs / f"{name}.idx").read_bytes() == (fixtures / "rec" / f"{name}.idx").read_bytes()
    assert not (pairs / f"{name}.idx.old").exists()


def test_rebuild_keeps_the_older_index(pairs, fixtures, capsys):
    shutil.copy(fixtures / "rec" / "subset.idx", pairs / "base.idx")
    assert main(["inspect", str(pairs / "base"), "--rebuild-index"]) == 0
    assert (pairs / "base.idx.old").read_bytes() == (fixtures / "rec" / "subset.idx").read_bytes()
    assert len(open_dataset(pairs / "base")) == 10


def test_D13_torn_file_without_index_gets_its_whole_records_back(pairs, capsys):
    data = (pairs / "base.rec").read_bytes()
    (pairs / "base.rec").write_bytes(data[:75_000])
    (pairs / "base.idx").write_bytes(b"")
    status, result = inspect_json(capsys, pairs / "base", "--rebuild-index")
    assert status == 0
    assert result["rebuilt"] == [
        {"file": "base.rec", "records": 7, "lost_bytes": 75_000 - 70_432, "torn_tail": True},
    ]
    assert [record.label[1] for record in map(RecordFile(pairs / "base.rec").read, range(7))] == list(range(300, 307))


def test_scan_goes_on_after_a_broken_place(pairs):
    offsets = RecordFile(pairs / "base.rec").offsets.tolist()
    data = bytearray((pairs / "base.rec").read_bytes())
    data[offsets[2] : offsets[2] + 4] = b"oops"
    data[offsets[6] + 4 : offsets[6] + 8] = b"\xff\xff\xff\x1f"
    (pairs / "base.rec").write_bytes(data)
    scan = scan_records(pairs / "base.rec")
    assert scan.index.offsets.tolist() == [place for i, place in enumerate(offsets) if i not in (2, 6)]
    assert scan.index.keys.tolist() == [0, 1, 3, 4, 5, 7, 8, 9]
    assert scan.lost_bytes == offsets[3] - offsets[2] + offsets[7] - offsets[6] and not scan.torn_tail


def test_scan_counts_keys_where_ids_repeat(tmp_path):
    with RecordWriter(tmp_path / "x") as writer:
        for key in range(4):
            writer.write(key, np.ones(3, np.float32), b"abcd" + MAGIC_BYTES, record_id=0)
    assert scan_records(tmp_path / "x.rec").index.keys.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("data", [b"", b"x", bytes(1000), MAGIC_BYTES * 300, os.urandom(5000)])
def test_scan_of_something_else_is_refused(tmp_path, data):
    (tmp_path / "x.rec").write_bytes(data)
    with pytest.raises(UserError, match="is empty|holds no RecordIO record"):
        scan_records(tmp_path / "x.rec")


def test_data_that_the_system_refuses_is_one_line(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / ("x" * 5000))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "File name too long" in line


def test_letters_with_accents_are_drawn(fixtures, tmp_path):
    sheets = []
    for letter in "éüñ":
        label = tokenize_numpy([letter * 5]).astype(np.float32).reshape(-1)
        (tmp_path / letter).mkdir()
        with RecordWriter(tmp_path / letter / "x") as writer:
            writer.write(0, label, (fixtures / "img/rgb.jpg").read_bytes())
        write_contact_sheet(open_dataset(tmp_path / letter), 1, tmp_path / f"{letter}.png")
        sheets.append((tmp_path / f"{letter}.png").read_bytes())
    assert len(set(sheets)) == 3  # a font without them draws the same box for each


def test_repair_writes_a_clean_copy_and_lists_what_it_left_out(with_broken_images, tmp_path, capsys):
    status, result = inspect_json(capsys, with_broken_images, "--repair", tmp_path / "clean", "--verify")
    assert status == 0
    assert result["repaired"] == {"records": 6, "left_out": 4, "shards": 2}
    assert (result["records"], result["faults"], result["data"]) == (6, [], str(tmp_path / "clean"))
    copy, source = open_dataset(tmp_path / "clean"), open_dataset(with_broken_images)
    assert copy.caption_names == source.caption_names and copy.manifest["packed"]["records_left_out"] == 4
    kept = [source.read(i) for i in (0, 2, 4, 5, 7, 9)]
    assert [bytes(copy.read(i).payload) for i in range(6)] == [bytes(record.payload) for record in kept]
    assert [copy.read(i).key for i in range(6)] == [record.key for record in kept] == [0, 2, 4, 10, 12, 14]
    listed = [json.loads(line) for line in (tmp_path / "clean" / "left_out.jsonl").read_text().splitlines()]
    assert [(line["file"], line["key"]) for line in listed] == [
        ("train-00000.rec", "1"),
        ("train-00000.rec", "3"),
        ("train-00001.rec", "11"),
        ("train-00001.rec", "13"),
    ]


def test_repair_of_sound_data_gives_the_same_bytes(pairs, tmp_path):
    assert repair(pairs / "split", tmp_path / "out") == {"records": 6, "left_out": 0, "shards": 1}
    for extension in (".rec", ".idx"):
        assert (tmp_path / "out" / f"split{extension}").read_bytes() == (pairs / f"split{extension}").read_bytes()


def test_D18_repair_keeps_the_label_width_that_most_records_have(pairs, tmp_path):
    index = (pairs / "mixed_labels.idx").read_text().splitlines(keepends=True)
    (pairs / "mixed_labels.idx").write_text(index[3] + "".join(index[:3] + index[4:]))
    with pytest.raises(UserError, match="key 0 has a label of 231 numbers and the data set wants 154"):
        open_dataset(pairs / "mixed_labels").check()
    assert repair(pairs / "mixed_labels", tmp_path / "out")["records"] == 7
    open_dataset(tmp_path / "out").check()


@pytest.mark.parametrize("index", ["off_by_4", "past_end", "empty", None])
def test_D15_repair_finds_the_records_when_the_index_is_no_help(pairs, fixtures, tmp_path, index):
    (pairs / "base.idx").unlink()
    if index:
        shutil.copy(fixtures / "rec" / f"{index}.idx", pairs / "base.idx")
    lines = []
    assert repair(pairs / "base", tmp_path / "out", log=lines.append)["records"] == 10
    assert "its index cannot be used: 10 records found, 0 bytes lost" in lines[0]


def test_repair_never_overwrites(pairs, capsys):
    assert main(["inspect", str(pairs / "base"), "--repair", str(pairs)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(KeyboardInterrupt(), 130, "stopped"), (OSError(28, "No space left on device"), 2, "No space left on device")],
)
def test_a_repair_that_is_stopped_leaves_nothing_and_the_same_command_works(
    with_broken_images, tmp_path, capsys, monkeypatch, error, status, message
):
    arguments = ["inspect", str(with_broken_images), "--repair", str(tmp_path / "clean")]
    write, written = RecordWriter.write, []

    def stop_in_the_second_shard(writer, *values, **options):
        written.append(values)
        if len(written) > 4:
            raise error
        write(writer, *values, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", stop_in_the_second_shard)
        assert main(arguments) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.glob("clean*"))
    assert main(arguments) == 0 and len(open_dataset(tmp_path / "clean")) == 6
    assert not (tmp_path / "clean.partial").exists()


def test_repair_keeps_an_unfinished_packing_and_refuses_a_mount_point(pairs, tmp_path, monkeypatch):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/recipe.json").touch()
    with pytest.raises(UserError, match="out.partial is an unfinished packing"):
        repair(pairs / "split", tmp_path / "out")
    assert (tmp_path / "out.partial/recipe.json").exists()
    monkeypatch.setattr("os.path.ismount", lambda _: True)
    with pytest.raises(UserError, match="is a mount point"):
        repair(pairs / "split", tmp_path / "other")


def test_repair_of_data_without_a_usable_record_says_so(tmp_path):
    label = tokenize_numpy(["x"]).astype(np.float32).reshape(-1)
    with RecordWriter(tmp_path / "x") as writer:
        writer.write(0, label, b"no image")
    with pytest.raises(UserError, match="no record of .* is usable"):
        repair(tmp_path / "x", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["left_out.jsonl"]


def test_results_keep_their_order_and_errors_pass(tmp_path):
    assert list(in_order(lambda x: x * x, range(200), workers=4)) == [x * x for x in range(200)]
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda x: 1 // (x - 50), range(200), workers=4))


def test_percentile_of_a_histogram():
    histogram = np.bincount([1, 2, 2, 3, 9])
    assert (percentile(histogram, 0.5), percentile(histogram, 1.0), percentile(np.zeros(4), 0.5)) == (2, 9, 0)
