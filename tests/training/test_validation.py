import os
import signal

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

from rwkv_clip.training.distributed import World
from rwkv_clip.training.gather import group_rank, group_size
from rwkv_clip.training.launcher import Place
from rwkv_clip.training.signals import StopRequest
from rwkv_clip.training.validation import Evaluator, batch_sums


class Towers(nn.Module):
    """The attributes of a model that an evaluation touches."""

    def __init__(self):
        super().__init__()
        self.image_model, self.text_model = nn.Linear(1, 1), nn.Linear(1, 1)


@pytest.fixture
def stop():
    request = StopRequest()
    request.install()
    yield request
    request.uninstall()


def evaluator(stop, score):
    world = World(Place("alone", 0, 1, 0, 1, "127.0.0.1", 0), torch.device("cpu"), None, ["here"])
    return Evaluator(world, None, score, stop)


def test_scores_come_back_and_the_model_trains_on(stop):
    model = Towers()
    model.text_model.requires_grad_(False)
    seen = []
    values = evaluator(stop, lambda model: (seen.append(model.training) or {"zero_shot/a": 0.5}, None)).run(model)
    assert values == {"zero_shot/a": 0.5} and seen == [False]
    assert model.image_model.training and not model.text_model.training


def test_a_stop_request_ends_an_evaluation_at_once(stop):
    def score(model):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the evaluation went on")

    model = Towers()
    assert evaluator(stop, score).run(model) is None
    assert stop.requested and model.training


def reference(image, text, scale, bias=None):
    """Loss and hits of a whole batch by PyTorch's own functions."""
    logits = scale * image @ text.T
    labels = torch.arange(len(image))
    loss = (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2
    if bias is not None:
        signs = 2 * torch.eye(len(image)) - 1
        loss = -nn.functional.logsigmoid(signs * (logits + bias)).sum() / len(image)
    return (
        loss.item(),
        (logits.argmax(1) == labels).float().mean().item(),
        (logits.argmax(0) == labels).float().mean().item(),
    )


def features(count: int):
    generator = torch.Generator().manual_seed(0)
    return [nn.functional.normalize(torch.randn(count, 4, generator=generator), dim=1) for _ in range(2)]


CASES = [(8, 0), (5, 3), (2, 2)]
"""(pairs, padding); in the last one a rank has nothing but padding."""
SCALARS = [(torch.tensor(5.0),), (torch.tensor(5.0), torch.tensor(-2.0))]
"""CLIP's loss, and the sigmoid loss with its bias."""


def ranks_sums() -> list[np.ndarray]:
    """For each case: pairs and padding split between the ranks, the sums of all of them."""
    results = []
    for count, padding in CASES:
        image, text = features(count)
        ones = torch.full((padding, 4), 0.5)
        image, text = torch.cat([image, ones]), torch.cat([text, ones])
        valid = torch.arange(count + padding) < count
        size = (count + padding) // group_size(None)
        part = slice(group_rank(None) * size, (group_rank(None) + 1) * size)
        for scalars in SCALARS:
            sums = batch_sums(image[part], text[part], valid[part], *scalars)
            torch.distributed.all_reduce(sums)
            results.append(sums.numpy())
    return results


def test_the_validation_loss_of_two_ranks_is_that_of_the_whole_batch_without_its_padding():
    for results in run_ranks(2, ranks_sums):
        settings = [(count, scalars) for count, _ in CASES for scalars in SCALARS]
        for (count, scalars), sums in zip(settings, results, strict=True):
            assert sums[3] == count
            assert sums[:3] / count == pytest.approx(reference(*features(count), *scalars), rel=1e-5)
