"""The sigmoid loss of SigLIP: every pair of an image and a caption is a yes-or-no question of its own.

B: pairs of this rank, W: ranks, G = W x B, D: width of the embedding.

Source: Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023), algorithm 1 and section 3.3.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .gather import mean_over_ranks
from .loss import ContrastiveLoss, LossOutput, check_features, slices
from .ring import Ring


class SigmoidLoss(ContrastiveLoss):
    """-log sigmoid(z (scale x similarity + bias)) summed over all pairs, over G; z is 1 for own pairs, otherwise -1.

    No rank holds more than two ranks' captions: they are passed round the ranks, and the gradients that they collect on
    their way are passed after them. Softmax needs a row's sum first; here a block's gradient is known with the block,
    so one round gives both, and the backward pass is a product with what was kept, [B, D] twice.

    With a chunk, the logits [chunk, B] are held at once.
    """

    def forward(self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, bias: Tensor) -> LossOutput:
        """The loss of one global batch.

        image_features, text_features: [B, D], normalised, the same B on every rank. logit_scale: [] or [1], the factor
        itself (exp of the parameter). bias: [] or [1]. All are used in float32.
        """
        check_features(image_features, text_features, logit_scale)
        if bias.numel() != 1:
            raise ValueError(f"the bias must hold one number, found shape {tuple(bias.shape)}")
        image, text = image_features.float(), text_features.float()
        scale, bias = logit_scale.float().reshape(()), bias.float().reshape(())
        loss, rows, means = _Sigmoid.apply(image, text, scale, bias, self.group, self.mode, self.chunk)
        return LossOutput(loss, means[0], means[1], means[2], rows[0], rows[1])


class _Sigmoid(torch.autograd.Function):
    """loss [], rows [2, B] (sums of pair losses per image and per caption), means [3] (as in LossOutput)."""

    @staticmethod
    def forward(ctx, image, text, scale, bias, group, mode, chunk):
        differentiable = any(ctx.needs_input_grad)
        ring = Ring(text, group, alone=mode == "local", with_gradients=differentiable)
        block = _Block(image, scale, bias, chunk, ring.size, differentiable)
        for origin in ring:
            block.take(ring.features, origin, own=origin == ring.rank)
            if differentiable:
                ring.add(block.grad_text)
        loss = block.image_losses.sum() / len(image)
        text_losses, text_rivals = block.text_losses, block.text_rivals
        if ring.size > 1:
            dist.all_reduce(text_rivals, op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(text_losses, group=group)
        text_losses, text_rivals = text_losses[ring.rank], text_rivals[ring.rank]
        hits = [(block.own > rivals).float().mean() for rivals in (block.image_rivals, text_rivals)]
        means = mean_over_ranks(torch.stack([loss, *hits]), group)
        if differentiable:
            # Of a sum over the ranks of their losses, each divided by its B rows.
            share = 1 / len(image)
            grad_scale = (block.grad_image * image).sum() * share
            ctx.save_for_backward(
                block.grad_image * (scale * share), ring.gradients * share, grad_scale, block.grad_bias * share
            )
        rows = torch.stack([block.image_losses, text_losses])
        ctx.mark_non_differentiable(rows, means)
        return loss, rows, means

    @staticmethod
    def backward(ctx, grad_loss, _rows_grad, _means_grad):
        return *(gradient * grad_loss for gradient in ctx.saved_tensors), None, None, None


class _Block:
    """Sums over this rank's images against the captions that come by, block [B, B] by block."""

    def __init__(self, image: Tensor, scale: Tensor, bias: Tensor, chunk: int, ranks: int, differentiable: bool):
        self._image, self._scale, self._bias, self._chunk = image, scale, bias, chunk
        self._differentiable = differentiable
        count = len(image)
        self.image_losses = image.new_zeros(count)
        self.text_losses = image.new_zeros(ranks, count)
        self.own = image.new_empty(count)
        """[B] logits of own pairs."""
        self.image_rivals = image.new_full((count,), -torch.inf)
        """[B] highest logit of each image among other captions."""
        self.text_rivals = image.new_full((ranks, count), -torch.inf)
        """[W, B] highest logit of each rank's captions among this rank's images, own pairs left out."""
        self.grad_image = torch.zeros_like(image)
        """[B, D] of the sum of losses, without the factor scale."""
        self.grad_bias = image.new_zeros(())
        self.grad_text: Tensor | None = None
        """[B, D] of this rank's loss for the captions taken last."""

    def take(self, text: Tensor, origin: int, own: bool) -> None:
        """One rank's captions [B, D]."""
        self.grad_text = torch.zeros_like(text) if self._differentiable else None
        for part in slices(len(self._image), self._chunk):
            image = self._image[part]
            logits = (image * self._scale) @ text.T
            logits += self._bias
            diagonal = torch.arange(part.start, part.stop, device=text.device)[:, None]
            if own:
                positive = logits.gather(1, diagonal)
                self.own[part] = positive[:, 0]
                logits.scatter_(1, diagonal, -torch.inf)  # no rival of its own
            self.image_rivals[part] = torch.maximum(self.image_rivals[part], logits.amax(dim=1))
            self.text_rivals[origin] = torch.maximum(self.text_rivals[origin], logits.amax(dim=0))
            if own:
                logits.scatter_(1, diagonal, -positive)  # -z x logit everywhere
            if self._differentiable:
                grad = torch.sigmoid(logits)
                if own:
                    grad.scatter_(1, diagonal, -torch.sigmoid(-positive))
                self.grad_image[part].addmm_(grad, text)
                self.grad_text.addmm_(grad.T, image)
                self.grad_bias += grad.sum()
                del grad
            losses = F.softplus(logits)
            self.image_losses[part] += losses.sum(dim=1)
            self.text_losses[origin] += losses.sum(dim=0)
        if self._differentiable:
            self.grad_text *= self._scale
