from __future__ import annotations

import csv
import io
import json
import os
import pickle
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_rows import indexed, read_all, write

from rwkv_clip.data.sources import open_source
from rwkv_clip.data.sources.base import RowError
from rwkv_clip.data.sources.lines import quote_state
from rwkv_clip.errors import UserError

# ---------------------------------------------------------------- tab-separated


def test_D20_quotes_in_tsv_are_ordinary_characters(folder, fixtures):
    shutil.copy(fixtures / "captions/quotes.tsv", folder)
    source = indexed(folder / "quotes.tsv")
    rows = read_all(source)
    assert len(rows) == 8
    assert rows[1] == ['5" nails in a box', "nails", "a box of nails"]
    assert rows[2][0] == '"quoted start only'
    assert rows[4] == ["", "synthetic only", "generated only"]
    assert rows[5] == ["None", "null", "nan"]
    assert rows[6][0] == "café 猫 🐶"
    assert rows[7] == ["back\\slash \\t literal", "3.14", "007"]


def test_D22_rows_with_other_column_counts_are_left_out_by_line_number(folder, fixtures):
    shutil.copy(fixtures / "captions/bad_columns.tsv", folder)
    source = indexed(folder / "bad_columns.tsv")
    wrong = "wrong number of columns"
    assert read_all(source) == [["one", "two", "three"], wrong, wrong, wrong, ["one", "two", "three"]]
    assert [source.where(i) for i in range(5)] == [f"bad_columns.tsv line {n}" for n in (1, 2, 3, 4, 6)]
    with pytest.raises(RowError, match="3, not 4"):
        source.row(1)


def test_a_header_chooses_the_columns_by_their_usual_names(folder):
    table = write(folder / "t.tsv", "id\tgenerated\tImage\traw\tsynthetic\n7\tG\ta.jpg\tR\tS\n")
    source = indexed(table)
    assert source.caption_names == ["raw", "synthetic", "generated"]
    assert read_all(source) == [["R", "S", "G"]]
    assert source.where(0) == "t.tsv line 2"


def test_columns_can_be_named_with_and_without_a_header(folder):
    table = write(folder / "t.tsv", "where\tfoo\tbar\na.jpg\tF\tB\n")
    source = indexed(table, image_column="where", caption_columns=["bar", "foo"])
    assert source.caption_names == ["bar", "foo"] and read_all(source) == [["B", "F"]]
    table = write(folder / "t.tsv", "F\ta.jpg\tB\n")
    assert read_all(indexed(table, image_column="2", caption_columns=["3"])) == [["B"]]


def test_byte_order_mark_crlf_blank_lines_and_no_final_line_break_are_understood(folder):
    table = write(folder / "t.tsv", b"\xef\xbb\xbfimage\tcaption\r\n\r\na.jpg\tone\r\n\n\nb.jpg\ttwo")
    source = indexed(table)
    assert read_all(source) == [["one"], ["two"]]
    assert source.where(1) == "t.tsv line 6"


def test_bytes_that_are_no_utf8_become_the_replacement_character(folder):
    table = write(folder / "t.tsv", b"image\tcaption\na.jpg\tcaf\xe9\n")
    assert read_all(indexed(table)) == [["caf\ufffd"]]


