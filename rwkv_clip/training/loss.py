"""The contrastive loss of CLIP, with the gradient of the whole batch at any number of ranks.

B: pairs of this rank, G: pairs of all ranks (B x number of ranks), D: width of the embedding.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021), figure 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UserError
from .gather import gather_ranks, group_rank, mean_over_ranks


@dataclass(frozen=True)
class LossOutput:
    """What a loss gives. All tensors are float32 and on the features' device; reading them is up to the caller."""

    loss: Tensor
    """[] this rank's loss, the one to call backward on. The gradient wanted is the mean over ranks, as DeepSpeed takes
    it; only that mean has a meaning, not one rank's part."""
    mean_loss: Tensor
    """[] the loss of the global batch, equal on every rank, without gradient."""
    image_to_text_accuracy: Tensor
    """[] share of images of the global batch, 0 to 1, whose own caption scores highest."""
    text_to_image_accuracy: Tensor
    """[] share of captions of the global batch, 0 to 1, whose own image scores highest."""
    image_to_text_losses: Tensor
    """[B] each local image's loss against the captions of the global batch, without gradient."""
    text_to_image_losses: Tensor
    """[B] each local caption's loss against the images of the global batch, without gradient."""


class ContrastiveLoss(nn.Module):
    """What every loss over pairs of images and captions is set to.

    group: the ranks that share a global batch (None: the default group, or one process).
    mode: "global": negatives from all ranks, and the gradient of W ranks, averaged, equals that of one rank with the
        whole batch. "local": negatives from this rank's own pairs, so the loss depends on the number of ranks.
    chunk: number of rows whose logits are held at once; 0 takes all rows at once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, mode: str = "global", chunk: int = 0) -> None:
        super().__init__()
        if mode not in ("global", "local"):
            raise UserError(f"unknown loss mode '{mode}': choose 'global' or 'local'")
        if chunk < 0:
            raise UserError(f"the loss's chunk must be 0 (all rows at once) or a number of rows, found {chunk}")
        self.group = group
        self.mode = mode
        self.chunk = chunk


class ClipLoss(ContrastiveLoss):
    """Symmetric cross-entropy over the similarities of images and captions.

    Each rank works on its own rows, logits [B, G], in both directions. Features of all ranks are gathered once. The
    gradient of a row's feature needs the other ranks' rows only through their log normalisers, so the backward pass
    recomputes the logits from the gathered features and G numbers, and talks to no other rank.

    With a chunk, the logits [chunk, G] are held at once, in both passes.
    """

    def forward(self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> LossOutput:
        """The loss of one global batch.

        image_features, text_features: [B, D], normalised, the same B on every rank. logit_scale: [] or [1], the factor
        itself (exp of the parameter). All are used in float32.
        """
        check_features(image_features, text_features, logit_scale)
        loss, rows, means = _SymmetricCrossEntropy.apply(
            image_features.float(),
            text_features.float(),
            logit_scale.float().reshape(()),
            self.group,
            self.mode,
            self.chunk,
        )
        return LossOutput(loss, means[0], means[1], means[2], rows[0], rows[1])


class _SymmetricCrossEntropy(torch.autograd.Function):
    """loss [], rows [2, B] (cross-entropies per direction), means [3] (loss and accuracies over all ranks)."""

    @staticmethod
    def forward(ctx, image, text, scale, group, mode, chunk):
        if mode == "global":
            gathered = gather_ranks(torch.stack([image, text]), group)  # [W, 2, B, D]
            all_image, all_text = gathered[:, 0].flatten(0, 1), gathered[:, 1].flatten(0, 1)
            first_label = group_rank(group) * len(image)
        else:
            all_image, all_text, first_label = image, text, 0
        image_loss, image_normaliser, image_hits = _rows(image, all_text, scale, first_label, chunk)
        text_loss, text_normaliser, text_hits = _rows(text, all_image, scale, first_label, chunk)
        loss = (image_loss.mean() + text_loss.mean()) / 2
        local = torch.stack([image_normaliser, text_normaliser, (image_loss + text_loss) / 2, image_hits, text_hits])
        if mode == "global":
            everywhere = gather_ranks(local, group)  # [W, 5, B]
            all_normalisers = everywhere[:, :2].transpose(0, 1).flatten(1)  # [2, G]
            means = everywhere[:, 2:].mean(dim=(0, 2))
        else:
            all_normalisers = local[:2]
            means = mean_over_ranks(local[2:].mean(dim=1), group)
        ctx.save_for_backward(image, text, scale, all_image, all_text, local[:2], all_normalisers)
        ctx.first_label, ctx.chunk = first_label, chunk
        rows = torch.stack([image_loss, text_loss])
        ctx.mark_non_differentiable(rows, means)
        return loss, rows, means

    @staticmethod
    def backward(ctx, grad_loss, _rows_grad, _means_grad):
        image, text, scale, all_image, all_text, own, everyone = ctx.saved_tensors
        # Of a sum over the ranks of their losses, each a mean over B rows in two directions.
        factor = grad_loss / (2 * len(image))
        grad_image, grad_scale = _rows_backward(
            image, all_text, scale, own[0], everyone[1], ctx.first_label, ctx.chunk, with_scale=True
        )
        grad_text, _ = _rows_backward(
            text, all_image, scale, own[1], everyone[0], ctx.first_label, ctx.chunk, with_scale=False
        )
        return grad_image * (factor * scale), grad_text * (factor * scale), grad_scale * factor, None, None, None


def check_features(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> None:
    """`ValueError` for shapes that no loss takes."""
    if image_features.shape != text_features.shape or image_features.dim() != 2:
        raise ValueError(
            "image and text features must be [B, D] and of equal shape, "
            f"found {tuple(image_features.shape)} and {tuple(text_features.shape)}"
        )
    if logit_scale.numel() != 1:
        raise ValueError(f"logit_scale must hold one number, found shape {tuple(logit_scale.shape)}")


def slices(rows: int, chunk: int) -> Iterator[slice]:
    """Ranges of `chunk` rows, the last one perhaps shorter; one of all rows if `chunk` is 0."""
    step = chunk or max(rows, 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _rows(rows: Tensor, columns: Tensor, scale: Tensor, first_label: int, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, log normaliser and whether the label scores highest (0 or 1), each [B], of rows [B, D]."""
    losses, normalisers, hits = [], [], []
    for part in slices(len(rows), chunk):
        logits = (rows[part] * scale) @ columns.T
        labels = torch.arange(part.start, part.stop, device=rows.device) + first_label
        own = logits.gather(1, labels[:, None])
        hits.append(logits.argmax(dim=1) == labels)
        # Relative to the label's logit: a small loss keeps its digits although logits reach 100.
        loss = torch.logsumexp(logits.sub_(own), dim=1)
        losses.append(loss)
        normalisers.append(loss + own[:, 0])
    return torch.cat(losses), torch.cat(normalisers), torch.cat(hits).float()


def _rows_backward(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    row_normalisers: Tensor,
    column_normalisers: Tensor,
    first_label: int,
    chunk: int,
    with_scale: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients, up to a factor, of the rows' features [B, D] and of the scale [] in both directions of the loss.

    With S the logits, the loss's gradient of S[i, j] is softmax over row i + softmax over column j - 2 [j is i's
    label]; the column's softmax needs only its normaliser, whichever rank worked it out.
    """
    grad_rows = torch.empty_like(rows)
    grad_scale = torch.zeros_like(scale) if with_scale else None
    for part in slices(len(rows), chunk):
        similarity = rows[part] @ columns.T
        logits = similarity * scale
        labels = torch.arange(part.start, part.stop, device=rows.device) + first_label
        grad = (logits - row_normalisers[part, None]).exp_()
        grad += logits.sub_(column_normalisers).exp_()
        grad.scatter_add_(1, labels[:, None], grad.new_full((len(labels), 1), -2.0))
        torch.mm(grad, columns, out=grad_rows[part])
        if with_scale:
            grad_scale += (grad * similarity).sum()
    return grad_rows, grad_scale
