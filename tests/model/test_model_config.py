"""Model configurations: the packaged ones, JSON files, the published flat form, and what a wrong one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rwkv_clip.errors import UserError
from rwkv_clip.model.config import ImageConfig, ModelConfig, TextConfig, list_models, load_config

PUBLISHED_B32 = {
    "workers": 10,
    "precision": "bf16",
    "dropout": 0.0,
    "input_size": 224,
    "image_depth": 12,
    "image_embed_dims": 640,
    "image_patch_size": 32,
    "image_hidden_rate": 5,
    "image_num_heads": 8,
    "image_output_cls_token": False,
    "image_with_cls_token": False,
    "drop_path_rate": 0.3,
    "data_type": "utf-8",
    "ctx_len": 77,
    "vocab_size": 49408,
    "text_initialization": True,
    "head_size": 64,
    "text_num_head": 0,
    "pos_emb": 0,
    "head_size_divisor": 8,
    "n_layer": 6,
    "n_embd": 640,
    "dim_att": 640,
    "dim_ffn": 2240,
    "head_qk": 0,
    "tiny_att_dim": 0,
    "tiny_att_layer": -999,
    "with_cp": False,
}

TABLE = {
    "RWKV-CLIP-B-32": (ImageConfig(224, 32, 640, 12, 8, 5, 0.3), TextConfig(77, 49408, 640, 6, 10, 2240)),
    "RWKV-CLIP-B-16": (ImageConfig(224, 16, 640, 12, 8, 5, 0.3), TextConfig(77, 49408, 640, 6, 10, 2240)),
    "RWKV-CLIP-Ti-16": (ImageConfig(224, 16, 256, 12, 4, 4, 0.1), TextConfig(77, 49408, 256, 6, 4, 896)),
    "RWKV-CLIP-Nano": (ImageConfig(48, 8, 96, 4, 3, 4, 0.0), TextConfig(40, 49408, 96, 4, 3, 320)),
}


def write(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_the_packaged_models_are_those_of_the_table() -> None:
    assert list_models() == sorted(TABLE)
    for name, (image, text) in TABLE.items():
        assert load_config(name) == ModelConfig(name, image, text)


@pytest.mark.parametrize("name", ["B-32", "b-32", "rwkv-clip-b-32"])
def test_a_name_may_be_short_or_in_any_case(name: str) -> None:
    assert load_config(name).name == "RWKV-CLIP-B-32"


@pytest.mark.parametrize("patch_size", [16, 32])
def test_a_published_file_gives_the_packaged_model(tmp_path: Path, patch_size: int) -> None:
    config = load_config(write(tmp_path / "published.json", {**PUBLISHED_B32, "image_patch_size": patch_size}))
    image, text = TABLE[f"RWKV-CLIP-B-{patch_size}"]
    assert (config.image, config.text, config.initialize_text) == (image, text, True)


def test_a_published_file_with_class_token_keeps_both_flags(tmp_path: Path) -> None:
    values = {**PUBLISHED_B32, "image_with_cls_token": True, "image_output_cls_token": "True"}
    image = load_config(write(tmp_path / "cls.json", values)).image
    assert image.with_cls_token is True and image.output_cls_token is True


def test_a_published_file_without_widths_takes_the_published_defaults(tmp_path: Path) -> None:
    values = {**PUBLISHED_B32, "n_embd": 96, "image_embed_dims": 96, "head_size": 32, "dim_att": 0, "dim_ffn": 0}
    assert load_config(write(tmp_path / "flat.json", values)).text.ffn_width == 320  # 3.5 * 96 in whole 32s


@pytest.mark.parametrize("key", ["pos_emb", "head_qk", "tiny_att_dim"])
def test_a_published_option_that_is_not_built_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"{key} = 8 .*is not supported"):
        load_config(write(tmp_path / "flat.json", {**PUBLISHED_B32, key: 8}))


def test_to_dict_and_from_dict_are_inverse_and_a_run_folder_is_read(tmp_path: Path) -> None:
    config = ModelConfig("mine", ImageConfig(32, 8, 32, 1, 2, 4, 0.1, True, True), TextConfig(9, 99, 32, 1, 2, 64, 0.1))
    assert ModelConfig.from_dict(config.to_dict()) == config
    write(tmp_path / "model.json", config.to_dict())
    assert load_config(tmp_path) == config
    assert load_config(tmp_path / "model.json") == config


def test_an_unknown_name_lists_the_near_ones() -> None:
    with pytest.raises(UserError, match=r"unknown model 'RWKV-CLIP-B32'; near names: RWKV-CLIP-B-32") as error:
        load_config("RWKV-CLIP-B32")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="RWKV-CLIP-Nano"):
        load_config("nono")


def test_a_missing_file_and_a_folder_without_a_run_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_config(tmp_path / "absent.json")
    with pytest.raises(UserError, match="no model.json in this folder"):
        load_config(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="not a readable JSON file"):
        load_config(tmp_path / "broken.json")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("image", "patch_size", 15, "image_size 48 is not a multiple of image.patch_size 15"),
        ("image", "num_heads", 5, "width 96 is not a multiple of image.num_heads 5"),
        ("image", "num_heads", 16, "gives head size 6; the operator takes multiples of 4"),
        ("image", "drop_path_rate", 1.0, r"drop_path_rate must be in \[0, 1\), found 1.0"),
        ("image", "depth", 0, "image.depth must be a positive whole number, found 0"),
        ("image", "output_cls_token", True, "output_cls_token needs image.with_cls_token"),
        ("text", "width", 64, "image.width 96 and text.width 64 differ|is not a multiple"),
        ("text", "context_length", "77", "context_length must be a positive whole number, found '77'"),
        ("text", "context_lenght", 77, "unknown key 'context_lenght'; did you mean 'context_length'"),
    ],
)
def test_a_value_that_no_model_can_have_is_named(section: str, key: str, value: Any, message: str) -> None:
    values = load_config("Nano").to_dict()
    values[section][key] = value
    with pytest.raises(UserError, match=message) as error:
        ModelConfig.from_dict(values)
    assert "\n" not in str(error.value)


def test_a_missing_key_is_named() -> None:
    values = load_config("Nano").to_dict()
    del values["text"]["depth"]
    with pytest.raises(UserError, match="section text: missing key 'depth'"):
        ModelConfig.from_dict(values)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "twice.json"
    path.write_text('{"image": {"depth": 2, "depth": 3}, "text": {}}')
    with pytest.raises(UserError, match="'depth' is there twice"):
        load_config(path)


def test_a_size_with_digits_too_many_is_refused_before_memory_is_asked_for(tmp_path):
    values = load_config("Nano").to_dict()
    values["text"]["vocab_size"] = 49408 * 10**8
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match="text.vocab_size must be at most"):
        load_config(path)
