"""Features that go round the ranks from neighbour to neighbour, with their gradients behind them.

At hop k (0 to W - 1) rank r holds the features of rank r - k. While it works on them they are already on their way to
rank r + 1, together with the gradients that the features of hop k - 1 have collected so far. So every rank works at
every hop, holds the features of two ranks at most, and a last hop brings the gradients home.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from .gather import group_rank, group_size


class Ring:
    """One round, taken by iterating: each turn gives the rank that the present `features` come from.

    features: [B, D], of equal shape on every rank. group: the ranks (None: the default group, or one process). alone:
    no round, this rank's own features only. with_gradients: `add` must be called in each turn; afterwards `gradients`
    [B, D] holds the sum, over all ranks, of what they added for this rank's features.
    """

    def __init__(
        self, features: Tensor, group: dist.ProcessGroup | None, alone: bool = False, with_gradients: bool = True
    ) -> None:
        self._group = group
        self.size = 1 if alone else group_size(group)
        self.rank = 0 if alone else group_rank(group)
        self.features = features
        self.gradients: Tensor | None = None
        self._with_gradients = with_gradients
        self._added: Tensor | None = None

    def __iter__(self) -> Iterator[int]:
        # Each holds [features, gradients]: one is sent on while the other is filled.
        here, coming = (self.features.new_empty((2, *self.features.shape)) for _ in range(2))
        here[0] = self.features
        for hop in range(self.size):
            self.features = here[0]
            first = 0 if hop + 1 < self.size else 1  # by the last hop every rank has seen these features
            last = 2 if hop > 0 and self._with_gradients else 1
            messages = self._pass_on(here[first:last], coming[first:last])
            yield (self.rank - hop) % self.size
            for message in messages:
                message.wait()
            if self._with_gradients:
                coming[1] = self._added if hop == 0 else coming[1] + self._added
            here, coming = coming, here
        if self._with_gradients:
            for message in self._pass_on(here[1:], coming[1:]):
                message.wait()
            self.gradients = coming[1] if self.size > 1 else here[1]

    def add(self, gradient: Tensor) -> None:
        """This rank's gradient [B, D] of the present features."""
        self._added = gradient

    def _pass_on(self, outgoing: Tensor, incoming: Tensor) -> list[dist.Work]:
        if self.size == 1 or not len(outgoing):
            return []
        neighbours = ((self.rank + 1) % self.size, (self.rank - 1) % self.size)
        if self._group is not None:
            neighbours = tuple(dist.get_global_rank(self._group, rank) for rank in neighbours)
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, neighbours[0], self._group),
                dist.P2POp(dist.irecv, incoming, neighbours[1], self._group),
            ]
        )
