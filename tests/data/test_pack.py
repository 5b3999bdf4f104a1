from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from loader_data import train_loader
from pack_data import ROOT, contents, make_table, pack_here

from rwkv_clip.cli import main
from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.data.packing import pack, shuffled
from rwkv_clip.data.sources import open_source
from rwkv_clip.data.sources.folder import FolderSource
from rwkv_clip.data.tokenizer import tokenize_numpy
from rwkv_clip.errors import UserError


def captions_of(out: Path) -> list[list[list[int]]]:
    """Token ids of every record, without padding."""
    dataset = open_dataset(out)
    labels = [dataset.read(i).label.astype(int).reshape(-1, 77) for i in range(len(dataset))]
    return [[caption[caption.nonzero()].tolist() for caption in label] for label in labels]


def ids(*captions: str) -> list[list[int]]:
    return [row[row.nonzero()].tolist() for row in tokenize_numpy(list(captions))]


def test_each_record_holds_its_rows_picture_and_captions(tmp_path):
    table = make_table(tmp_path / "in", 20)
    report = pack_here(table, tmp_path / "out", shard_size=7)
    assert report == {"rows": 20, "packed": 20, "skipped": {}, "notes": {}}
    dataset = open_dataset(tmp_path / "out")
    assert dataset.shard_sizes == [7, 7, 6] and dataset.caption_names == ["raw", "synthetic", "generated"]
    seen = set()
    for shard in dataset.files:
        assert shard.keys.tolist() == list(range(len(shard)))
        for position in range(len(shard)):
            row = shard.header(position)[2]
            record = shard.read(position)
            assert bytes(record.payload) == (tmp_path / f"in/{row:05}.jpg").read_bytes()
            expected = tokenize_numpy([f"{name} {row}" for name in ("raw", "synthetic", "generated")])
            assert (record.label.reshape(3, 77) == expected).all()
            seen.add(row)
    assert seen == set(range(20))
    assert not (tmp_path / "out.partial").exists()


