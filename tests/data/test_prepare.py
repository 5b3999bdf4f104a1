from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rwkv_clip.cli import main
from rwkv_clip.data import prepared, shapes
from rwkv_clip.data.pictograms import packages
from rwkv_clip.data.pictograms.artists import Drawing, icon_set
from rwkv_clip.data.pictograms.captions import captions, phrase, with_article
from rwkv_clip.data.pictograms.concepts import Concept, read_concepts
from rwkv_clip.data.pictograms.kinds import KINDS
from rwkv_clip.data.pictograms.lookalikes import lookalike
from rwkv_clip.data.pictograms.render import Rendered, main_colours, render
from rwkv_clip.errors import UserError


def table(path: Path) -> list[dict[str, str]]:
    header, *rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


# ---------------------------------------------------------------- the folder


def test_a_folder_appears_when_it_is_complete_and_not_before(tmp_path):
    out = tmp_path / "out"

    def fail(folder: Path) -> dict:
        (folder / "half.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared.build(out, {"name": "x"}, fail)
    assert not out.exists()
    seen = []

    def make(folder: Path) -> dict:
        seen.extend(path.name for path in folder.iterdir())
        (folder / "whole.txt").write_text("whole")
        return {"train": 1}

    assert prepared.build(out, {"name": "x"}, make) == {"recipe": {"name": "x"}, "train": 1}
    assert seen == []  # the interrupted run's rest is gone
    assert sorted(path.name for path in out.iterdir()) == ["stats.json", "whole.txt"]
    assert prepared.build(out, {"name": "x"}, fail) is None
    with pytest.raises(UserError, match="another data set"):
        prepared.build(out, {"name": "y"}, make)


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="no prepared data set"):
        prepared.build(tmp_path, {"name": "x"}, lambda folder: {})
    assert (tmp_path / "notes.txt").exists()


def test_tables_hold_one_row_a_line_whatever_the_values_hold(tmp_path):
    prepared.write_table(tmp_path / "t.tsv", ("a", "b"), [("x\ty", "1\n2"), ("", 'say "hi" \\n')])
    assert table(tmp_path / "t.tsv") == [{"a": "x y", "b": "1 2"}, {"a": "", "b": 'say "hi" \\n'}]


def test_retrieval_keeps_one_picture_a_caption_and_zero_shot_leaves_out_small_classes(tmp_path):
    rows = [("1.jpg", "A dog", "d", "d"), ("2.jpg", "a DOG", "d", "d"), ("3.jpg", "a cat", "c", "c")]
    assert prepared.write_retrieval(tmp_path, "x", rows) == 2
    sizes = prepared.write_zero_shot(
        tmp_path,
        "x",
        [("1.jpg", "dog"), ("2.jpg", "dog"), ("3.jpg", "cat"), ("4.jpg", "cat"), ("5.jpg", "cow")],
        ["{}"],
        2,
    )
    assert sizes == {"num_images": 4, "num_classes": 2, "chance": 0.5, "largest_class": 0.5}
    assert json.loads((tmp_path / "zs_x.json").read_text())["classes"] == ["cat", "dog"]
    assert [row["label"] for row in table(tmp_path / "zs_x.tsv")] == ["1", "1", "0", "0"]


# ---------------------------------------------------------------- shapes


