"""Steps that were left out because a gradient was NaN or Inf: how many in a row, and where the row began."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .distributed import CommonError


class LeftOutSteps:
    """Counts them, also across a resume.

    Weights do not change in a row of such steps, so whatever is behind it was there at its first one: that one is
    remembered with its records.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {"in_row": 0, "last_step": 0, "epoch": 0, "first_records": []}
        self.in_row: int = state["in_row"]
        """Length of the last row, which may be over."""
        self.epoch: int = state["epoch"]
        """Of the row's first step, counted from 1 as in the log."""
        self.first_records: list[int] = state["first_records"]
        """Ids of the first records of that step's batch on rank 0."""
        self._last_step: int = state["last_step"]
        self._steps: set[int] = set()

    @property
    def first_step(self) -> int:
        """Of the last row."""
        return self._last_step - self.in_row + 1

    def __contains__(self, step: int) -> bool:
        """Whether a step was left out, of those since a resume and the one that it went on from."""
        return step in self._steps or (self.in_row > 0 and step == self._last_step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON; give it to the next run's `LeftOutSteps`."""
        return {
            "in_row": self.in_row,
            "last_step": self._last_step,
            "epoch": self.epoch,
            "first_records": self.first_records,
        }

    def add(self, step: int, epoch: int, first_records: list[int]) -> None:
        """A step that was left out. epoch: counted from 1."""
        if self.in_row and step == self._last_step + 1:
            self.in_row += 1
        else:
            self.in_row, self.epoch, self.first_records = 1, epoch, first_records
        self._last_step = step
        self._steps.add(step)


def share_left_out(count: int, steps: int) -> str | None:
    """What is said at the end of a run of which `count` steps were left out; None if none was."""
    if not count:
        return None
    return (
        f"{count:,} of the run's {steps:,} steps ({100 * count / steps:.3g} %) were left out, as a gradient was NaN or "
        "Inf: the weights have learned nothing from their records; lower --lr if they are many"
    )


@contextlib.contextmanager
def scale_errors(step: int) -> Iterator[None]:
    """Around a step: DeepSpeed's exception when fp16's loss scale can become no smaller, as one line of every rank.

    Steps are left out while the scale is halved; the exception says that no scale helps.
    """
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise CommonError(
            f"step {step}: gradients or the loss are beyond fp16 at the smallest loss scale, so that no step can be "
            "applied any more: train in bf16 (ds_configs/zero1_bf16.json), or from an earlier save with a lower --lr "
            "or a longer --warmup"
        ) from error