def test_the_help_says_what_is_skipped_where_it_is_listed_and_what_a_line_of_a_text_file_is(capsys):
    with pytest.raises(SystemExit):
        main(["pack", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "listed with the reason in OUT/skipped.tsv",
        "broken or missing pictures",
        "another number of columns",
    ):
        assert part in text
    assert "each line of the .txt beside a picture is one caption, at most 8" in text


def test_D1_broken_pictures_are_listed_with_a_reason_and_the_rest_is_packed(tmp_path, fixtures, capsys):
    source = tmp_path / "in"
    source.mkdir()
    for i in range(20):
        shutil.copy(fixtures / "img/rgb.jpg", source / f"{i}.jpg")
        (source / f"{i}.txt").write_text(f"picture {i}")
    broken = ["trunc_60pct.jpg", "html_404.jpg", "zero_bytes.jpg"]
    for name in broken:
        shutil.copy(fixtures / "img" / name, source)
        (source / name).with_suffix(".txt").write_text("broken")
    assert main(["pack", str(source), str(tmp_path / "out"), "--workers", "1"]) == 0
    assert len((tmp_path / "out/data-00000.idx").read_text().splitlines()) == 20
    lines = [line.split("\t") for line in (tmp_path / "out/skipped.tsv").read_text().splitlines()]
    assert lines[0] == ["row", "where", "reason", "detail"]
    found = {where: (reason, detail) for _, where, reason, detail in lines[1:]}
    assert set(found) == set(broken)
    assert found["trunc_60pct.jpg"][0] == "cannot be decoded" and "Premature end" in found["trunc_60pct.jpg"][1]
    assert found["html_404.jpg"] == ("not a picture", "it is an HTML page")
    assert found["zero_bytes.jpg"][0] == "empty file"
    output = capsys.readouterr().out
    assert "packed 20 of 23 rows" in output and "skipped 3" in output
    with train_loader(open_dataset(tmp_path / "out"), 4) as loader:
        assert [sum(len(batch.ids) for batch in loader.epoch(epoch)) for epoch in range(2)] == [20, 20]
    assert main(["pack", str(source), str(tmp_path / "strict"), "--workers", "1", "--strict"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and any(name in message for name in broken)
    assert not (tmp_path / "strict").exists()


def test_D8_a_huge_picture_among_small_ones_is_skipped_with_its_size(tmp_path, fixtures):
    table = make_table(tmp_path / "in", 5)
    shutil.copy(fixtures / "img/huge_14000x14000_gray.jpg", tmp_path / "in/00002.jpg")
    report = pack_here(table, tmp_path / "out")
    assert report["packed"] == 4 and report["skipped"] == {"too large": 1}
    assert "pairs.tsv line 4\ttoo large\t14000 x 14000" in (tmp_path / "out/skipped.tsv").read_text()


def test_D20_the_fixture_of_lone_quotes_gives_eight_samples(tmp_path, fixtures):
    shutil.copy(fixtures / "captions/quotes.tsv", tmp_path)
    for name in "abcdefgh":
        shutil.copy(fixtures / "img/rgb.jpg", tmp_path / f"{name}.jpg")
    report = pack_here(tmp_path / "quotes.tsv", tmp_path / "out", seed=None)
    assert report["packed"] == 8 and report["notes"] == {"captions filled in": 1}
    captions = captions_of(tmp_path / "out")
    assert captions[1] == ids('5" nails in a box', "nails", "a box of nails")
    assert captions[4] == ids("synthetic only", "synthetic only", "generated only")
    assert captions[5] == ids("None", "null", "nan")


def test_D22_good_rows_of_broken_tables_are_packed_and_bad_ones_named_by_line(tmp_path, fixtures):
    for name in "abcdefg":
        shutil.copy(fixtures / "img/rgb.jpg", tmp_path / f"{name}.jpg")
    (tmp_path / "sub dir").mkdir()
    shutil.copy(fixtures / "img/rgb.jpg", tmp_path / "sub dir/猫.jpg")
    for name in ("bad_columns.tsv", "mixed.jsonl"):
        shutil.copy(fixtures / "captions" / name, tmp_path)
    report = pack_here(tmp_path / "bad_columns.tsv", tmp_path / "columns")
    assert report["packed"] == 2 and report["skipped"] == {"wrong number of columns": 3}
    skipped = (tmp_path / "columns/skipped.tsv").read_text()
    assert all(f"bad_columns.tsv line {line}\t" in skipped for line in (2, 3, 4))
    report = pack_here(tmp_path / "mixed.jsonl", tmp_path / "mixed", seed=None)
    assert (
        report["packed"] == 7 and report["skipped"] == {"not JSON": 1} and report["notes"] == {"captions filled in": 2}
    )
    captions = captions_of(tmp_path / "mixed")
    assert captions[1] == ids("lone \ufffd surrogate", "pair 🐶 ok", "x") and 10631 in captions[1][1]  # T7
    assert captions[3] == ids("only one", "only one", "only one")
    assert captions[4] == ids("a", "a", "c")
    assert captions[6] == ids("a", "b", "c")


def test_D23_packing_needs_no_mxnet(tmp_path):
    table = make_table(tmp_path / "in", 3)
    code = (
        "import sys; sys.modules['mxnet'] = None; from rwkv_clip.cli import main; "
        f"sys.exit(main(['pack', {str(table)!r}, {str(tmp_path / 'out')!r}, '--workers', '1']))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    assert len(open_dataset(tmp_path / "out")) == 3


def test_the_bytes_do_not_depend_on_the_number_of_workers_and_do_on_the_seed(tmp_path, fixtures):
    table = make_table(tmp_path / "in", 40)
    shutil.copy(fixtures / "img/trunc_60pct.jpg", tmp_path / "in/00007.jpg")
    shutil.copy(fixtures / "img/rgba.png", tmp_path / "in/00009.jpg")
    arguments = ["pack", str(table), "--shard-size", "9"]
    for workers in (1, 3):
        assert main([*arguments, str(tmp_path / f"out{workers}"), "--workers", str(workers)]) == 0
    first = contents(tmp_path / "out1")
    assert first == contents(tmp_path / "out3")
    assert len(first) == 2 * 5 + 3
    pack_here(table, tmp_path / "seed1", shard_size=9, seed=1)
    assert contents(tmp_path / "seed1")["data-00000.rec"] != first["data-00000.rec"]


def test_L12_rows_are_shuffled_over_the_whole_source_unless_asked_not_to(tmp_path):
    table = make_table(tmp_path / "in", 200)
    pack_here(table, tmp_path / "out", shard_size=50)
    pack_here(table, tmp_path / "sorted", shard_size=50, seed=None)
    rows = {
        name: [file.header(i)[2] for file in open_dataset(tmp_path / name).files for i in range(len(file))]
        for name in ("out", "sorted")
    }
    assert rows["sorted"] == list(range(200))
    assert sorted(rows["out"]) == list(range(200))
    # Every shard holds rows from everywhere: 12.5 of each quarter are expected.
    for shard in range(4):
        quarters = np.bincount(np.array(rows["out"][50 * shard : 50 * shard + 50]) // 50, minlength=4)
        assert quarters.min() >= 4


def test_the_shuffle_is_the_same_on_every_machine():
    assert shuffled(10, 0).tolist() == [2, 4, 6, 8, 5, 1, 7, 0, 9, 3]
    assert shuffled(10, 7).tolist() == [8, 7, 2, 5, 4, 1, 3, 6, 0, 9]
    assert sorted(shuffled(1000, 5).tolist()) == list(range(1000))
    assert shuffled(1000, 5).tolist() != shuffled(1000, 6).tolist()
    assert len(shuffled(0, 0)) == 0


def test_a_second_run_does_nothing_and_another_packing_is_refused(tmp_path, capsys):
    table = make_table(tmp_path / "in", 6)
    report = pack_here(table, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert pack_here(table, tmp_path / "out") == report
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match="shuffle_seed 0, not 1"):
        pack_here(table, tmp_path / "out", seed=1)
    table.write_text(table.read_text() + "00001.jpg\tnew\tnew\tnew\n")
    with pytest.raises(UserError, match="holds another packing"):
        pack_here(table, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_corrected_captions_of_a_folder_are_another_packing_and_the_message_says_what_is_not_looked_at(
    folder, capsys, tmp_path_factory
):
    (folder / "a.txt").write_text("a caption")
    out = tmp_path_factory.mktemp("packed") / "out"
    assert pack_here(folder, out)["skipped"] == {"no caption": 7}
    assert "b.jpg\tno caption\tthere is no b.txt" in (out / "skipped.tsv").read_text()
    pack_here(folder, out)
    assert "nothing to do (files of single pictures are not looked at" in capsys.readouterr().out
    (folder / "a.txt").write_text("the corrected caption")
    with pytest.raises(UserError, match="holds another packing"):
        pack_here(folder, out)
    assert pack_here(folder, out.with_name("kept"), missing="keep")["packed"] == 8


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    table = make_table(tmp_path / "in", 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("do not touch")
    with pytest.raises(UserError, match="exists and is no packed data set"):
        pack_here(table, tmp_path / "out")
    assert (tmp_path / "out/thesis.txt").exists()


def test_an_empty_folder_may_be_the_output(tmp_path):
    (tmp_path / "out").mkdir()
    assert pack_here(make_table(tmp_path / "in", 3), tmp_path / "out")["packed"] == 3


def test_a_link_to_an_empty_folder_may_be_the_output_and_a_mount_point_is_refused_at_the_start(
    tmp_path, capsys, monkeypatch
):
    table = make_table(tmp_path / "in", 3)
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    pack_here(table, tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and len(open_dataset(tmp_path / "disk")) == 3
    pack_here(table, tmp_path / "out")
    assert "is packed already" in capsys.readouterr().out
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path / "mount")
    with pytest.raises(UserError, match="mount is a mount point, .*: name a folder in it, such as .*mount/data"):
        pack_here(table, tmp_path / "mount")
    assert not (tmp_path / "mount.partial").exists()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop is a link that leads to itself"):
        pack_here(table, tmp_path / "loop")
    assert not (tmp_path / "loop.partial").exists()


def test_names_that_are_no_text_are_listed_and_printed(tmp_path, fixtures, monkeypatch):
    """A file name of other bytes than UTF-8, and half of a UTF-16 pair that JSON may hold."""
    table = make_table(tmp_path / "in", 1).with_suffix(".jsonl")
    table.write_text('{"image": "00000.jpg", "caption": "x"}\n{"image": "\\ud83d.jpg", "caption": "x"}\n')
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(fixtures / "img/rgb.jpg", folder / "a.jpg")
    (folder / "a.txt").write_text("fine")
    (folder / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"no picture")
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("a caption")
    for source, listed, printed in (
        (table, "\ufffd.jpg".encode(), b"\xef\xbf\xbd.jpg"),
        (folder, b"caf\xe9", b"caf\\udce9"),
    ):
        out = tmp_path / f"{source.name}-out"
        stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict")
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["pack", str(source), str(out), "--workers", "0"]) == 0
        stdout.flush()
        assert printed in stdout.buffer.getvalue()
        assert listed in (out / "skipped.tsv").read_bytes()


def test_when_no_row_can_be_packed_the_reasons_are_counted(tmp_path):
    table = make_table(tmp_path / "in", 3)
    for path in (tmp_path / "in").glob("*.jpg"):
        path.unlink()
    with pytest.raises(UserError, match="none of the 3 rows could be packed: 3 image missing"):
        pack_here(table, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_shard_whose_rows_are_all_bad_is_left_out(tmp_path):
    table = make_table(tmp_path / "in", 9)
    for i in (3, 4, 5):
        (tmp_path / f"in/{i:05}.jpg").write_bytes(b"broken")
    pack_here(table, tmp_path / "out", shard_size=3, seed=None)
    dataset = open_dataset(tmp_path / "out")
    assert [file.rec_path.name for file in dataset.files] == ["data-00000.rec", "data-00002.rec"]
    assert len(dataset) == 6


def test_caption_names_can_be_given_and_are_checked(tmp_path):
    table = make_table(tmp_path / "in", 3)
    pack_here(table, tmp_path / "out", caption_names=["web", "llm", "vlm"])
    assert open_dataset(tmp_path / "out").caption_names == ["web", "llm", "vlm"]
    with pytest.raises(UserError, match="gives 1 names and the source has 3"):
        pack_here(table, tmp_path / "other", caption_names=["web"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--shard-size", "0"], "--shard-size is 0"),
        (["--workers", "-1"], "--workers is -1"),
        (["--name", "a/b"], "--name is 'a/b'"),
        (["--max-side", "8"], "--max-side 8 is below --min-side 16"),
        (["--max-aspect", "0.5"], "at least 1"),
        (["--max-aspect", "nan"], "--max-aspect nan"),
        (["--caption-names", ",b,c"], "a caption is called ''"),
        (["--caption-names", "a,b=1,c"], "a caption is called 'b=1'"),
        (["--caption-names", "a,b,a"], "2 captions are called 'a': give each its own name by --caption-names"),
        (["--caption-columns", "raw,raw"], "2 captions are called 'raw'"),
        (["--max-side", "0", "--max-pixels", "65000000"], "keeps pictures that training refuses"),
        (["--images", "/no/such/folder"], "is no folder"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, option, message):
    table = make_table(tmp_path / "in", 1)
    assert main(["pack", str(table), str(tmp_path / "out"), *option]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack", "", "out"], "a path is ''"),
        (["pack", "in/pairs.tsv", " "], "a path is ' '"),
        (["pack", "in/pairs.tsv", "out", "--images", ""], "a path is ''"),
        (["pack", "in/pairs.tsv", "/"], "/ exists and is no packed data set"),
        (["pack", "in/pairs.tsv", "/dev/null/out"], "cannot write /dev/null/out.partial"),
        (["pack", "/dev/null", "out"], "/dev/null is no source that can be packed"),
        (["pack", ".", "out"], ". holds no picture"),
        (["inspect", ""], "a path is ''"),
        (["inspect", "in", "--repair", ""], "a path is ''"),
        (["prepare", "shapes", ""], "a path is ''"),
    ],
)
def test_silly_paths_are_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    make_table(tmp_path / "in", 1)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty" if "." in arguments else tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("**/out*"))


def test_the_root_folder_is_a_folder_like_any_other():
    assert open_source(Path("/")).kind == FolderSource.kind


def test_the_report_counts_what_was_done(tmp_path, fixtures):
    source = tmp_path / "in"
    source.mkdir()
    names = {"rgba.png": "alpha over white", "cmyk_adobe.jpg": "CMYK", "anim.webp": "animation", "rgb.jpg": None}
    for name in names:
        shutil.copy(fixtures / "img" / name, source)
        (source / name).with_suffix(".txt").write_text("a picture")
    report = pack_here(source, tmp_path / "out")
    assert report["notes"] == {f"picture encoded anew: {change}": 1 for change in names.values() if change}
    assert json.loads((tmp_path / "out/pack_report.json").read_text()) == report
    assert not (tmp_path / "out/skipped.tsv").exists()


def test_packed_records_can_be_packed_again_in_another_order_and_shard_size(tmp_path):
    pack_here(make_table(tmp_path / "in", 30), tmp_path / "first", shard_size=7)
    report = pack_here(tmp_path / "first", tmp_path / "second", shard_size=30, seed=5)
    assert report == {"rows": 30, "packed": 30, "skipped": {}, "notes": {}}
    first, second = open_dataset(tmp_path / "first"), open_dataset(tmp_path / "second")
    assert second.caption_names == first.caption_names and second.shard_sizes == [30]

    def pairs(dataset) -> set[bytes]:
        records = (dataset.read(i) for i in range(len(dataset)))
        return {record.label.tobytes() + bytes(record.payload) for record in records}

    assert pairs(first) == pairs(second)


@pytest.mark.parametrize("kind", ["folder", "csv", "jsonl", "parquet", "tar"])
def test_every_kind_of_source_gives_the_same_records(tmp_path, kind):
    """The same twelve pairs of one caption, packed through the command line by two processes."""
    make_table(tmp_path / "in", 12)
    pictures = [(tmp_path / f"in/{i:05}.jpg").read_bytes() for i in range(12)]
    source = tmp_path / f"source.{kind}"
    if kind == "folder":
        source.mkdir()
        for i, data in enumerate(pictures):
            (source / f"{i:05}.jpg").write_bytes(data)
            (source / f"{i:05}.txt").write_text(f"pair {i}")
    elif kind == "csv":
        source.write_text("image,caption\n" + "".join(f'in/{i:05}.jpg,"pair {i}"\n' for i in range(12)))
    elif kind == "jsonl":
        source.write_text(
            "".join(json.dumps({"file": f"in/{i:05}.jpg", "text": f"pair {i}"}) + "\n" for i in range(12))
        )
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"image": pictures, "caption": [f"pair {i}" for i in range(12)]}), source)
    else:
        with tarfile.open(source, "w") as tar:
            for i, data in enumerate(pictures):
                for name, content in ((f"{i:05}.jpg", data), (f"{i:05}.txt", f"pair {i}".encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    out = tmp_path / "out"
    assert main(["pack", str(source), str(out), "--workers", "2", "--shard-size", "6"]) == 0
    dataset = open_dataset(out)
    assert dataset.num_captions == 1
    for shard in dataset.files:
        for position in range(len(shard)):
            row = shard.header(position)[2]
            record = shard.read(position)
            assert bytes(record.payload) == pictures[row]
            assert (record.label == tokenize_numpy(f"pair {row}")[0]).all()


def test_D4_D6_packed_pictures_reach_the_training_loader_as_a_person_sees_them(tmp_path, fixtures):
    """Whatever the source file was: upright, colours right, transparent parts white; broken ones never get there."""
    pytest.importorskip("nvidia.dali")
    import torch

    from rwkv_clip.data.loader import Loader

    for path in (fixtures / "img").iterdir():
        shutil.copy(path, tmp_path)
        (tmp_path / path.name).with_suffix(".txt").write_text("a picture")
    source = open_source(tmp_path)
    report = pack(source, tmp_path / "out", num_workers=0, seed=None)
    assert report["skipped"].keys() >= {"cannot be decoded", "too large", "too small", "empty file", "not a picture"}
    dataset = open_dataset(tmp_path / "out")
    options = dict(rank=0, world_size=1, micro_batch_size=4, image_size=48, context_length=77, train=False)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    corners = {}
    with Loader(dataset, None, device=torch.device("cpu"), **options) as loader:
        batches = list(loader.epoch(0))
    for batch in batches:
        for image, i, valid in zip(batch.images, batch.ids, batch.valid, strict=True):
            pixels = (image * std + mean) * 255
            shard, position = dataset.locate(int(i))
            name = source.where(dataset.files[shard].header(position)[2])
            means = [pixels[:, r : r + 8, c : c + 8].mean((1, 2)) for r in (6, 34) for c in (6, 34)]
            if valid:
                corners[name] = [[round(float(value)) for value in corner] for corner in means]
    red, green, blue, yellow = (220, 30, 30), (30, 200, 40), (30, 50, 220), (230, 220, 40)
    upright = [red, green, blue, yellow]
    for name, expected in {
        "cmyk_adobe.jpg": upright,
        "progressive.jpg": upright,
        "multi.mpo.jpg": upright,
        "rgb.png": upright,
        "exif_rot6.jpg": [blue, red, yellow, green],
    }.items():
        assert np.abs(np.array(corners[name]) - np.array(expected)).max() <= 15, name
