"""Retrieval: captions of a picture and pictures of a caption, with any number of captions to a picture.

I: pictures, T: captions, D: width of the embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RANKS = (1, 5, 10)
ROWS_AT_ONCE = 1024
DIRECTIONS = ("image_to_text", "text_to_image")


def recall(image_features: Tensor, text_features: Tensor, image_of_text: Tensor) -> dict[str, float]:
    """R@1, R@5 and R@10 in both directions, shares from 0 to 1, with chance beside each.

    image_features: [I, D]. text_features: [T, D]. image_of_text: int64 [T], the picture of each caption.

    Keys: "image_to_text_R5" (of the pictures that have captions, those with one of their own among the first 5),
    "text_to_image_R5", "R5" (mean of the two), and each again with "_chance", what a random order would get. A tie with
    a wrong answer counts as lost, so that a model that gives the same feature for everything finds nothing.
    """
    ranks = {
        "image_to_text": _ranks_of_texts(image_features, text_features, image_of_text),
        "text_to_image": _ranks_of_images(image_features, text_features, image_of_text),
    }
    captions = torch.bincount(image_of_text, minlength=len(image_features))
    scores = {}
    for k in RANKS:
        for direction in DIRECTIONS:
            scores[f"{direction}_R{k}"] = (ranks[direction] < k).double().mean().item()
        scores[f"R{k}"] = sum(scores[f"{direction}_R{k}"] for direction in DIRECTIONS) / 2
        chances = {
            "image_to_text": _chance(captions[captions > 0].tolist(), len(text_features), k),
            "text_to_image": min(k / len(image_features), 1.0),
        }
        for direction in DIRECTIONS:
            scores[f"{direction}_R{k}_chance"] = chances[direction]
        scores[f"R{k}_chance"] = sum(chances.values()) / 2
    return scores


def _ranks_of_texts(image_features: Tensor, text_features: Tensor, image_of_text: Tensor) -> Tensor:
    """For each picture with captions, the number of other pictures' captions that beat (or tie) its best one."""
    ranks = []
    for start in range(0, len(image_features), ROWS_AT_ONCE):
        similarity = image_features[start : start + ROWS_AT_ONCE] @ text_features.T
        images = torch.arange(start, start + len(similarity), device=image_of_text.device)
        own = images[:, None] == image_of_text
        best = similarity.masked_fill(~own, -math.inf).amax(dim=1, keepdim=True)
        rank = ((similarity >= best) & ~own).sum(dim=1)
        ranks.append(rank[own.any(dim=1)])
    return torch.cat(ranks)


def _ranks_of_images(image_features: Tensor, text_features: Tensor, image_of_text: Tensor) -> Tensor:
    """For each caption, the number of other pictures that beat (or tie) its own."""
    ranks = []
    for start in range(0, len(text_features), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        similarity = text_features[rows] @ image_features.T
        own = similarity.gather(1, image_of_text[rows, None])
        ranks.append((similarity >= own).sum(dim=1) - 1)
    return torch.cat(ranks)


def _chance(own_captions: list[int], captions: int, k: int) -> float:
    """Mean probability that the first k of all captions in random order hold one of a picture's own."""
    misses = {
        own: math.comb(captions - own, k) / math.comb(captions, k) if k <= captions else 0.0
        for own in set(own_captions)
    }
    return sum(1 - misses[own] for own in own_captions) / len(own_captions)
