"""Retrieval scores."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from rwkv_clip.evaluation import retrieval
from rwkv_clip.evaluation.retrieval import recall


@pytest.fixture
def five_captions_or_fewer(fixtures):
    data = np.load(fixtures / "eval" / "retrieval_var_caps.npz")
    # The similarities are the features: captions are unit vectors.
    return torch.from_numpy(data["sim"]), torch.eye(data["sim"].shape[1]).double(), torch.from_numpy(data["txt2img"])


@pytest.mark.parametrize("rows_at_once", [3, 1024])
def test_E5_any_number_of_captions_to_a_picture(fixtures, five_captions_or_fewer, rows_at_once, monkeypatch):
    monkeypatch.setattr(retrieval, "ROWS_AT_ONCE", rows_at_once)
    scores = recall(*five_captions_or_fewer)
    wanted = json.loads((fixtures / "eval" / "retrieval_var_caps_expected.json").read_text())
    for k in (1, 5, 10):
        for direction in ("image_to_text", "text_to_image"):
            assert 100 * scores[f"{direction}_R{k}"] == pytest.approx(wanted[f"R@{k}"][direction], abs=1e-4)
        both = (wanted[f"R@{k}"]["image_to_text"] + wanted[f"R@{k}"]["text_to_image"]) / 2
        assert 100 * scores[f"R{k}"] == pytest.approx(both, abs=1e-4)


def test_chance_is_what_all_orders_get_on_average():
    image_of_text = torch.tensor([0, 0, 1, 2, 2, 2])
    orders = list(itertools.permutations(range(6)))
    wanted = [
        sum(min(order.index(text) for text in own) < 5 for order in orders) / len(orders)
        for own in ([0, 1], [2], [3, 4, 5])
    ]
    scores = recall(torch.randn(3, 4), torch.randn(6, 4), image_of_text)
    assert scores["image_to_text_R5_chance"] == pytest.approx(sum(wanted) / 3)
    assert scores["text_to_image_R1_chance"] == pytest.approx(1 / 3)
    assert scores["text_to_image_R5_chance"] == 1.0
    assert scores["R1_chance"] == pytest.approx((1 / 3 + (2 / 6 + 1 / 6 + 3 / 6) / 3) / 2)


def test_random_features_get_chance():
    torch.manual_seed(0)
    image_of_text = torch.arange(2000) // 2
    scores = recall(torch.randn(1000, 8), torch.randn(2000, 8), image_of_text)
    for direction in ("image_to_text", "text_to_image"):
        assert scores[f"{direction}_R10"] == pytest.approx(scores[f"{direction}_R10_chance"], abs=0.012)


def test_a_model_that_answers_the_same_to_everything_finds_nothing():
    scores = recall(torch.ones(20, 4), torch.ones(20, 4), torch.arange(20))
    assert scores["R1"] == scores["R5"] == scores["R10"] == 0.0


def test_pictures_without_captions_stand_in_the_way_and_are_not_asked():
    images = torch.eye(3)
    scores = recall(images, images[[0, 2]], torch.tensor([0, 2]))
    assert scores["image_to_text_R1"] == scores["text_to_image_R1"] == 1.0
    assert scores["text_to_image_R1_chance"] == pytest.approx(1 / 3)
    assert scores["image_to_text_R1_chance"] == pytest.approx(1 / 2)
