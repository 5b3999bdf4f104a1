"""Zero-shot classification: a class is the mean of its prompts' text features.

N: pictures, C: classes, P: templates, D: width of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def prompts(classes: Sequence[str], templates: Sequence[str]) -> list[str]:
    """The C x P sentences, class by class."""
    return [template.replace("{}", name) for name in classes for template in templates]


def classifier_weights(
    encode_texts: Callable[[list[str]], Tensor], classes: Sequence[str], templates: Sequence[str]
) -> Tensor:
    """Class directions, float32 [C, D], of length 1: the mean of the prompts' normalised features, normalised.

    encode_texts: sentences to normalised features [number, D].
    """
    features = encode_texts(prompts(classes, templates)).float()
    return F.normalize(features.view(len(classes), len(templates), -1).mean(dim=1), dim=-1)


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Shares, 0 to 1, of pictures whose own class scores highest: of all, and the mean over the classes that occur.

    logits: floating point [N, C]. labels: int64 [N]. Raises ValueError for whole-number logits, which tie.
    """
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, found {logits.dtype}: rounded ones tie")
    hits = (logits.argmax(dim=1) == labels).double()
    count = torch.zeros(logits.shape[1], dtype=torch.double, device=hits.device).index_add_(
        0, labels, torch.ones_like(hits)
    )
    right = torch.zeros_like(count).index_add_(0, labels, hits)
    occurs = count > 0
    return {"accuracy": hits.mean().item(), "mean_per_class": (right[occurs] / count[occurs]).mean().item()}


def zero_shot_scores(image_features: Tensor, weights: Tensor, labels: Tensor) -> dict[str, float]:
    """`accuracy` of normalised features [N, D] under `classifier_weights` [C, D], and what blind guessing would get.

    "chance": guessing among the C classes, for either score. "largest_class": always naming the most frequent class,
    for "accuracy".
    """
    scores = accuracy(image_features.float() @ weights.T, labels)
    scores["chance"] = 1 / len(weights)
    scores["largest_class"] = torch.bincount(labels).max().item() / len(labels)
    return scores
