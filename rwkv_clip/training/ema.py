"""An exponential moving average (EMA) of the weights, kept where their fp32 masters are.

Under ZeRO each rank averages its own part of the masters, so the average costs 4 bytes per parameter divided by the
ranks, and one pass over them per step. Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by
Averaging" (1992); the rate's warm-up is that of TensorFlow's `ExponentialMovingAverage(num_updates=...)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UserError
from ..model import averaged
from .masters import MasterPart, is_spread, master_parts
from .partitioned import whole_shape, whole_weights
from .weights import whole_weight

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, after each optimizer step that was applied.

    In the first steps the decay is (1 + n) / (10 + n) for the n-th update where that is less, so that a short run's
    average is not its start. It begins at the engine's weights. Frozen weights are not averaged.
    """

    def __init__(self, engine: DeepSpeedEngine, decay: float) -> None:
        if not 0 < decay < 1:
            raise UserError(f"the decay of averaged weights must lie between 0 and 1, found {decay}")
        self._engine = engine
        self._decay = decay
        self._parts = master_parts(engine)
        owners = {id(part.owner): part.owner for part in self._parts.values()}
        self._owners = list(owners.values())
        self._averages = [owner.detach().clone() for owner in self._owners]
        self._average_of = dict(zip(owners, self._averages, strict=True))
        self.updates = 0
        """Steps averaged so far."""

    @torch.no_grad()
    def update(self) -> None:
        """Take the masters of this step in. No collective, and nothing waits for the device."""
        self.updates += 1
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._averages, self._owners, 1 - decay)

    def value(self, part: MasterPart) -> Tensor:
        """The average of one part of the masters, fp32 [count], sharing memory with this object."""
        return part.view(self._average_of[id(part.owner)])

    @contextlib.contextmanager
    def in_the_model(self) -> Iterator[None]:
        """The module computes with the averaged weights inside, and with its own, to the bit, afterwards.

        Every rank must enter it. It holds a copy of the module's weights meanwhile.
        """
        module = self._engine.module
        learned = {name: p for name, p in module.named_parameters() if p.requires_grad}
        buffers = {name: buffer for name, (_, buffer) in module.precise_parameters().items() if name in learned}
        with whole_weights(self._engine):
            kept = [tensor.detach().clone() for tensor in (*learned.values(), *buffers.values())]
            try:
                with torch.no_grad():
                    for name, whole in self.whole():
                        learned[name].data.copy_(whole)  # unseen by DeepSpeed's sanity checks
                        if name in buffers:
                            buffers[name].copy_(whole.view_as(buffers[name]))
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in zip((*learned.values(), *buffers.values()), kept, strict=True):
                        tensor.data.copy_(value)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """(name, average) of each learned parameter, fp32 and whole, on every rank, which must all call it.

        A master that is the module's own weight (fp32 without ZeRO) may be overwritten while this runs.
        """
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                part = self._parts.get(name)
                yield name, whole_weight(self._engine, parameter, part, None if part is None else self.value(part))

    def shard(self) -> dict[str, Any] | None:
        """What this rank's file in a checkpoint holds (model/averaged.py), copied to the CPU.

        None where every rank holds the same and another one writes it.
        """
        if not any(is_spread(part.parameter) for part in self._parts.values()) and self._engine.global_rank != 0:
            return None
        # One copy for each of the optimizer's few tensors, which a file holds once, however many parts look into it.
        copies = {owner: average.to("cpu", copy=True) for owner, average in self._average_of.items()}
        parts = {
            name: {
                "shape": list(whole_shape(part.parameter)),
                "start": part.start,
                "values": part.view(copies[id(part.owner)]),
            }
            for name, part in self._parts.items()
        }
        return {"updates": self.updates, "parts": parts}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take this rank's parts out of a checkpoint folder, saved by any number of ranks; `UserError` if it cannot."""
        missing = {name: part.count for name, part in self._parts.items()}
        for content in averaged.shards(folder):
            self.updates = content["updates"]
            for name, saved in content["parts"].items():
                if name in self._parts:
                    missing[name] -= _copy_overlap(self._parts[name], self.value(self._parts[name]), saved)
        short = [name for name, count in missing.items() if count]
        if short:
            raise UserError(
                f"{folder} lacks averaged weights ('{short[0]}'), which --ema-decay needs: use another checkpoint"
            )


def _copy_overlap(part: MasterPart, value: Tensor, saved: dict[str, Any]) -> int:
    """Copy the elements that both a saved part and `value` (of `part`) cover; their number."""
    start = max(part.start, saved["start"])
    stop = min(part.start + part.count, saved["start"] + len(saved["values"]))
    if start >= stop:
        return 0
    value[start - part.start : stop - part.start] = saved["values"][start - saved["start"] : stop - saved["start"]]
    return stop - start
