"""The sigmoid loss: its value, its gradient in chunks and round the ranks, and that nothing is gathered."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from test_loss import LargestTensor, make_features, relative_error

from rwkv_clip.errors import UserError
from rwkv_clip.training.ring import Ring
from rwkv_clip.training.sigmoid_loss import SigmoidLoss

COUNT = 12


def make_tensors(count: int = COUNT):
    """Embeddings before normalising, twice, log(scale) [1] and bias [1]."""
    return [*make_features(count), torch.tensor([-3.0]).requires_grad_()]


def textbook_loss(image, text, log_scale, bias):
    """Algorithm 1 of the SigLIP paper, with autograd's gradient: the oracle."""
    logits = log_scale.exp() * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T + bias
    labels = 2 * torch.eye(len(image)) - 1
    return -F.logsigmoid(labels * logits).sum() / len(image)


def apply_loss(loss_fn, image, text, log_scale, bias):
    return loss_fn(F.normalize(image, dim=-1), F.normalize(text, dim=-1), log_scale.exp(), bias)


@pytest.mark.parametrize("chunk", [0, 1, 5, 12, 13, 100])
def test_loss_and_gradients_are_the_textbook_ones_in_chunks_of_any_size(chunk):
    tensors = make_tensors(13)
    wanted = torch.autograd.grad(textbook_loss(*tensors), tensors)
    output = apply_loss(SigmoidLoss(chunk=chunk), *tensors)
    torch.testing.assert_close(output.loss, textbook_loss(*tensors), rtol=1e-6, atol=0)
    assert output.mean_loss == output.loss.detach()
    for value, expected in zip(torch.autograd.grad(output.loss, tensors), wanted, strict=True):
        assert relative_error(value, expected) < 1e-5


def test_rows_and_accuracies_are_those_of_the_whole_similarity_matrix():
    image, text, log_scale, bias = make_tensors()
    output = apply_loss(SigmoidLoss(chunk=5), image, text, log_scale, bias)
    logits = log_scale.exp() * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T + bias
    losses = -F.logsigmoid((2 * torch.eye(COUNT) - 1) * logits)
    torch.testing.assert_close(output.image_to_text_losses, losses.sum(1).detach())
    torch.testing.assert_close(output.text_to_image_losses, losses.sum(0).detach())
    labels = torch.arange(COUNT)
    assert output.image_to_text_accuracy == (logits.argmax(1) == labels).float().mean()
    assert output.text_to_image_accuracy == (logits.argmax(0) == labels).float().mean()
    assert output.image_to_text_accuracy != output.text_to_image_accuracy  # the fixture tells them apart


def test_equal_features_are_no_hit():
    features = F.normalize(torch.ones(4, 3), dim=-1)
    output = SigmoidLoss()(features, features, torch.tensor(10.0), torch.tensor(-10.0))
    assert output.image_to_text_accuracy == output.text_to_image_accuracy == 0


def test_a_small_loss_keeps_its_digits():
    features = torch.eye(4)
    output = SigmoidLoss()(features, features, torch.tensor(40.0), torch.tensor(-20.0))
    wanted = torch.tensor(4 * 4.0, dtype=torch.float64) * torch.log1p(torch.exp(torch.tensor(-20.0).double())) / 4
    assert output.loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_chunks_bound_the_memory_of_both_passes_and_nothing_is_read_back():
    def largest(chunk):
        tensors = make_tensors(256)
        with LargestTensor() as record:
            apply_loss(SigmoidLoss(chunk=chunk), *tensors).loss.backward()
        return record.elements

    assert largest(0) == 256 * 256
    assert largest(16) == 2 * 256 * 16  # captions and their gradients; no matrix of logits is larger


def test_a_validation_loss_needs_no_gradient():
    with torch.no_grad():
        output = apply_loss(SigmoidLoss(), *make_tensors(8))
    assert not output.loss.requires_grad


def test_bad_arguments_are_named():
    with pytest.raises(UserError, match="'globl'"):
        SigmoidLoss(mode="globl")
    with pytest.raises(ValueError, match=r"\(4, 16\) and \(5, 16\)"):
        SigmoidLoss()(torch.zeros(4, 16), torch.zeros(5, 16), torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match=r"bias.*\(2,\)"):
        SigmoidLoss()(torch.zeros(4, 16), torch.zeros(4, 16), torch.ones(1), torch.ones(2))


