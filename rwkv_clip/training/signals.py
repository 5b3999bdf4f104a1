"""Stopping on request: SIGTERM, SIGINT or SIGUSR1 to any one process, agreed on by all.

While the job starts, and in an evaluation, a signal ends what is being done by an exception: nothing is lost by it.
While it trains, a signal sets a flag. The flags of all ranks are combined once per optimizer step, so every rank stops
after the same step. A second SIGINT stops at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupted(BaseException):
    """Raised inside `StopRequest.interruptible` when a stop is requested. No `except Exception` may swallow it."""


class StopRequest:
    """Whether this process, or one that it heard of, was asked to stop; `reason` says by what."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.training_began = False
        """Set by the main thread when there is something to save from here on."""
        self._process = os.getpid()
        self._interruptible = False
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.reason is not None

    @property
    def exit_status(self) -> int:
        """Of a process that was asked to stop: 128 + the signal's number, as a shell reports it; without one SIGTERM's.

        Not 0, which schedulers and scripts take for a run that is complete.
        """
        name = (self.reason or "").partition(" ")[0]
        return 128 + next((number for number in SIGNALS if number.name == name), signal.SIGTERM)

    def install(self) -> None:
        """Take over the signals."""
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, _frame: object) -> None:
        if os.getpid() != self._process:  # a fork that has kept the handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name
        if self._interruptible:
            self._interruptible = False
            raise Interrupted

    def request(self, reason: str) -> None:
        """Ask to stop from another thread; ends an interruptible section of the main thread."""
        self.reason = self.reason or reason
        if self._interruptible and self._previous:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A section that a stop request ends at once, by `Interrupted`: long, local to this rank, and repeatable."""
        if self.requested:
            raise Interrupted
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False


class Agreement:
    """One small number per optimizer step: the largest of all ranks' numbers, known to every rank.

    `submit` starts the exchange and `result` gives the answer one step later, so that nobody waits for it: on a GPU it
    runs on a stream of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._distributed = dist.is_initialized() and dist.get_world_size() > 1
        self._own = torch.zeros(1, device=device)
        self._pending = False
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._event = torch.cuda.Event()
            self._answer = torch.zeros(1, pin_memory=True)
        else:
            self._work: dist.Work | None = None
            self._answer = self._own

    def submit(self, number: int) -> None:
        """Contribute this rank's number, 0 or more."""
        self._pending = True
        if self._device.type == "cuda":
            with torch.cuda.stream(self._stream):
                self._own.fill_(float(number))
                if self._distributed:
                    dist.all_reduce(self._own, op=dist.ReduceOp.MAX)
                self._answer.copy_(self._own, non_blocking=True)
                self._event.record()
        else:
            self._own.fill_(float(number))
            if self._distributed:
                self._work = dist.all_reduce(self._own, op=dist.ReduceOp.MAX, async_op=True)

    def result(self) -> int:
        """The largest number of the last `submit`; 0 when there was none since the last result."""
        if not self._pending:
            return 0
        self._pending = False
        if self._device.type == "cuda":
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._answer.item())

    def now(self, number: int) -> int:
        """Contribute a number and wait for the answer."""
        self.submit(number)
        return self.result()