@pytest.fixture(scope="module")
def small_shapes(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shapes") / "out"
    patch = pytest.MonkeyPatch()
    patch.setattr(shapes, "NUM_TRAIN", 400)
    assert main(["prepare", "shapes", str(out), "--size", "32"]) == 0
    patch.undo()
    return out


def test_shapes_hold_out_pairs_whose_colours_and_shapes_train_in_other_pairs(small_shapes):
    train, test = table(small_shapes / "train.tsv"), table(small_shapes / "val.tsv")
    seen = {(row["colour"], row["shape"]) for row in train}
    held_out = {(row["colour"], row["shape"]) for row in test}
    assert not seen & held_out and held_out == shapes.held_out_pairs()
    assert len(train) == 400 and len(held_out) == 30
    assert {colour for colour, _ in held_out} <= {colour for colour, _ in seen}
    assert {shape for _, shape in held_out} <= {shape for _, shape in seen}
    for row in train[:20] + test[:20]:
        assert row["shape"] in row["raw"] and row["shape"] in row["synthetic"] and row["shape"] in row["generated"]
        assert Image.open(small_shapes / row["image"]).size == (32, 32)


def test_shapes_have_the_layout_of_a_prepared_data_set(small_shapes):
    stats = json.loads((small_shapes / "stats.json").read_text())
    retrieval = table(small_shapes / "retrieval_unseen_pair.tsv")
    assert len({row["caption"] for row in retrieval}) == len(retrieval) == stats["retrieval"]["unseen_pair"]
    for name, count in (("unseen_pair", 30), ("unseen_pair_shape", 12), ("unseen_pair_colour", 10)):
        info = json.loads((small_shapes / f"zs_{name}.json").read_text())
        rows = table(small_shapes / f"zs_{name}.tsv")
        assert len(info["classes"]) == count and all("{}" in template for template in info["templates"])
        assert all(info["classes"][int(row["label"])] == row["class_name"] for row in rows)
    assert (small_shapes / "ATTRIBUTION.md").exists()


def test_a_second_run_says_so_and_does_nothing(small_shapes, capsys):
    before = (small_shapes / "stats.json").stat().st_mtime_ns
    assert main(["prepare", "shapes", str(small_shapes), "--size", "32"]) == 0
    assert "nothing to do" in (printed := capsys.readouterr().out)
    assert printed.splitlines()[-1] == f"next: rwkv-clip pack {small_shapes}/train.tsv {small_shapes}-packed"
    assert (small_shapes / "stats.json").stat().st_mtime_ns == before
    assert main(["prepare", "shapes", str(small_shapes), "--size", "48"]) == 2
    assert main(["prepare", "shapes", str(small_shapes / "x"), "--size", "4"]) == 2


# ---------------------------------------------------------------- pictograms


def test_without_npm_the_message_names_it_and_the_way_out(tmp_path, monkeypatch, capsys):
    pytest.importorskip("resvg_py")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["prepare", "pictograms", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "npm" in message and "prepare shapes" in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_the_renderer_the_message_names_it_before_anything_is_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    monkeypatch.setattr(packages, "fetch", lambda package: pytest.fail("fetched"))
    assert main(["prepare", "pictograms", str(tmp_path / "out")]) == 2
    assert "pip install resvg-py" in capsys.readouterr().err


def fake_npm(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "npm").write_text(f"#!{sys.executable}\nimport sys, os, shutil\n{script}\n")
    (folder / "npm").chmod(0o755)


def test_without_network_npms_own_words_and_the_way_out_are_shown(tmp_path, monkeypatch):
    fake_npm(tmp_path / "bin", "print('npm error network ENOTFOUND registry', file=sys.stderr); sys.exit(1)")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match="emojibase-data@17.0.0.*ENOTFOUND.*prepare shapes"):
        packages.fetch(packages.NAMES)


def test_a_fetched_package_gives_its_wanted_files_and_lacking_ones_are_named(tmp_path, monkeypatch):
    package = packages.Package("@x/y", "1.0.0", "MIT", "y")
    with tarfile.open(tmp_path / "y.tgz", "w:gz") as tar:
        for name, content in {"package/icons.json": b"{}", "package/chars.json": b"[]", "package/evil": b"no"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    script = f"shutil.copy({str(tmp_path / 'y.tgz')!r}, sys.argv[sys.argv.index('--pack-destination') + 1])"
    fake_npm(tmp_path / "bin", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert packages.fetch(package) == {"icons.json": b"{}", "chars.json": b"[]"}
    with pytest.raises(UserError, match="holds no nothing.json"):
        packages.fetch(packages.Package("@x/y", "1.0.0", "MIT", "y", ("icons.json", "nothing.json")))


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("dog face", "a dog face"),
        ("owl", "an owl"),
        ("unicorn", "a unicorn"),
        ("grapes", "grapes"),
        ("bus", "a bus"),
        ("two hearts", "two hearts"),
        ("nest with eggs", "a nest with eggs"),
        ("flag: Norway", "the flag of Norway"),
        ("keycap: 5", "a keypad key with 5"),
        ("man mage: dark skin tone", "a man mage with dark skin tone"),
        ("woman: curly hair", "a woman with curly hair"),
        ("family: man, woman, boy", "a family of man and woman and boy"),
        ("person running: light skin tone, facing right", "a person running with light skin tone facing right"),
    ],
)
def test_names_become_noun_phrases(label, expected):
    assert phrase(label) == expected


def test_articles_follow_sound_and_number():
    names = {"hour": "a hour", "apple": "an apple", "scissors": "scissors", "cross": "a cross", "8 ball": "8 ball"}
    assert {name: with_article(name) for name in names} == names


def make_concept(**changes) -> Concept:
    values = dict(code="1F436", base="1F436", label="dog face", tags=("pet", "puppy"), group="animals-nature")
    values |= dict(subgroup="animal-mammal", tones=(), unicode_name="DOG FACE", shortcode="dog")
    return Concept(**(values | changes))


def test_three_captions_name_the_thing_its_kind_and_its_colours():
    drawing = Drawing("noto", make_concept(), "")
    raw, synthetic, generated = captions(drawing, ("brown", "white"))
    assert "dog" in raw.lower()
    assert synthetic.endswith("a dog face")
    assert generated.startswith("A dog face, a mammal, which suggests p") and generated.endswith("in brown and white.")
    assert (raw, synthetic, generated) == captions(drawing, ("brown", "white"))


def test_concepts_and_icons_are_matched_by_code_point_or_by_name():
    entry = {"hexcode": "1F436-FE0F", "label": "dog face", "tags": ["dog", "pet"], "skins": []}
    hand = {
        "hexcode": "1F44B",
        "label": "hand",
        "skins": [{"hexcode": "1F44B-1F3FB", "label": "hand: light", "tone": 1}],
    }
    names = {
        "en/data.json": json.dumps([entry, hand]).encode(),
        "meta/unicode-names.json": b'{"1F436": "DOG FACE"}',
        "en/shortcodes/iamcal.json": b'{"1F436": ["dog"]}',
    }
    groups = [
        {"hexcode": "1F436", "group": "animals-nature", "subgroups": "animal-mammal"},
        {"hexcode": "1F44B", "group": "people-body", "subgroups": "hand-fingers-open"},
    ]
    concepts = read_concepts(names, json.dumps(groups).encode())
    assert set(concepts) == {"1F436", "1F44B", "1F44B-1F3FB"}
    assert concepts["1F436"].tags == ("pet",) and concepts["1F44B-1F3FB"].tones == (1,)
    icons = {"icons": {"dog-face": {"body": "<g/>"}, "odd": {"body": "<b/>"}}, "height": 32, "width": 32}
    by_code = {"icons.json": json.dumps(icons).encode(), "chars.json": b'{"1f436": "dog-face", "1f999": "odd"}'}
    by_name = {"icons.json": json.dumps(icons).encode(), "chars.json": b"{}"}
    for files in (by_code, by_name):
        (drawing,) = icon_set("fx", files, concepts)
        assert drawing.path == "images/fx/1f436.jpg" and 'viewBox="0 0 32 32"' in drawing.svg


def test_every_kind_is_a_phrase_and_no_two_are_the_same():
    assert len(set(KINDS.values())) == len(KINDS)
    assert all(kind == kind.strip() and kind for kind in KINDS.values())


def test_drawings_are_rendered_on_white_with_their_colours_named(tmp_path):
    pytest.importorskip("resvg_py")
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 10"><rect width="10" height="10" fill="#c00"/></svg>'
    picture = render(svg, 72, tmp_path / "a/b.jpg")
    assert isinstance(picture, Rendered) and picture.colours == ("red",)
    image = Image.open(tmp_path / "a/b.jpg")
    assert image.size == (72, 36) and min(image.getpixel((60, 18))) > 245
    for broken, reason in [("<svg", "cannot be drawn"), (svg.replace("#c00", "none"), "transparent"),
                           (svg.replace("#c00", "#fff"), "blank")]:  # fmt: skip
        assert reason in render(broken, 72, tmp_path / "c.jpg")
    assert not (tmp_path / "c.jpg").exists()


@pytest.mark.parametrize(
    ("rgb", "name"),
    [((220, 20, 30), "red"), ((255, 150, 20), "orange"), ((250, 220, 40), "yellow"), ((40, 170, 60), "green"),
     ((30, 80, 220), "blue"), ((130, 50, 190), "purple"), ((250, 120, 180), "pink"), ((120, 75, 40), "brown"),
     ((10, 10, 10), "black"), ((250, 250, 250), "white"), ((128, 128, 130), "gray")],
)  # fmt: skip
def test_colours_have_the_names_that_people_use(rgb, name):
    assert main_colours(Image.new("RGBA", (32, 32), (*rgb, 255))) == (name,)


def test_lookalikes_are_found_among_near_copies_only():
    rng = np.random.default_rng(0)
    pictures = rng.random((5, 768), np.float32)
    others = np.concatenate([rng.random((3, 768), np.float32), pictures[2:3] + 0.01])
    assert lookalike(pictures, others, 0.05, 0.97).tolist() == [-1, -1, 3, -1, -1]
    twice = np.concatenate([pictures, pictures[:1]])
    assert lookalike(twice, twice, 0.05, 0.97, earlier_only=True).tolist() == [-1] * 5 + [0]


TONES = ["1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF"]


@pytest.fixture
def tiny_registry(monkeypatch) -> None:
    """Eight packages with 24 animals and 8 hands in five tones, each artist's drawings unlike the others'."""
    entries, groups = [], []
    for i in range(24):
        code = f"1F{400 + i}"
        word = chr(97 + i // 2) * 3
        entries.append({"hexcode": code, "label": word if i % 2 else f"old{word} {word}", "tags": ["tag"]})
        groups.append({"hexcode": code, "group": "animals-nature", "subgroups": "animal-mammal"})
    for i in range(20):
        code = f"1F{600 + i}"
        skins = [
            {"hexcode": f"{code}-{tone}", "label": f"hand {i}: tone {n + 1}", "tone": n + 1}
            for n, tone in enumerate(TONES)
        ]
        entries.append({"hexcode": code, "label": f"hand {i}", "skins": skins})
        groups.append({"hexcode": code, "group": "people-body", "subgroups": "hand-fingers-open"})
    codes = [form["hexcode"] for entry in entries for form in (entry, *entry.get("skins", ()))]
    artists = [package.artist for package in packages.PACKAGES]

    def body(code: str, artist: str) -> str:
        rng = np.random.default_rng([artists.index(artist), codes.index(code)])
        squares = "".join(
            f'<rect x="{x}" y="{y}" width="8" height="8" fill="#{rng.integers(1 << 24):06x}"/>'
            for x in range(0, 32, 8)
            for y in range(0, 32, 8)
        )
        return squares

    def fetch(package: packages.Package) -> dict[str, bytes]:
        if package is packages.NAMES:
            return {
                "en/data.json": json.dumps(entries).encode(),
                "meta/unicode-names.json": b"{}",
                "en/shortcodes/iamcal.json": b"{}",
            }
        if package is packages.HELD_OUT_ARTIST:
            svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{}</svg>'
            files = {f"color/svg/{code}.svg": svg.format(body(code, package.artist)).encode() for code in codes}
            return {"data/openmoji.json": json.dumps(groups).encode(), **files}
        icons = {code.lower(): {"body": body(code, package.artist)} for code in codes}
        chars = {code.lower(): code.lower() for code in codes}
        content = {"icons": icons, "width": 32, "height": 32}
        return {"icons.json": json.dumps(content).encode(), "chars.json": json.dumps(chars).encode()}

    monkeypatch.setattr(packages, "fetch", fetch)


def test_pictograms_keep_artist_concepts_and_tones_out_of_training(tiny_registry, tmp_path):
    pytest.importorskip("resvg_py")
    out = tmp_path / "out"
    assert main(["prepare", "pictograms", str(out), "--size", "32"]) == 0
    train, artist = table(out / "train.tsv"), table(out / "retrieval_unseen_artist.tsv")
    concept, tone = table(out / "retrieval_unseen_concept.tsv"), table(out / "retrieval_unseen_skin_tone.tsv")
    train_concepts = {row["concept"] for row in train}
    assert {row["artist"] for row in train} == {package.artist for package in packages.TRAINING_ARTISTS}
    assert artist and {row["artist"] for row in artist} == {"openmoji"}
    assert len(concept) == 12 and not {row["concept"] for row in concept} & train_concepts
    assert tone and not {row["concept"] for row in tone} & train_concepts
    assert {row["concept"].split("-")[0] for row in tone} <= {code.split("-")[0] for code in train_concepts}
    stats = json.loads((out / "stats.json").read_text())
    assert stats["train"] == len(train) and stats["not_drawn"] == {}
    listed = {row["image"] for name in out.glob("*.tsv") for row in table(name)}
    on_disk = {str(path.relative_to(out)) for path in out.glob("images/**/*.jpg")}
    assert listed == on_disk
    assert "CC-BY-SA-4.0" in (out / "ATTRIBUTION.md").read_text()


def test_pictograms_are_the_same_at_every_build(tiny_registry, tmp_path):
    pytest.importorskip("resvg_py")
    for name in ("one", "two"):
        assert main(["prepare", "pictograms", str(tmp_path / name), "--size", "32"]) == 0
    assert subprocess.run(["diff", "-r", tmp_path / "one", tmp_path / "two"]).returncode == 0
