"""Learning-rate schedules by optimizer step, as factors for torch's LambdaLR."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import UserError

SCHEDULES = ("cosine", "linear", "step", "constant")


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Optimizer steps of warm-up: a number below 1 is a share of the run, otherwise a count of steps."""
    if warmup < 0:
        raise UserError(f"the warm-up must be a share of the run below 1 or a number of steps, found {warmup}")
    return round(warmup * total_steps) if warmup < 1 else int(warmup)


def lr_lambda(
    name: str,
    total_steps: int,
    warmup_steps: int,
    minimum: float = 0.0,
    milestones: Sequence[float] = (0.5, 0.75),
    gamma: float = 0.1,
) -> Callable[[int], float]:
    """The factor on the peak rate at each optimizer step, counted from 0.

    It rises in equal steps to 1 at step `warmup_steps` - 1 (or is 1 at step 0 without a warm-up), then
    - cosine, linear: falls to `minimum` at the run's last step, `total_steps` - 1,
    - step: is multiplied by `gamma` at each of `milestones`, given as shares of the run,
    - constant: stays 1.
    Beyond the last step it keeps the last value, so the scheduler may be advanced after it.
    """
    if name not in SCHEDULES:
        raise UserError(f"unknown learning-rate schedule '{name}': choose one of {', '.join(SCHEDULES)}")
    if total_steps < 1:
        raise UserError(f"a run needs at least one optimizer step, found {total_steps}")
    if not 0 <= warmup_steps <= total_steps:
        raise UserError(
            f"a warm-up of {warmup_steps} steps does not fit a run of {total_steps}: lower --warmup or train longer"
        )
    if not 0 <= minimum <= 1:
        raise UserError(f"the schedule's minimum is a share of the peak rate, from 0 to 1, found {minimum}")
    peak = max(warmup_steps - 1, 0)
    last = total_steps - 1

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if name == "constant":
            return 1.0
        if name == "step":
            return gamma ** sum(min(step, last) >= round(share * total_steps) for share in milestones)
        progress = min((step - peak) / max(last - peak, 1), 1.0)
        fall = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
        return minimum + (1 - minimum) * fall

    return factor
