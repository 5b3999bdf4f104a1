"""Reading evaluation sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from evaluation_folder import write_table

from rwkv_clip.errors import UserError
from rwkv_clip.evaluation.datasets import DEFAULT_TEMPLATES, choose, find_sets, read_retrieval, read_zero_shot


def rewrite_description(folder, **changes):
    path = folder / "zs_walls.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def test_both_kinds_of_sets_are_found_and_read(folder):
    zero_shot, retrieval = (each.read() for each in find_sets(folder))
    assert (zero_shot.name, retrieval.name) == ("walls", "walls")
    assert zero_shot.labels == [0, 1, 2, 3]
    assert zero_shot.images[1] == folder / "images" / "green.png"
    assert retrieval.captions[:2] == ["a red wall", "wall, red"]
    assert retrieval.image_of_caption == [0, 0, 1, 1, 2, 2, 3, 3]
    assert retrieval.columns == ["caption", "caption2"]


def test_captions_may_be_missing_or_on_several_lines_and_quotes_are_letters(tmp_path):
    rows = ['a.png\t5" nails\t', "b.png\tfirst\tsecond", "a.png\t\t'again", "c.png\t\t"]
    write_table(tmp_path / "retrieval_x.tsv", "image\tcaption\tcaption2", rows)
    dataset = read_retrieval(tmp_path / "retrieval_x.tsv")
    assert [path.name for path in dataset.images] == ["a.png", "b.png"]
    assert dataset.captions == ['5" nails', "'again", "first", "second"]
    assert dataset.image_of_caption == [0, 0, 1, 1]


def test_E8_names_lose_their_underscores_and_absent_templates_are_the_default(folder):
    rows = [f"images/{name}.png\t{label}" for label, name in enumerate(["red", "green"])]
    write_table(folder / "zs_walls.tsv", "image\tlabel", rows)
    for absent in (None, []):
        path = rewrite_description(folder, classes=["a_red__wall", " green  wall"], templates=absent)
        dataset = read_zero_shot(path)
        assert dataset.classes == ["a red wall", "green wall"]
        assert dataset.templates == list(DEFAULT_TEMPLATES)


@pytest.mark.parametrize("entry", ["['angry']", ["angry"], "('a', 'b')", {"name": "angry"}, 7, "", None])
def test_E8_a_class_that_is_no_name_is_an_error(folder, entry):
    path = rewrite_description(folder, classes=["a red wall", "a green wall", "a blue wall", entry])
    with pytest.raises(UserError, match="zs_walls.json.*class"):
        read_zero_shot(path)


@pytest.mark.parametrize("template", ["a photo", "{} and {}", 3])
def test_E8_a_template_without_one_place_for_the_name_is_an_error(folder, template):
    with pytest.raises(UserError, match="template"):
        read_zero_shot(rewrite_description(folder, templates=["{}", template]))


CHOICE = "from rwkv_clip.evaluation.datasets import choose; print(choose([f'picture {i}' for i in range(50)], 10))"


def test_E7_a_part_of_a_set_is_the_same_in_every_process():
    chosen = [
        subprocess.run(
            [sys.executable, "-c", CHOICE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert chosen[0] == chosen[1] == str(choose([f"picture {i}" for i in range(50)], 10))
    assert len(json.loads(chosen[0])) == 10


def test_a_limit_keeps_pictures_with_their_labels_and_captions(folder):
    zero_shot, retrieval = (each.read() for each in find_sets(folder, limit=2))
    names = ["red", "green", "blue", "yellow"]
    assert [path.stem for path in zero_shot.images] == [names[label] for label in zero_shot.labels]
    assert len(zero_shot.images) == 2 and len(zero_shot.classes) == 4
    assert retrieval.images == zero_shot.images
    assert retrieval.captions[::2] == [f"a {path.stem} wall" for path in retrieval.images]


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("image\tlabel", "images/red.png\t4", "line 2: label '4' is none of 0 to 3"),
        ("image\tlabel", "images/red.png\tred", "line 2: label 'red'"),
        ("image\tlabel", "images/red.png", "line 2: 1 values for 2 columns"),
        ("image\tlabel", "\t0", "line 2: no image"),
        ("image\tclass", "images/red.png\t0", "no column 'label'.*image, class"),
        ("image\tlabel\tclass_name", "images/red.png\t0\ta green wall", "'a green wall'.*'a red wall'"),
        ("image\tlabel", "", "no rows"),
    ],
)
def test_a_faulty_table_is_named_with_its_line(folder, header, row, message):
    write_table(folder / "zs_walls.tsv", header, [row])
    with pytest.raises(UserError, match=f"zs_walls.tsv.*{message}"):
        read_zero_shot(folder / "zs_walls.json")


def test_pictures_may_have_absolute_paths_inside_and_outside_of_the_folder(folder, tmp_path_factory):
    by_relative_paths = [each.read().images for each in find_sets(folder, limit=2)]
    outside = tmp_path_factory.mktemp("elsewhere") / "red.png"
    for name in ("zs_walls.tsv", "retrieval_walls.tsv"):
        header, *rows = (folder / name).read_text().splitlines()
        write_table(folder / name, header, [f"{folder}/{row}" for row in rows])
    assert [each.read().images for each in find_sets(folder, limit=2)] == by_relative_paths
    write_table(folder / "zs_walls.tsv", "image\tlabel", [f"{outside}\t0"])
    assert read_zero_shot(folder / "zs_walls.json").images == [outside]


def test_missing_folders_sets_and_names_are_errors(folder, tmp_path_factory):
    with pytest.raises(UserError, match="no folder"):
        find_sets(folder / "absent")
    with pytest.raises(UserError, match="nothing to evaluate"):
        find_sets(tmp_path_factory.mktemp("empty"))
    with pytest.raises(UserError, match="no set named doors: it has walls"):
        find_sets(folder, names=["walls", "doors"])
