"""One optimizer step of a DeepSpeed engine, with or without gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..errors import UserError
from .lean_zero import pending_norm
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
    """[pairs of this rank] mean of each pair's losses in both directions, in the order of the micro batches."""
    logit_scale: Tensor
    """[] the factor on the cosine similarities that this step used."""
    outcome: Outcome
    logit_bias: Tensor | None = None
    """[] the bias on the logits that this step used, of a model that has one."""
    gradient_norm: Tensor | float | None = None
    """[] before clipping, of all ranks, inf if it is not finite; None where the engine takes none."""

    @property
    def applied(self) -> bool:
        """False when the step was left out because a gradient was not finite. It waits for the end of the step."""
        return self.outcome.applied


class Outcome:
    """Whether an engine's last step was applied; ask for it before the next one."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._norm = pending_norm(engine.optimizer)

    @property
    def is_pending(self) -> bool:
        """Whether the device alone knew it when the step was launched. DeepSpeed takes it as applied then."""
        return self._norm is not None

    @cached_property
    def applied(self) -> bool:
        """It waits for the end of the step, where it is pending, and has the engine count a step that was left out."""
        if not self.is_pending:
            return self._engine.was_step_applied()
        applied = math.isfinite(self._norm()[0])
        self._engine.skipped_steps += not applied
        return applied


def train_step(
    engine: DeepSpeedEngine,
    batches: Sequence[MicroBatch],
    loss_fn,
    accumulation: str = "global",
    meanwhile: Callable[[], None] = lambda: None,
) -> StepResult:
    """One optimizer step over the micro batches of one global batch, as many as the engine accumulates.

    batches: one is asked for when the passes of the one before it are launched.
    loss_fn: (image_features, text_features, logit_scale, and logit_bias of a model that has one) -> LossOutput.
    accumulation, when there is more than one micro batch: "global" gives the gradient of the whole global batch, with
    all its pairs as negatives (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    2021): features are computed once without gradient, then micro batch by micro batch again with the same random
    state. "micro" takes each micro batch's own loss and averages.
    meanwhile: called when all passes are launched. Where the engine's step waits until the device is done with them,
    Python's time costs none until then; from there to the next forward pass the device waits for Python.
    """
    if accumulation not in ACCUMULATIONS:
        raise UserError(f"unknown accumulation '{accumulation}': choose 'global' or 'micro'")
    if len(batches) != engine.gradient_accumulation_steps():
        raise ValueError(
            f"the engine accumulates {engine.gradient_accumulation_steps()} micro batches, got {len(batches)}"
        )
    passes = _whole_batch if len(batches) > 1 and accumulation == "global" else _each_batch
    outputs, scalars = passes(engine, batches, loss_fn)
    loss, image_to_text, text_to_image = (
        torch.stack([getattr(output, name) for output in outputs]).mean(dim=0)
        for name in ("mean_loss", "image_to_text_accuracy", "text_to_image_accuracy")
    )
    rows = torch.cat([(output.image_to_text_losses + output.text_to_image_losses) / 2 for output in outputs])
    bias = scalars[1] if len(scalars) > 1 else None
    del outputs  # and with them the thousands of nodes of the losses' graphs
    meanwhile()
    engine.step()
    sync_precise(engine)
    norm = engine.get_global_grad_norm()
    return StepResult(loss, image_to_text, text_to_image, rows, scalars[0], Outcome(engine), bias, norm)


def _numbers(scalars: Sequence[Tensor]) -> list[Tensor]:
    return [scalar.detach().float().reshape(()) for scalar in scalars]


def _each_batch(engine, batches, loss_fn) -> tuple[list[LossOutput], list[Tensor]]:
    """The passes of all micro batches, and the engine's step of all but the last."""
    outputs = []
    for batch in batches:
        if outputs:
            engine.step()
        image_features, text_features, *scalars = engine(batch.images, batch.tokens)
        output = loss_fn(image_features, text_features, *scalars)
        engine.backward(output.loss)
        outputs.append(output)
    return outputs, _numbers(scalars)


def _whole_batch(engine, batches, loss_fn) -> tuple[list[LossOutput], list[Tensor]]:
    """As `_each_batch`, with the gradient of the whole global batch."""
    random_states, features = [], []
    with torch.no_grad():
        for batch in batches:
            random_states.append(RandomState.capture(batch.images.device))
            features.append(engine(batch.images, batch.tokens))
    random_after = RandomState.capture(batches[0].images.device)

    image_features = torch.cat([image for image, *_ in features]).requires_grad_()
    text_features = torch.cat([text for _, text, *_ in features]).requires_grad_()
    scalars = [scalar.detach().clone().requires_grad_() for scalar in features[-1][2:]]
    output = loss_fn(image_features, text_features, *scalars)
    grad_image, grad_text, *grad_scalars = torch.autograd.grad(output.loss, [image_features, text_features, *scalars])

    sizes = [len(image) for image, *_ in features]
    del features
    pieces = zip(batches, random_states, grad_image.split(sizes), grad_text.split(sizes), strict=True)
    for number, (batch, random_state, image_part, text_part) in enumerate(pieces):
        if number:
            engine.step()
        random_state.restore()
        image, text, *own_scalars = engine(batch.images, batch.tokens)
        # Its gradient of the weights is the loss's, by the chain rule; each micro batch carries an equal share of the
        # temperature's and the bias's.
        surrogate = (image * image_part).sum() + (text * text_part).sum()
        for scalar, gradient in zip(own_scalars, grad_scalars, strict=True):
            surrogate = surrogate + (scalar * gradient).sum() / len(batches)
        engine.backward(surrogate, scale_wrt_gas=False)
    random_after.restore()
    return [output], _numbers(scalars)


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
