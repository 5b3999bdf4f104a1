"""Sources whose pictures and captions are held in other files: tars, parquet, arrays of tokens, packed records."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from source_rows import indexed, read_all, write

from rwkv_clip.data.captions import encode_captions
from rwkv_clip.data.sources import TokenColumns, open_source
from rwkv_clip.data.sources.base import RowError
from rwkv_clip.data.tokenizer import tokenize_numpy
from rwkv_clip.errors import UserError

# ---------------------------------------------------------------- tars


def make_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_tar_members_with_one_key_are_a_row(tmp_path):
    long = "deep/" * 40 + "x" * 60
    make_tar(
        tmp_path / "a-0.tar",
        {"s/001.jpg": b"one", "s/001.txt": b"a dog", "s/001.json": b"{}", "s/002.txt": b"lost", "s/003.cls": b"7"},
    )
    make_tar(tmp_path / "a-1.tar", {"v1.0/x.png": b"two", "v1.0/x.txt": "猫".encode(), f"{long}.JPG": b"three"})
    source = indexed(tmp_path)
    assert source.caption_names == ["txt"] and len(source) == 4
    assert read_all(source) == [["a dog"], "no picture", ["猫"], [None]]
    assert [source.row(i).image for i in (0, 2, 3)] == [b"one", b"two", b"three"]
    assert [source.where(i) for i in (0, 1, 2)] == ["a-0.tar s/001", "a-0.tar s/002", "a-1.tar v1.0/x"]
    assert source.where(3) == f"a-1.tar {long}" and source.key(3) == "x" * 60


def test_tar_captions_may_be_several_texts_or_keys_of_the_json(tmp_path):
    tar = make_tar(
        tmp_path / "a.tar", {"1.jpg": b"x", "1.raw.txt": b"R", "1.llm.txt": b"L", "1.json": b'{"caption": "C"}'}
    )
    assert indexed(tar).caption_names == ["raw", "llm"] and read_all(indexed(tar)) == [["R", "L"]]
    source = indexed(tar, caption_columns=["caption", "raw"])
    assert read_all(source) == [["C", "R"]]
    tar = make_tar(
        tmp_path / "b.tar", {"1.jpg": b"x", "1.json": b'{"caption": "C", "n": 1}', "2.png": b"x", "2.json": b"{"}
    )
    assert read_all(indexed(tar)) == [["C"], "not JSON"]


def test_keys_of_a_tar_s_json_and_parquet_columns_may_hold_lists_of_captions(tmp_path):
    rows = {"1": ["one", "two"], "2": "bare", "3": [49406, 320, 49407]}
    members = {f"{key}.jpg": b"x" for key in rows}
    members |= {f"{key}.json": json.dumps({"caption": value}).encode() for key, value in rows.items()}
    source = indexed(make_tar(tmp_path / "a.tar", dict(sorted(members.items()))))
    assert source.caption_names == ["caption0", "caption1"]
    assert read_all(source) == [["one", "two"], ["bare", None], [[49406, 320, 49407], None]]
    pytest.importorskip("pyarrow.parquet")
    columns = {"caption": [["one", "two"], ["only"]], "raw_ids": [[49406, 49407], [49406, 320, 49407]]}
    table = write_parquet(tmp_path / "t.parquet", image=[b"x", b"y"], **columns)
    source = indexed(table, caption_columns=["caption", "raw_ids"])
    assert source.caption_names == ["caption0", "caption1", "raw_ids"]
    assert read_all(source) == [["one", "two", [49406, 49407]], ["only", None, [49406, 320, 49407]]]


def test_many_tars_are_indexed_side_by_side_and_a_cut_one_gives_its_whole_rows(tmp_path, capfd):
    for i in range(5):
        make_tar(tmp_path / f"{i}.tar", {f"{i}.jpg": b"x" * 5000, f"{i}.txt": str(i).encode()})
    assert read_all(indexed(tmp_path)) == [[str(i)] for i in range(5)]
    make_tar(tmp_path / "3.tar", {f"{i}.{kind}": b"x" * 600 for i in range(4) for kind in ("jpg", "txt")})
    whole = (tmp_path / "3.tar").read_bytes()
    (tmp_path / "3.tar").write_bytes(whole[: len(whole) // 3])
    rows = read_all(indexed(tmp_path))
    whole_row = ["x" * 600]
    assert rows == [["0"], ["1"], ["2"], whole_row, whole_row, "file became shorter", ["4"]]
    assert "3.tar is cut" in capfd.readouterr().err
    (tmp_path / "3.tar").write_bytes(b"\x1f\x8b compressed" * 100)
    with pytest.raises(UserError, match="3.tar cannot be read as an uncompressed tar"):
        indexed(tmp_path)


@pytest.mark.parametrize("damage", ["header", "boundary"])
def test_a_tar_that_is_damaged_or_cut_between_members_is_told(tmp_path, capfd, damage):
    rows = {f"{i}.{kind}": b"x" * 600 for i in range(4) for kind in ("jpg", "txt")}
    path = make_tar(tmp_path / "a.tar", rows)
    assert len(indexed(path)) == 4 and "warning" not in capfd.readouterr().err
    place = 4 * 1536  # each member takes a block of header and two of content
    data = path.read_bytes()
    path.write_bytes(data[:place] + b"U" * 512 + data[place + 512 :] if damage == "header" else data[:place])
    assert len(indexed(path)) == 2
    assert f"a.tar is cut or damaged (no member and no end of the archive at byte {place:,}): 2 rows" in (
        capfd.readouterr().err
    )


def test_a_tar_that_is_cut_inside_the_json_of_its_first_rows_gives_the_whole_ones(tmp_path, capfd):
    path = make_tar(
        tmp_path / "a.tar", {"1.jpg": b"x", "1.json": b'{"caption": "one"}', "2.jpg": b"x", "2.json": b" " * 600}
    )
    path.write_bytes(path.read_bytes()[: 3 * 1024 + 512 + 100])
    assert read_all(indexed(path)) == [["one"], "file became shorter"]
    assert "a.tar is cut" in capfd.readouterr().err


# ---------------------------------------------------------------- parquet


def write_parquet(file: Path, **columns) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    return file


def test_parquet_pictures_may_be_bytes_structs_or_paths(folder):
    pytest.importorskip("pyarrow.parquet")
    data = (folder / "a.jpg").read_bytes()
    table = write_parquet(folder / "t.parquet", image=[data, None, b"x"], caption=["one", "two", None])
    source = indexed(table)
    assert read_all(source) == [["one"], "no image", [None]] and source.row(0).image == data
    assert source.where(2) == "t.parquet row 2"
    table = write_parquet(
        folder / "t.parquet", image=[{"bytes": data, "path": "z"}, {"bytes": None, "path": "b.jpg"}], text=["x", "y"]
    )
    assert [indexed(table).row(i).image for i in range(2)] == [data, data]
    table = write_parquet(folder / "t.parquet", path=["a.jpg", "missing.jpg"], title=["x", "y"])
    assert read_all(indexed(table)) == [["x"], "image missing"]


def test_a_folder_of_parquet_files_is_one_source_and_copies_are_made_once(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow.parquet")
    for i in range(3):
        write_parquet(tmp_path / f"{i}.parquet", image=[bytes([i])] * (i + 1), raw=[f"{i}{n}" for n in range(i + 1)])
    source = open_source(tmp_path)
    index = tmp_path / "index"
    index.mkdir()
    source.build_index(index)
    source.copy_rows(index)
    assert read_all(source) == [["00"], ["10"], ["11"], ["20"], ["21"], ["22"]]
    before = {path: path.stat().st_mtime_ns for path in index.glob("*.rows")}
    again = open_source(tmp_path)
    again.build_index(index)
    again.copy_rows(index)
    assert before == {path: path.stat().st_mtime_ns for path in index.glob("*.rows")} and len(before) == 3
    assert again.fingerprint == source.fingerprint
    (tmp_path / "4.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match="4.parquet cannot be read as parquet"):
        indexed(tmp_path)


def strings(values: list[bytes]):
    """A parquet column of strings, whatever their bytes are."""
    pyarrow = pytest.importorskip("pyarrow")
    binary = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(values), binary.buffers())


@pytest.mark.parametrize("kind", ["binary", "strings", "list", "struct"])
def test_parquet_captions_are_utf8_and_a_broken_one_costs_its_own_row_at_most(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    texts = [b" a dog ", "café".encode(), b"\xff bad", None]
    columns = {"image": [b"x", b"y", b"z", b"w"], "caption": pyarrow.array(texts, pyarrow.binary())}
    expected = [" a dog ", "café", "\ufffd bad", None]
    if kind != "binary":
        expected, columns = expected[:3], {"image": [b"x", b"y", b"z"], "caption": strings(texts[:3])}
    if kind == "list":
        columns["caption"] = pyarrow.ListArray.from_arrays([0, 1, 2, 3], columns["caption"])
    if kind == "struct":  # of the picture: its path is no text, its bytes are used all the same
        names = strings([b"\xff.jpg", b"b.jpg", b"c.jpg"])
        columns["image"] = pyarrow.StructArray.from_arrays(
            [pyarrow.array(columns["image"], pyarrow.binary()), names], ["bytes", "path"]
        )
    source = indexed(write_parquet(tmp_path / "t.parquet", **columns))
    assert read_all(source) == [[caption] for caption in expected]
    assert source.row(0).image == b"x"


def test_parquet_files_of_other_columns_and_damaged_ones_are_one_line_that_names_them(tmp_path):
    write_parquet(tmp_path / "0.parquet", image=[b"x"], caption=["a"])
    other = write_parquet(tmp_path / "1.parquet", image=[b"x"], text=["a"])
    with pytest.raises(UserError, match="1.parquet has no columns 'caption' and one is needed; it has image, text"):
        indexed(tmp_path)
    pyarrow = pytest.importorskip("pyarrow")
    twice = pyarrow.Table.from_arrays([pyarrow.array([b"x"]), *[pyarrow.array(["a"])] * 2], ["image", *["caption"] * 2])
    pyarrow.parquet.write_table(twice, other)
    with pytest.raises(UserError, match="1.parquet has 2 columns 'caption' and one is needed"):
        indexed(tmp_path)
    with pytest.raises(UserError, match="1.parquet cannot be read as parquet: .*caption.* exists 2 times"):
        indexed(other)
    data = write_parquet(other, image=[os.urandom(3000)], caption=["a"]).read_bytes()
    other.write_bytes(data[:10] + bytes(20) + data[30:])
    with pytest.raises(UserError, match="1.parquet cannot be read as parquet or copied to"):
        indexed(tmp_path)


# ---------------------------------------------------------------- token ids


PUBLISHED = ["raw", "synthetic", "generated"]


def test_the_published_layout_is_parquet_with_tokens_joined_with_an_array(tmp_path):
    """Pictures and generated ids in parquet; raw ids in columns 0-76 of an array, synthetic ids in 77-153."""
    pytest.importorskip("pyarrow.parquet")
    texts = [[f"{name} {i}" for i in range(4)] for name in PUBLISHED]
    raw, synthetic, generated = (tokenize_numpy(column).astype(np.int32) for column in texts)
    write_parquet(
        tmp_path / "t.parquet", image=[bytes([i]) for i in range(4)], generated=generated.tolist(), key=[3, 2, 1, 9]
    )
    np.save(tmp_path / "tokens.npy", np.concatenate([raw, synthetic], 1))
    tokens = [TokenColumns.parse(f"{name}={tmp_path}/tokens.npy:{place}") for name, place in
              (("raw", "0-76"), ("synthetic", "77-153"))]  # fmt: skip
    source = indexed(tmp_path / "t.parquet", tokens=tokens)
    assert source.caption_names == PUBLISHED
    for i in range(4):
        label, filled = encode_captions(source.row(i).captions, "skip")
        assert filled == 0
        assert (label.reshape(3, 77) == [raw[i], synthetic[i], generated[i]]).all()
    joined = indexed(tmp_path / "t.parquet", tokens=tokens, key_column="key", join_by_key=True)
    label, _ = encode_captions(joined.row(0).captions, "skip")
    assert (label.reshape(3, 77) == [raw[3], synthetic[3], generated[0]]).all()
    with pytest.raises(RowError, match="'9'; tokens.npy has 4 rows"):
        joined.row(3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("raw", "give NAME=FILE.npy:FIRST-LAST"),
        ("raw=none.npy", "none.npy cannot be read"),
        ("raw={}/empty.npy", "empty.npy cannot be read as .npy .*: give one array as `numpy.save` writes it"),
        ("raw={}/t.npz", "t.npz cannot be read as .npy"),
        ("raw={}/objects.npy", "objects.npy cannot be read as .npy"),
        ("raw={}/t.npy:0-99", "has columns 0-76"),
        ("raw={}/short.npy", "has 1 rows and the source 3"),
        ("raw={}/words.npy", "numbers \\[rows, ids\\] are needed"),
        ("caption={}/t.npy", "two captions have the same name"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(folder, spec, message):
    np.save(folder / "t.npy", np.zeros((3, 77), np.int32))
    np.savez(folder / "t.npz", np.zeros((3, 77), np.int32))
    np.save(folder / "objects.npy", np.array([[{}]]), allow_pickle=True)
    (folder / "empty.npy").touch()
    np.save(folder / "short.npy", np.zeros((1, 77), np.int32))
    np.save(folder / "words.npy", np.array([["a"]]))
    table = write(folder / "t.tsv", "image\tcaption\na.jpg\tone\nb.jpg\ttwo\nc.jpg\tthree\n")
    with pytest.raises(UserError, match=message):
        indexed(table, tokens=[TokenColumns.parse(spec.format(folder))])


def test_tables_and_folders_are_joined_by_key_column_or_stem(folder):
    ids = tokenize_numpy(["zero", "one", "two"]).astype(np.int64)
    np.save(folder / "t.npy", ids)
    tokens = [TokenColumns.parse(f"tok={folder}/t.npy")]
    for name, text in (
        ("t.tsv", "image\tcaption\tid\na.jpg\tx\t2\nb.jpg\ty\toops\n"),
        ("t.jsonl", '{"image": "a.jpg", "caption": "x", "id": 2}\n{"image": "b.jpg", "caption": "y", "id": -1}\n'),
    ):
        source = indexed(write(folder / name, text), tokens=tokens, key_column="id", join_by_key=True)
        assert source.caption_names == ["caption", "tok"]
        assert (source.row(0).captions[1] == ids[2]).all()
        with pytest.raises(RowError, match="no tokens for this key"):
            source.row(1)
    (folder / "pictures").mkdir()
    shutil.copy(folder / "a.jpg", folder / "pictures/000000001.jpg")
    write(folder / "pictures/000000001.txt", "x")
    source = indexed(folder / "pictures", tokens=tokens, join_by_key=True)
    assert (source.row(0).captions[1] == ids[1]).all()


# ---------------------------------------------------------------- packed records


def test_packed_records_of_any_form_are_a_source(fixtures, tmp_path):
    for name in ("base.rec", "base.idx"):
        shutil.copy(fixtures / "rec" / name, tmp_path)
    for path in (tmp_path, tmp_path / "base.rec", tmp_path / "base"):
        source = open_source(path)
        source.build_index(tmp_path)
        assert len(source) == 10 and source.caption_names == PUBLISHED
        assert [captions[0][1] for captions in read_all(source)] == [300 + i for i in range(10)]
        assert "base.rec key" in source.where(3)


def test_a_broken_record_and_one_of_another_width_are_faults_of_their_row(fixtures, tmp_path):
    for name in ("mixed_labels.rec", "mixed_labels.idx"):
        shutil.copy(fixtures / "rec" / name, tmp_path)
    source = open_source(tmp_path / "mixed_labels.rec")
    source.build_index(tmp_path)
    assert "label of another width" in read_all(source)
    shutil.copy(fixtures / "rec/base.rec", tmp_path)
    shutil.copy(fixtures / "rec/off_by_4.idx", tmp_path / "base.idx")
    source = open_source(tmp_path / "base.rec")
    source.build_index(tmp_path)
    assert "record is broken" in read_all(source)
