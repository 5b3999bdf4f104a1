"""The learned bias of a sigmoid loss: where it comes from, and its way through files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_models import small_batch, small_model

from rwkv_clip import create_model
from rwkv_clip.cli import main
from rwkv_clip.model.published import load_into, published_state_dict, read_state_dict, save
from rwkv_clip.training.job import load_pretrained


@pytest.fixture
def biased():
    model = small_model()
    model.add_logit_bias()
    return model


def test_a_model_has_none_unless_asked_and_published_files_neither() -> None:
    model = small_model()
    assert len(model(*small_batch(model))) == 3
    assert "logit_bias" not in model.state_dict() and "logit_bias" not in published_state_dict(model)


def test_it_starts_at_minus_10_with_a_temperature_of_10_and_is_a_fourth_result(biased) -> None:
    *_, scale, bias = biased(*small_batch(biased))
    assert scale.shape == bias.shape == () and bias == -10 and scale.item() == pytest.approx(10)
    bias.backward()
    assert biased.logit_bias.grad == 1


def test_it_acts_with_its_float32_value_in_bf16(biased) -> None:
    with torch.no_grad():
        biased.logit_bias.fill_(-9.97)
    biased.bfloat16()
    assert biased(*small_batch(biased))[3].item() == pytest.approx(-9.97, abs=1e-6)
    assert biased.float().logit_bias.item() == pytest.approx(-9.97, abs=1e-6)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_files_keep_it_as_a_number_and_a_plain_model_takes_it_up(biased, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    with torch.no_grad():
        biased.logit_bias.fill_(-7.5)
    save(path, published_state_dict(biased))
    assert read_state_dict(path)["logit_bias"].shape == ()
    model = small_model()
    load_into(model, path)
    assert model.logit_bias.item() == -7.5 and model.logit_scale.item() == pytest.approx(math.log(10))
    loaded = create_model(model.config, checkpoint=path)
    images, tokens = small_batch(model)
    assert torch.equal(loaded.encode_image(images), biased.eval().encode_image(images))


def test_export_says_that_a_file_has_it(biased, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save(tmp_path / "in.pt", published_state_dict(biased))
    assert main(["export", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]) == 0
    assert "logit_bias is the sigmoid loss's" in capsys.readouterr().out
    assert read_state_dict(tmp_path / "out.pt")["logit_bias"] == -10


def test_a_run_may_start_from_weights_of_the_other_loss(biased) -> None:
    clip = small_model()
    with torch.no_grad():
        clip.logit_scale.fill_(4.0)
        clip.image_model.pos_embed.fill_(0.5)
        biased.logit_scale.fill_(3.0)
    from_clip = small_model()
    from_clip.add_logit_bias()
    load_pretrained(from_clip, published_state_dict(clip))
    # A softmax's temperature means something else: the sigmoid loss begins at its own.
    assert from_clip.logit_bias == -10 and from_clip.logit_scale.item() == pytest.approx(math.log(10))
    assert torch.equal(from_clip.image_model.pos_embed, clip.image_model.pos_embed)
    from_siglip = small_model()
    load_pretrained(from_siglip, published_state_dict(biased))
    assert from_siglip.logit_bias is None and from_siglip.logit_scale == 3.0
