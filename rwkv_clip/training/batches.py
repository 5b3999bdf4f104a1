"""The micro batches of a step, and how long the device stood idle for want of them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from ..data.loader import Batch, Loader


class IdleClock:
    """Measures waiting during which a device has nothing to do. On a GPU nothing waits for the clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the waiting. What the host launches inside it, such as copies of a batch, counts as well."""
        if not self._is_cuda:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        # The device reaches the first event when older work is done, the second one when it may go on.
        done, resumed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        done.record()
        yield
        resumed.record()
        self._pending.append((done, resumed))

    def seconds(self) -> float:
        """Idle time of all waiting that the device has passed by now and that was not told before."""
        while self._pending and self._pending[0][1].query():
            done, resumed = self._pending.popleft()
            self._seconds += done.elapsed_time(resumed) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class MicroBatches(Sequence[Batch]):
    """The micro batches of the next step, each taken when it is asked for, and the loader fed before each.

    So the device computes on one while the next is made ready.
    """

    def __init__(self, loader: Loader, batches: Iterator[Batch], idle: IdleClock) -> None:
        self._loader = loader
        self._batches = batches
        self._idle = idle
        self._taken: list[Batch] = []

    def __len__(self) -> int:
        return self._loader.accumulation_steps

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        while len(self._taken) <= number:
            self._loader.work_ahead()
            with self._idle.waiting():
                self._taken.append(next(self._batches))
        return self._taken[number]
