"""Zero-shot classification scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rwkv_clip.evaluation.zero_shot import accuracy, classifier_weights, prompts, zero_shot_scores


def test_E1_close_logits_are_told_apart(fixtures):
    data = np.load(fixtures / "eval" / "zs_close_logits.npz")
    logits, labels = torch.from_numpy(data["logits"]), torch.from_numpy(data["target"])
    assert accuracy(logits, labels)["accuracy"] == 1.0
    assert accuracy(logits, labels)["mean_per_class"] == 1.0


def test_E1_whole_number_logits_are_refused():
    with pytest.raises(ValueError, match="int64"):
        accuracy(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


def test_mean_per_class_weighs_classes_equally_and_ignores_absent_ones():
    # Class 0: 3 of 4 right. Class 1: 0 of 1. Class 2 does not occur, and is guessed once.
    logits = F.one_hot(torch.tensor([0, 0, 0, 2, 0]), 3).float()
    scores = accuracy(logits, torch.tensor([0, 0, 0, 0, 1]))
    assert scores == {"accuracy": 0.6, "mean_per_class": 0.375}


def test_a_class_is_the_normalised_mean_of_its_normalised_prompts():
    table = {"a": [1.0, 0.0], "a!": [0.0, 1.0], "b": [0.6, 0.8], "b!": [0.6, 0.8]}
    asked = []

    def encode(texts):
        asked.extend(texts)
        return torch.tensor([table[text] for text in texts])

    weights = classifier_weights(encode, ["a", "b"], ["{}", "{}!"])
    assert asked == ["a", "a!", "b", "b!"]
    torch.testing.assert_close(weights, torch.tensor([[0.5**0.5, 0.5**0.5], [0.6, 0.8]]))


def test_names_with_braces_stand_in_prompts_as_they_are():
    assert prompts(["a {set}", "{}"], ["see {}."]) == ["see a {set}.", "see {}."]


def test_E9_scores_come_with_chance_under_numpy_2():
    assert int(np.__version__.split(".")[0]) >= 2
    features = F.normalize(torch.eye(4)[[0, 0, 0, 1]], dim=1)
    scores = zero_shot_scores(features, torch.eye(4), torch.tensor([0, 0, 0, 1]))
    assert scores == {"accuracy": 1.0, "mean_per_class": 1.0, "chance": 0.25, "largest_class": 0.75}