def test_pictures_are_found_relative_to_the_table_or_to_a_given_folder(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("tables")
    absolute = write(
        elsewhere / "t.tsv", f"image\tcaption\na.jpg\tone\n{folder / 'b.jpg'}\ttwo\nhttp://x/a.jpg\tthree\n"
    )
    assert read_all(indexed(absolute)) == ["image missing", ["two"], "image is a URL"]
    assert read_all(indexed(absolute, images=folder)) == [["one"], ["two"], "image is a URL"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.tsv", "", "holds no rows"),
        ("t.tsv", "image\tcaption\n", "a header and no rows"),
        ("t.csv", "", "holds no rows"),
        ("t.csv", "\n\n", "holds no rows"),
        ("t.csv", "image,caption,caption\na.jpg,x,y\n", "has 2 columns 'caption': rename them"),
        ("t.tsv", "image\tcaption\timage\na.jpg\tx\ty\n", "has 2 columns 'image': rename them"),
        ("t.tsv", "image caption\na.jpg one\n", "one column .* separated by tabs"),
        ("t.csv", "image;caption\na.jpg;one\n", "one column .* separated by commas"),
        ("t.tsv", "image\tsize\na.jpg\t7\n", "no caption column .* --caption-columns"),
        ("t.tsv", "a.jpg" + "\tc" * 9 + "\n", "9 captions a row"),
        ("t.tsv", "image\tcaption\n".encode("utf-16"), "UTF-16"),
        ("t.jsonl", "[1]\n{oops\n", "no line that is a JSON object"),
        ("t.jsonl", '{"pic": "a.jpg", "caption": "x"}\n', "--image-column"),
        ("t.xlsx", "PK", "no source that can be packed"),
    ],
)
def test_what_cannot_be_packed_is_one_clear_message(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        indexed(write(tmp_path / name, content))


def test_a_misnamed_column_lists_those_that_are_there(folder):
    table = write(folder / "t.tsv", "image\tcaption\na.jpg\tone\n")
    with pytest.raises(UserError, match="no column 'captoin'; it has image, caption"):
        indexed(table, caption_columns=["captoin"])
    with pytest.raises(UserError, match="no column 'img'; it has image, caption"):
        indexed(table, image_column="img")
    with pytest.raises(UserError, match="no source at"):
        open_source(folder / "nothing.tsv")


# ---------------------------------------------------------------- comma-separated


def test_csv_fields_in_quotes_hold_commas_quotes_and_line_breaks(folder):
    table = write(folder / "t.csv", 'image,caption\na.jpg,"one, ""two""\nthree"\nb.jpg,5" nails\nc.jpg,plain\n')
    source = indexed(table)
    assert read_all(source) == [['one, "two"\nthree'], ['5" nails'], ["plain"]]
    assert [source.where(i) for i in range(3)] == ["t.csv line 2", "t.csv line 4", "t.csv line 5"]


@pytest.mark.parametrize("next_row", ["b.jpg,plain", 'b.jpg,"quoted"', 'b.jpg,"quoted, with comma"'])
def test_D20_a_quote_that_is_never_closed_costs_its_own_line_only(folder, next_row):
    table = write(folder / "t.csv", f'image,caption\na.jpg,"open\n{next_row}\nc.jpg,fine\n')
    rows = read_all(indexed(table))
    assert rows[0] == "quote without its end"
    assert rows[2] == ["fine"] and len(rows) == 3 and rows[1][0].startswith(("plain", "quoted"))


fields = st.text(alphabet='ab,"\n\u2028\x85 é', max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(fields, fields), min_size=1, max_size=8))
def test_what_pythons_csv_writer_writes_is_read_back(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("csv")
    with open(folder / "t.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", "caption", "caption2"])
        for row in rows:
            writer.writerow(["x.jpg", *row])
    write(folder / "x.jpg", "anything")
    assert read_all(indexed(folder / "t.csv")) == [list(row) for row in rows]


@given(st.lists(st.text(alphabet='ab,"', max_size=8), min_size=1, max_size=4))
def test_every_record_that_the_csv_writer_makes_counts_as_closed(row):
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(row)
    assert quote_state(out.getvalue().encode()) == "closed"


# ---------------------------------------------------------------- JSON lines


def test_D22_json_lines_follow_the_documented_rules(folder, fixtures):
    shutil.copy(fixtures / "captions/mixed.jsonl", folder)
    (folder / "sub dir").mkdir()
    shutil.copy(folder / "a.jpg", folder / "sub dir/猫.jpg")
    source = indexed(folder / "mixed.jsonl")
    assert source.caption_names == ["caption0", "caption1", "caption2"]
    rows = read_all(source)
    assert rows[0] == ["a dog", "a brown dog", "dog runs"]
    assert rows[1][0] == "lone \ud83d surrogate" and rows[1][1] == "pair 🐶 ok"
    assert rows[3] == ["only one", None, None]
    assert rows[4] == ["a", None, "c"]
    assert rows[5] == ["1", "2.5", "true"]
    assert rows[6] == ["a", "b", "c"]
    assert rows[7] == "not JSON" and source.where(7) == "mixed.jsonl line 8"


def test_captions_may_be_keys_an_object_or_token_ids(folder):
    table = write(folder / "t.jsonl", '{"image": "a.jpg", "raw": "R", "generated": "G", "synthetic": null}\n')
    source = indexed(table)
    assert source.caption_names == ["raw", "synthetic", "generated"] and read_all(source) == [["R", None, "G"]]
    table = write(folder / "t.jsonl", '{"image": "a.jpg", "captions": {"web": "W", "llm": [49406, 320, 49407]}}\n')
    source = indexed(table)
    assert source.caption_names == ["web", "llm"] and read_all(source) == [["W", [49406, 320, 49407]]]


def test_a_caption_key_may_hold_a_list_of_captions(folder):
    rows = [["one", "two"], [None, 3], "bare text", [], [49406, 320, 49407], ["1", "2", "3"], [["nested", 1]]]
    lines = "".join(json.dumps({"image": "a.jpg", "caption": row}) + "\n" for row in rows)
    source = indexed(write(folder / "t.jsonl", lines))
    assert source.caption_names == ["caption0", "caption1", "caption2"]
    assert read_all(source) == [
        ["one", "two", None],
        [None, "3", None],
        ["bare text", None, None],
        [[], None, None],
        [[49406, 320, 49407], None, None],
        ["1", "2", "3"],
        "caption is no text",
    ]


