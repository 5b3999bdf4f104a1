"""Scores while training: the loss on held-out pairs, and zero-shot and retrieval scores of a prepared folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..data.loader import Loader
from .distributed import World
from .engine import set_training_mode
from .gather import gather_ranks, group_rank
from .signals import Agreement, Interrupted, StopRequest


class Evaluator:
    """Runs the evaluations of a run; all ranks call it after the same step.

    loader: held-out pairs, or None. score: model -> (values by name, picture or None), or None; it runs on rank 0 while
    the others wait, so that a stop request can end it anywhere.

    `picture` holds the last picture, uint8 [H, W, 3], on rank 0.
    """

    def __init__(
        self,
        world: World,
        loader: Loader | None,
        score: Callable[[Any], tuple[dict[str, float], np.ndarray | None]] | None,
        stop: StopRequest,
    ) -> None:
        self._world = world
        self._loader = loader
        self._score = score
        self._stop = stop
        self._agreement = Agreement(world.device)
        self._rounds = 0
        self.picture: np.ndarray | None = None

    @property
    def has_work(self) -> bool:
        return self._loader is not None or self._score is not None

    def run(self, model: Any) -> dict[str, float] | None:
        """Values by name (on rank 0; {} elsewhere), or None on all ranks when a stop request cut it short."""
        model.eval()
        try:
            with torch.no_grad():
                values = {} if self._loader is None else self._validation_loss(model)
                if values is not None and self._score is not None:
                    scores = self._scores(model)
                    values = None if scores is None else values | scores
        finally:
            set_training_mode(model)
        return values

    def _validation_loss(self, model: Any) -> dict[str, float] | None:
        """Contrastive loss over batches of micro batch x ranks, the padding of the last one left out."""
        sums = torch.zeros(4, device=self._world.device)
        for batch in self._loader.epoch(0):
            image_features, text_features, *scalars = model(batch.images, batch.tokens)
            sums += batch_sums(image_features, text_features, batch.valid.to(image_features.device), *scalars)
            if self._agreement.now(self._stop.requested):
                return None
        if self._world.world_size > 1:
            dist.all_reduce(sums)
        loss, image_hits, text_hits, count = sums.tolist()
        return {
            "validation/loss": loss / count,
            "validation/image_to_text_accuracy": image_hits / count,
            "validation/text_to_image_accuracy": text_hits / count,
        }

    def _scores(self, model: Any) -> dict[str, float] | None:
        self._rounds += 1
        key = f"evaluated/{self._rounds}"
        scores: dict[str, float] | None = {}
        if self._world.is_first:
            try:
                with self._stop.interruptible():
                    scores, self.picture = self._score(model)
            except Interrupted:
                scores = None
            if self._world.store is not None:
                self._world.store.set(key, "done")
        else:
            # Not a collective: it would time out, and a signal to this rank would wait for its end.
            while not self._world.store.check([key]):
                time.sleep(0.2)
        return None if self._agreement.now(scores is None) else scores


def batch_sums(image: Tensor, text: Tensor, valid: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sums over this rank's valid pairs of the loss and both hits, and their number: float32 [4].

    image, text: [B, D], normalised. valid: bool [B]. Candidates are the valid pairs of all ranks. With a bias the loss
    is the sigmoid loss, otherwise CLIP's.
    """
    everyone = gather_ranks(valid.float(), None).flatten() > 0
    first = group_rank(None) * len(valid)
    labels = (torch.cumsum(everyone, 0) - 1)[first : first + len(valid)][valid]
    parts = []
    for rows, columns in ((image, text), (text, image)):
        candidates = gather_ranks(columns.float(), None).flatten(0, 1)[everyone]
        logits = scale.float() * rows.float()[valid] @ candidates.T
        hits = (logits.argmax(1) == labels).sum() if len(labels) else logits.sum()
        if bias is not None:
            logits += bias.float()
            logits[torch.arange(len(labels), device=labels.device), labels] *= -1
            loss = F.softplus(logits).sum()
        else:
            loss = F.cross_entropy(logits, labels, reduction="sum") if len(labels) else logits.sum()
        parts.append((loss, hits))
    (image_loss, image_hits), (text_loss, text_hits) = parts
    return torch.stack([(image_loss + text_loss) / 2, image_hits.float(), text_hits.float(), valid.sum().float()])