def loss_on_a_rank(mode: str, chunk: int):
    """This rank's outputs, the gradients averaged over the ranks, and the largest messages, by kind."""
    sizes = {}

    def recording(name):
        function = getattr(dist, name)

        def call(*args, **kwargs):
            tensor = args[0][0].tensor if name == "batch_isend_irecv" else args[0]
            sizes[name] = max(sizes.get(name, 0), tensor.numel())
            return function(*args, **kwargs)

        return call

    rank, world_size = dist.get_rank(), dist.get_world_size()
    image, text, log_scale, bias = make_tensors()
    size = COUNT // world_size
    rows = slice(rank * size, (rank + 1) * size)
    originals = {name: getattr(dist, name) for name in dir(dist) if name.startswith(("all_", "batch_", "broad"))}
    for name, function in originals.items():
        if callable(function):
            setattr(dist, name, recording(name))
    output = apply_loss(SigmoidLoss(mode=mode, chunk=chunk), image[rows], text[rows], log_scale, bias)
    gradients = torch.autograd.grad(output.loss, [image, text, log_scale, bias])
    for name, function in originals.items():
        setattr(dist, name, function)
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= world_size
    scalars = [output.loss, output.mean_loss, output.image_to_text_accuracy, output.text_to_image_accuracy]
    losses = [output.image_to_text_losses.numpy(), output.text_to_image_losses.numpy()]
    return [gradient.numpy() for gradient in gradients], [value.item() for value in scalars], losses, sizes


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_ranks_gives_one_ranks_loss_and_gradients_without_gathering(world_size):
    tensors = make_tensors()
    wanted = torch.autograd.grad(textbook_loss(*tensors), tensors)
    alone = apply_loss(SigmoidLoss(), *tensors)
    size = COUNT // world_size
    for rank, (gradients, scalars, losses, sizes) in enumerate(run_ranks(world_size, loss_on_a_rank, "global", 2)):
        _, mean_loss, image_accuracy, text_accuracy = scalars
        assert mean_loss == pytest.approx(alone.mean_loss.item(), rel=1e-6)
        assert image_accuracy == pytest.approx(float(alone.image_to_text_accuracy))
        assert text_accuracy == pytest.approx(float(alone.text_to_image_accuracy))
        rows = slice(rank * size, (rank + 1) * size)
        for found, expected in zip(losses, (alone.image_to_text_losses, alone.text_to_image_losses), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), expected[rows], rtol=1e-5, atol=1e-6)
        for value, expected in zip(gradients, wanted, strict=True):
            assert relative_error(torch.from_numpy(value), expected) < 5e-5
        # Features and their gradients go to a neighbour; what all ranks share is a number per caption.
        assert sizes == {"batch_isend_irecv": size * 16 * (1 if world_size == 2 else 2), "all_reduce": COUNT}


def test_local_negatives_report_the_mean_over_ranks():
    tensors = make_tensors()
    losses = []
    for rows in (slice(0, 6), slice(6, 12)):
        losses.append(textbook_loss(tensors[0][rows], tensors[1][rows], *tensors[2:]).item())
    for (_, (loss, mean_loss, *_), _, sizes), own in zip(run_ranks(2, loss_on_a_rank, "local", 0), losses, strict=True):
        assert loss == pytest.approx(own, rel=1e-5)
        assert mean_loss == pytest.approx(sum(losses) / 2, rel=1e-5)
        assert sizes == {"all_reduce": 3}


def ring_on_a_rank(with_gradients: bool):
    rank = dist.get_rank()
    ring = Ring(torch.full((2, 3), float(rank)), None, with_gradients=with_gradients)
    seen = []
    for origin in ring:
        seen.append((origin, ring.features[0, 0].item()))
        if with_gradients:
            ring.add(torch.full((2, 3), 10.0**rank * (1 + origin)))
    return seen, None if ring.gradients is None else ring.gradients.numpy()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ring_shows_every_rank_once_and_brings_the_gradients_home(world_size):
    for rank, (seen, gradients) in enumerate(run_ranks(world_size, ring_on_a_rank, True)):
        assert seen == [((rank - hop) % world_size, float((rank - hop) % world_size)) for hop in range(world_size)]
        assert (gradients == sum(10.0**other for other in range(world_size)) * (1 + rank)).all()


def test_the_ring_also_goes_round_without_gradients():
    assert [run[0] for run in run_ranks(3, ring_on_a_rank, False)] == [
        [((rank - hop) % 3, float((rank - hop) % 3)) for hop in range(3)] for rank in range(3)
    ]