def test_lists_of_captions_beside_other_captions_and_of_eight_and_more(folder):
    table = write(folder / "t.jsonl", '{"image": "a.jpg", "raw": ["R"], "generated": ["G", "H"], "synthetic": "S"}\n')
    source = indexed(table)
    assert source.caption_names == ["raw", "synthetic", "generated0", "generated1"]
    assert read_all(source) == [["R", "S", "G", "H"]]
    table = write(folder / "t.jsonl", json.dumps({"image": "a.jpg", "sentences": list("abcdefghij")}) + "\n")
    source = indexed(table, caption_columns=["sentences"])
    assert source.caption_names == [f"sentences{i}" for i in range(8)] and read_all(source) == [list("abcdefgh")]
    table = write(folder / "t.jsonl", json.dumps({"image": "a.jpg", "text": list("abcdefgh"), "title": "t"}) + "\n")
    with pytest.raises(UserError, match="9 captions a row; a record holds 1 to 8"):
        indexed(table)


def test_odd_json_values_are_a_fault_of_their_row(folder):
    lines = [
        '{"image": "a.jpg", "captions": ["fine"]}',
        '{"image": "a.jpg", "captions": [["nested", 1]]}',
        '{"image": "a.jpg", "captions": "bare text"}',
        '{"image": 7, "captions": ["x"]}',
        '{"captions": ["x"]}',
        '{"image": "a.jpg"}',
        "[" * 100_000,
        '{"image": "a.jpg", "captions": [NaN]}',
    ]
    rows = read_all(indexed(write(folder / "t.jsonl", "\n".join(lines))))
    none = "no image path"
    assert rows == [["fine"], "caption is no text", ["bare text"], none, none, [None], "not JSON", [None]]


# ---------------------------------------------------------------- folders


def test_a_folder_takes_the_text_file_beside_each_picture(folder):
    (folder / "deep/er").mkdir(parents=True)
    shutil.copy(folder / "a.jpg", folder / "deep/er/猫.PNG")
    write(folder / "deep/er/猫.txt", "a cat")
    write(folder / "a.txt", "one\n\ntwo\n")
    write(folder / "b.txt", "only one")
    source = indexed(folder)
    assert read_all(source) == [["one", "two"], ["only one", None], *[[None, None]] * 6, ["a cat", None]]
    assert source.row(2).why_none == "there is no c.txt" and not source.row(1).why_none
    assert source.where(8) == "deep/er/猫.PNG"
    assert source.caption_names == ["caption0", "caption1"]


def test_parallel_folders_are_one_caption_each(tmp_path, fixtures):
    for name in ("img/x", "captions/x", "raw/x"):
        (tmp_path / name).mkdir(parents=True)
    for number in (1, 2, 3):
        shutil.copy(fixtures / "img/rgb.jpg", tmp_path / f"img/x/{number:09}.jpg")
    write(tmp_path / "captions/x/000000001.txt", "a caption\nin two lines")
    write(tmp_path / "captions/x/000000002.txt", "another")
    write(tmp_path / "raw/x/000000001.txt", "RAW")
    source = indexed(tmp_path)
    assert source.caption_names == ["captions", "raw"]
    assert read_all(source) == [["a caption in two lines", "RAW"], ["another", None], [None, None]]


def test_a_folder_of_texts_that_are_no_captions_is_not_taken_for_them(folder):
    """A licence beside the folder of pictures, each of which has its text beside it."""
    (folder / "photos").mkdir()
    (folder / "docs").mkdir()
    shutil.move(folder / "a.jpg", folder / "photos/a.jpg")
    write(folder / "photos/a.txt", "a caption")
    write(folder / "docs/LICENSE.txt", "a licence")
    source = indexed(folder)
    assert source.caption_names == ["caption0"] and read_all(source)[-1] == ["a caption"]


