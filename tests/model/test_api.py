"""The library as open_clip's users meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_models import small_config

import rwkv_clip
from rwkv_clip.errors import UserError
from rwkv_clip.model.transform import MEAN, STD, ImageTransform, random_box


def test_the_package_offers_the_documented_names() -> None:
    assert rwkv_clip.list_models() == ["RWKV-CLIP-B-16", "RWKV-CLIP-B-32", "RWKV-CLIP-Nano", "RWKV-CLIP-Ti-16"]
    assert {"create_model", "image_transform", "list_models", "ops", "tokenize"} <= set(dir(rwkv_clip))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rwkv_clip.nothing  # noqa: B018


def test_pictures_and_captions_go_through_the_documented_calls(fixtures: Path) -> None:
    model = rwkv_clip.create_model("RWKV-CLIP-Nano").eval()
    image = rwkv_clip.image_transform(model)(Image.open(fixtures / "img" / "rgb.jpg"))[None]
    tokens = rwkv_clip.tokenize(["a cat", "a dog"], context_length=40)
    with torch.no_grad():
        features = model.encode_image(image, normalize=True), model.encode_text(tokens, normalize=True)
        image_features, text_features, logit_scale = model(image.repeat(2, 1, 1, 1), tokens)
    assert features[0].shape == (1, 96) and features[1].shape == (2, 96)
    torch.testing.assert_close(image_features[0], features[0][0])
    torch.testing.assert_close(text_features, features[1])
    assert logit_scale.item() == pytest.approx(1 / 0.07, rel=1e-6)


def test_a_model_says_its_context_length_and_image_size_and_what_to_do_with_longer_captions() -> None:
    model = rwkv_clip.create_model("RWKV-CLIP-Nano").eval()
    assert (model.context_length, model.image_size) == (40, rwkv_clip.image_transform(model).size)
    assert model.encode_text(rwkv_clip.tokenize("a cat", model.context_length)).shape == (1, 96)
    with pytest.raises(UserError, match=r"use tokenize\(texts, model.context_length\)"):
        model.encode_text(rwkv_clip.tokenize("a cat"))


def test_fresh_models_train_and_the_dtype_is_the_weights() -> None:
    model = rwkv_clip.create_model(small_config(), dtype=torch.bfloat16)
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_seed_decides_the_fresh_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return rwkv_clip.create_model(small_config()).image_model.layers[0].att.key.weight

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


def test_an_unknown_model_is_named_before_anything_is_built() -> None:
    with pytest.raises(UserError, match="near names: RWKV-CLIP-B-32"):
        rwkv_clip.create_model("RWKV-CLIP-B-34")


def test_a_run_folder_gives_its_model(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(small_config().to_dict()))
    assert rwkv_clip.create_model(tmp_path).config == small_config()


def test_importing_and_building_a_model_needs_torch_alone() -> None:
    heavy = ("deepspeed", "nvidia.dali", "ftfy", "instant_clip_tokenizer", "pyarrow", "PIL", "safetensors")
    program = (
        "import sys, rwkv_clip\n"
        "assert 'torch' not in sys.modules\n"
        "rwkv_clip.create_model('RWKV-CLIP-Nano')\n"
        f"loaded = [name for name in {heavy!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_evaluation_pictures_are_resized_and_cropped_at_the_centre() -> None:
    image = Image.new("RGB", (300, 100), (255, 0, 0))
    image.paste((0, 0, 255), (100, 0, 200, 100))
    tensor = ImageTransform(48)(image)
    assert tensor.shape == (3, 48, 48) and tensor.dtype == torch.float32
    pixels = tensor * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    inside = torch.tensor([0.0, 0.0, 1.0])[:, None, None].expand(3, 48, 42)
    torch.testing.assert_close(pixels[:, :, 3:45], inside, rtol=0, atol=0.01)


@pytest.mark.parametrize("size", [(1, 600), (3000, 2), (17, 13), (48, 48), (49, 48)])
@pytest.mark.parametrize("train", [False, True])
def test_D10_pictures_of_any_shape_get_the_models_size(size: tuple[int, int], train: bool) -> None:
    tensor = ImageTransform(48, train)(Image.new("RGB", size))
    assert tensor.shape == (3, 48, 48) and tensor.isfinite().all()


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 50, 220), "yellow": (230, 220, 40)}


@pytest.mark.parametrize(
    ("file", "corners"),
    [
        ("rgb.jpg", ("red", "green", "blue", "yellow")),
        ("exif_rot6.jpg", ("blue", "red", "yellow", "green")),
        ("cmyk_adobe.jpg", ("red", "green", "blue", "yellow")),
        ("gray.jpg", None),
        ("palette.png", ("red", "green", "blue", "yellow")),
        ("rgba.png", None),
    ],
)
def test_D4_D6_orientation_and_colour_mode_come_out_as_seen(
    fixtures: Path, file: str, corners: tuple[str, ...] | None
) -> None:
    with Image.open(fixtures / "img" / file) as image:
        tensor = ImageTransform(64)(image)
    pixels = (tensor * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255
    assert tensor.shape == (3, 64, 64)
    if corners:
        for colour, (top, left) in zip(corners, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):
            quadrant = pixels[:, top * 32 + 8 : top * 32 + 24, left * 32 + 8 : left * 32 + 24].mean(dim=(1, 2))
            torch.testing.assert_close(quadrant, torch.tensor(COLOURS[colour], dtype=torch.float32), rtol=0, atol=15)


def test_training_crops_keep_the_published_area_and_aspect() -> None:
    torch.manual_seed(0)
    areas, aspects, places = [], [], set()
    for _ in range(300):
        left, top, width, height = random_box(500, 375)
        assert 0 <= left <= 500 - width and 0 <= top <= 375 - height
        areas.append(width * height / (500 * 375))
        aspects.append(width / height)
        places.add((left, top))
    assert 0.695 < min(areas) < 0.75 and 0.9 < max(areas) <= 1.0
    assert 0.79 < min(aspects) and max(aspects) < 1.26 and max(aspects) / min(aspects) > 1.3
    assert len(places) > 200


def test_training_flips_half_of_the_pictures() -> None:
    torch.manual_seed(0)
    image = Image.new("RGB", (64, 64))
    image.paste((255, 255, 255), (0, 0, 32, 64))
    transform = ImageTransform(16, train=True)
    flipped = sum(int((tensor := transform(image))[0, 8, 12] > tensor[0, 8, 3]) for _ in range(200))
    assert 70 < flipped < 130


def test_the_operator_is_there_without_an_import_of_its_own() -> None:
    script = "import rwkv_clip; print(rwkv_clip.ops.wkv6.__name__)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "wkv6\n", run.stderr
