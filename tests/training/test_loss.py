"""The contrastive loss: its value, its gradient in chunks and over ranks, and what it reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv_clip.errors import UserError
from rwkv_clip.training.loss import ClipLoss

WIDTH = 16


def make_features(count: int, seed: int = 0):
    """Embeddings before normalising [count, WIDTH], twice, and the parameter log(scale) [1]."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(count, WIDTH, generator=generator)
    text = image + 2 * torch.randn(count, WIDTH, generator=generator)
    return [tensor.requires_grad_() for tensor in (image, text, torch.tensor([2.6]))]


def textbook_loss(image, text, log_scale):
    """Figure 3 of the CLIP paper, with autograd's gradient: the oracle."""
    logits = log_scale.exp() * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    labels = torch.arange(len(image))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def apply_loss(loss_fn, image, text, log_scale):
    return loss_fn(F.normalize(image, dim=-1), F.normalize(text, dim=-1), log_scale.exp())


def relative_error(value, wanted) -> float:
    return float((value - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("chunk", [0, 1, 5, 12, 13, 100])
def test_loss_and_gradients_are_the_textbook_ones_in_chunks_of_any_size(chunk):
    tensors = make_features(13)
    wanted = torch.autograd.grad(textbook_loss(*tensors), tensors)
    output = apply_loss(ClipLoss(chunk=chunk), *tensors)
    torch.testing.assert_close(output.loss, textbook_loss(*tensors), rtol=1e-6, atol=0)
    for value, expected in zip(torch.autograd.grad(output.loss, tensors), wanted, strict=True):
        assert relative_error(value, expected) < 1e-5


def test_rows_and_accuracies_are_those_of_the_whole_similarity_matrix():
    image, text, log_scale = make_features(13)
    output = apply_loss(ClipLoss(chunk=4), image, text, log_scale)
    logits = log_scale.exp() * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    labels = torch.arange(13)
    torch.testing.assert_close(output.image_to_text_losses, F.cross_entropy(logits, labels, reduction="none"))
    torch.testing.assert_close(output.text_to_image_losses, F.cross_entropy(logits.T, labels, reduction="none"))
    assert output.image_to_text_accuracy == (logits.argmax(1) == labels).float().mean()
    assert output.text_to_image_accuracy == (logits.argmax(0) == labels).float().mean()
    assert output.image_to_text_accuracy != output.text_to_image_accuracy  # the fixture tells them apart
    assert output.mean_loss == output.loss.detach()


def test_a_small_loss_keeps_its_digits_at_the_highest_temperature():
    # Own pairs at cosine 1, others at 0.9: three wrong logits of 90 beside the right one of 100.
    features = torch.cat([torch.full((4, 1), 0.9**0.5), 0.1**0.5 * torch.eye(4)], dim=1)
    output = ClipLoss()(features, features.clone(), torch.tensor(100.0))
    assert output.loss.item() == pytest.approx(np.log1p(3 * np.exp(-10)), rel=1e-3)


class LargestTensor(TorchDispatchMode):
    """Records the largest result of any operation, and refuses to read a value back to Python."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, (
            "a value was read back: a GPU would be waited for"
        )
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_tensor(chunk: int, count: int = 256) -> int:
    tensors = make_features(count)
    with LargestTensor() as record:
        apply_loss(ClipLoss(chunk=chunk), *tensors).loss.backward()
    return record.elements


def test_chunks_bound_the_memory_of_both_passes_and_nothing_is_read_back():
    assert largest_tensor(chunk=0) == 256 * 256
    assert largest_tensor(chunk=16) == 2 * 256 * WIDTH  # both towers' features: no matrix of logits is larger


def test_lower_precision_features_are_compared_in_float32():
    image, text, log_scale = make_features(8)
    image16, text16 = F.normalize(image, dim=-1).bfloat16(), F.normalize(text, dim=-1).bfloat16()
    output = ClipLoss()(image16, text16, log_scale.exp())
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, ClipLoss()(image16.float(), text16.float(), log_scale.exp()).loss)
    output.loss.backward()
    assert torch.isfinite(image.grad).all()


def test_a_validation_loss_needs_no_gradient():
    with torch.no_grad():
        output = apply_loss(ClipLoss(), *make_features(8))
    assert not output.loss.requires_grad


def test_bad_arguments_are_named():
    with pytest.raises(UserError, match="'globl'"):
        ClipLoss(mode="globl")
    with pytest.raises(UserError, match="-3"):
        ClipLoss(chunk=-3)
    with pytest.raises(ValueError, match=r"\(4, 16\) and \(5, 16\)"):
        ClipLoss()(torch.zeros(4, 16), torch.zeros(5, 16), torch.ones(1))


def loss_on_a_rank(mode: str, chunk: int, count: int):
    """This rank's outputs and the gradients averaged over the ranks, as DeepSpeed does, for its slice of the batch."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    image, text, log_scale = make_features(count)
    size = count // world_size
    rows = slice(rank * size, (rank + 1) * size)
    output = apply_loss(ClipLoss(mode=mode, chunk=chunk), image[rows], text[rows], log_scale)
    gradients = torch.autograd.grad(output.loss, [image, text, log_scale])
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= world_size
    scalars = [output.loss, output.mean_loss, output.image_to_text_accuracy, output.text_to_image_accuracy]
    return [gradient.numpy() for gradient in gradients], [value.item() for value in scalars]


@pytest.mark.parametrize("world_size", [2, 3])
def test_O1_any_number_of_ranks_gives_one_ranks_loss_and_gradients(world_size):
    tensors = make_features(12)
    wanted = torch.autograd.grad(textbook_loss(*tensors), tensors)
    alone = apply_loss(ClipLoss(), *tensors)
    results = run_ranks(world_size, loss_on_a_rank, "global", 3, 12)
    for gradients, (_, mean_loss, image_accuracy, text_accuracy) in results:
        assert mean_loss == pytest.approx(alone.mean_loss.item(), rel=1e-6)
        assert image_accuracy == pytest.approx(float(alone.image_to_text_accuracy))
        assert text_accuracy == pytest.approx(float(alone.text_to_image_accuracy))
        for value, expected in zip(gradients, wanted, strict=True):
            assert relative_error(torch.from_numpy(value), expected) < 5e-5


def largest_tensor_on_a_rank(chunk: int, count: int) -> int:
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    image, text, log_scale = make_features(count)
    rows = slice(rank * count // world_size, (rank + 1) * count // world_size)
    with LargestTensor() as record:
        features = [tensor[rows].detach().requires_grad_() for tensor in (image, text)]
        apply_loss(ClipLoss(chunk=chunk), *features, log_scale).loss.backward()
    return record.elements


def test_a_rank_holds_its_own_rows_of_logits_and_a_chunk_of_them_when_told():
    assert run_ranks(2, largest_tensor_on_a_rank, 0, 128) == [64 * 128] * 2
    assert run_ranks(2, largest_tensor_on_a_rank, 10, 128) == [2 * 128 * WIDTH] * 2  # the gathered features


def test_G4_local_negatives_report_the_mean_over_ranks():
    tensors = make_features(12)
    halves = [[tensor[rows] for tensor in tensors[:2]] + [tensors[2]] for rows in (slice(0, 6), slice(6, 12))]
    losses = [textbook_loss(*half).item() for half in halves]
    results = run_ranks(2, loss_on_a_rank, "local", 0, 12)
    for (_, (loss, mean_loss, *_)), own in zip(results, losses, strict=True):
        assert loss == pytest.approx(own, rel=1e-5)
        assert mean_loss == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert abs(losses[0] - losses[1]) > 0.05  # rank 0's own would be another number