def test_parallel_folders_beside_pictures_at_the_top(folder):
    for name in ("img", "captions"):
        (folder / name).mkdir()
    shutil.move(folder / "a.jpg", folder / "img/a.jpg")
    write(folder / "captions/a.txt", "A")
    write(folder / "captions/b.TXT", "B")
    source = indexed(folder)
    assert read_all(source) == [["B"], *[[None]] * 6, ["A"]] and source.caption_names == ["captions"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_text_files_are_found_by_either_suffix_and_read_by_their_byte_order_mark(folder, encoding):
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    write(folder / "a.TXT", mark + "é, 猫\r\n\r\ntwo".encode(encoding))
    assert read_all(indexed(folder))[:2] == [["é, 猫", "two"], [None, None]]


def test_what_is_no_regular_file_costs_its_own_row(folder):
    (folder / "a.txt").mkdir()
    os.mkfifo(folder / "b.txt")
    (folder / "c.jpg").unlink()
    os.mkfifo(folder / "c.jpg")
    (folder / "d.jpg").unlink()
    (folder / "d.jpg").symlink_to("d.jpg")
    (folder / "e.jpg").unlink()
    (folder / "e.jpg").symlink_to("nothing")
    with open(folder / "f.jpg", "wb") as file:
        file.truncate(300 << 20)
    text = "caption file cannot be read"
    image = "image cannot be read"
    rows = [text, text, image, image, "image missing", "file too large", [None], [None]]
    assert read_all(indexed(folder)) == rows
    table = write(folder / "t.tsv", "image\tcaption\nc.jpg\tx\n/dev/zero\tx\ng.jpg\tx\n")
    assert read_all(indexed(table)) == [image, image, ["x"]]


def test_a_link_to_a_folder_that_holds_it_is_named_and_other_links_are_followed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(folder / "a.jpg", elsewhere)
    (folder / "more").symlink_to(elsewhere)
    assert len(indexed(folder)) == 9
    (folder / "more/up").symlink_to(elsewhere.parent)
    with pytest.raises(UserError, match="more/up is a link to .*, a folder that holds it: remove the link"):
        indexed(folder)


def test_a_path_that_the_system_refuses_is_one_line(folder):
    with pytest.raises(UserError, match="File name too long"):
        open_source(folder / ("x" * 5000))


@pytest.mark.parametrize(
    ("file", "give"), [("data/0.parquet", "data"), ("x/y/0.tar", "x/y"), ("sub/t.csv", "sub/t.csv")]
)
def test_a_folder_without_pictures_names_the_source_in_it(tmp_path, file, give):
    (tmp_path / file).parent.mkdir(parents=True)
    write(tmp_path / file, "x")
    with pytest.raises(UserError, match=f"holds no picture .*; it holds {file}: give {tmp_path / give}$"):
        indexed(tmp_path)


def test_the_order_of_a_folder_is_that_of_its_names_and_hidden_files_are_left_out(tmp_path):
    for name in ("b/2.jpg", "b/1.jpg", "a.jpg", "c.jpg", ".hidden/x.jpg", ".z.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "x")
    source = indexed(tmp_path)
    assert [source.where(i) for i in range(len(source))] == ["a.jpg", "c.jpg", "b/1.jpg", "b/2.jpg"]


def test_a_folder_without_pictures_and_table_options_for_a_folder_are_refused(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no picture"):
        indexed(tmp_path / "empty")
    with pytest.raises(UserError, match="--image-column is for tables"):
        open_source(folder, image_column="x")


def test_a_prepared_data_set_is_packed_by_its_table(tmp_path):
    for name in ("stats.json", "train.tsv"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match="is a prepared data set: pack .*train.tsv"):
        open_source(tmp_path)


# ---------------------------------------------------------------- all kinds


def test_the_fingerprint_changes_with_rows_and_columns(folder):
    table = write(folder / "t.tsv", "image\tcaption\ttext\na.jpg\tone\ttwo\n")
    first = indexed(table).fingerprint
    assert indexed(table).fingerprint == first
    assert indexed(table, caption_columns=["text"]).fingerprint != first
    write(table, "image\tcaption\ttext\na.jpg\tone\ttwo!\n")
    assert indexed(table).fingerprint != first


@pytest.mark.parametrize("change", ["rewritten", "longer", "added", "removed"])
def test_the_fingerprint_of_a_folder_changes_with_its_captions(folder, change):
    for name in "abc":
        write(folder / f"{name}.txt", f"caption {name}")
    first = indexed(folder).fingerprint
    assert indexed(folder).fingerprint == first
    if change == "rewritten":
        write(folder / "b.txt", "caption B")
        os.utime(folder / "b.txt", (1, 1))
    elif change == "removed":
        (folder / "b.txt").unlink()
    else:
        write(folder / ("b.txt" if change == "longer" else "d.txt"), "a longer caption")
    assert indexed(folder).fingerprint != first


def test_an_indexed_source_can_be_read_by_another_process(folder):
    table = write(
        folder / "t.jsonl", "".join(json.dumps({"image": "a.jpg", "caption": str(i)}) + "\n" for i in range(9))
    )
    source = indexed(table)
    source.row(0)
    again = pickle.loads(pickle.dumps(source))
    assert again.row(8).captions == ["8"] and len(again) == 9
    assert len(pickle.dumps(source)) < 2000
