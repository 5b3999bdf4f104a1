"""What the device has done so far, asked without waiting for work that was launched later."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def on_the_way(numbers: Tensor) -> Callable[[], list[float]]:
    """Starts the way of numbers [n] to the host; what it returns waits for their arrival, not for later work."""
    if numbers.device.type == "cpu":
        return numbers.tolist
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return there.tolist()

    return read


def idle_check(device: torch.device) -> Callable[[], bool]:
    """Later tells whether the device is through with all that was launched by now; a CPU always is."""
    if device.type == "cpu":
        return lambda: True
    reached = torch.cuda.Event()
    reached.record()
    return reached.query
