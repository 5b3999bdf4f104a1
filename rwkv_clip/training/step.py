"""One optimizer step of a DeepSpeed engine, with or without gradient accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..errors import UserError
from .loss import LossOutput
from .masters import sync_precise

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

ACCUMULATIONS = ("global", "micro")


class MicroBatch(Protocol):
    """What a step needs of a batch: images [B, 3, S, S] and tokens [B, T] on the engine's device."""

    images: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gives. Tensors are fp32, without gradient, on the device: reading one waits for it."""

    loss: Tensor
    """[] mean over the ranks (and, with plain accumulation, over the micro batches)."""
    image_to_text_accuracy: Tensor
    """[] 0 to 1, of the global batch."""
    text_to_image_accuracy: Tensor
    """[] 0 to 1, of the global batch."""
    row_losses: Tensor
    """[pairs of this rank] mean of the two cross-entropies of each pair, in the order of the micro batches."""
    logit_scale: Tensor
    """[] the factor on the cosine similarities that this step used."""
    applied: bool
    """False when the step was skipped because a gradient was not finite."""


def train_step(
    engine: DeepSpeedEngine, batches: Sequence[MicroBatch], loss_fn, accumulation: str = "global"
) -> StepResult:
    """One optimizer step over the micro batches of one global batch, as many as the engine accumulates.

    loss_fn: (image_features, text_features, logit_scale) -> LossOutput.
    accumulation, when there is more than one micro batch: "global" gives the gradient of the whole global batch, with
    all its pairs as negatives (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    2021): features are computed once without gradient, then micro batch by micro batch again with the same random
    state. "micro" takes each micro batch's own loss and averages.
    """
    if accumulation not in ACCUMULATIONS:
        raise UserError(f"unknown accumulation '{accumulation}': choose 'global' or 'micro'")
    if len(batches) != engine.gradient_accumulation_steps():
        raise ValueError(
            f"the engine accumulates {engine.gradient_accumulation_steps()} micro batches, got {len(batches)}"
        )
    if len(batches) > 1 and accumulation == "global":
        outputs, logit_scale = _whole_batch(engine, batches, loss_fn)
    else:
        outputs, logit_scale = _each_batch(engine, batches, loss_fn)
    applied = engine.was_step_applied()
    sync_precise(engine)
    means = torch.stack(
        [
            torch.stack([output.mean_loss, output.image_to_text_accuracy, output.text_to_image_accuracy])
            for output in outputs
        ]
    ).mean(dim=0)
    rows = torch.cat([(output.image_to_text_losses + output.text_to_image_losses) / 2 for output in outputs])
    return StepResult(means[0], means[1], means[2], rows, logit_scale, applied)


def _each_batch(engine, batches, loss_fn) -> tuple[list[LossOutput], Tensor]:
    outputs = []
    for batch in batches:
        image_features, text_features, logit_scale = engine(batch.images, batch.tokens)
        output = loss_fn(image_features, text_features, logit_scale)
        engine.backward(output.loss)
        engine.step()
        outputs.append(output)
    return outputs, logit_scale.detach().float().reshape(())


def _whole_batch(engine, batches, loss_fn) -> tuple[list[LossOutput], Tensor]:
    random_states, features = [], []
    with torch.no_grad():
        for batch in batches:
            random_states.append(RandomState.capture(batch.images.device))
            features.append(engine(batch.images, batch.tokens))
    random_after = RandomState.capture(batches[-1].images.device)

    image_features = torch.cat([image for image, _, _ in features]).requires_grad_()
    text_features = torch.cat([text for _, text, _ in features]).requires_grad_()
    logit_scale = features[-1][2].detach().clone().requires_grad_()
    output = loss_fn(image_features, text_features, logit_scale)
    grad_image, grad_text, grad_scale = torch.autograd.grad(output.loss, [image_features, text_features, logit_scale])

    sizes = [len(image) for image, _, _ in features]
    del features
    pieces = zip(batches, random_states, grad_image.split(sizes), grad_text.split(sizes), strict=True)
    for batch, random_state, image_part, text_part in pieces:
        random_state.restore()
        image, text, scale = engine(batch.images, batch.tokens)
        # Its gradient of the weights is the loss's, by the chain rule; each micro batch carries an equal share of the
        # temperature's.
        surrogate = (image * image_part).sum() + (text * text_part).sum() + (scale * grad_scale).sum() / len(batches)
        engine.backward(surrogate, scale_wrt_gas=False)
        engine.step()
    random_after.restore()
    return [output], logit_scale.detach().float().reshape(())


@dataclass(frozen=True)
class RandomState:
    """The states that a forward pass draws from: torch's on the CPU and the device, DeepSpeed's for checkpointing."""

    device: torch.device
    cpu: Tensor
    cuda: Tensor | None
    tracked: dict[str, Tensor]

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), cuda, get_cuda_rng_tracker().get_states())

    def restore(self) -> None:
        from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        get_cuda_rng_tracker().set_states(dict(self.tracked))  # a copy: it changes the one it is given
