"""Lines that tell how a long piece of work gets on; silent when it is short."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Log = Callable[[str], None]


class Progress:
    """Counts finished items and logs `label: 1,200,000 of 15,000,000 records (400,000/s, 35 s left)` now and then.

    Args:
        label: what is being done.
        total: how many items there are.
        unit: what an item is called, in the plural.
        log: takes a line; None logs nothing.
        every: seconds between lines; nothing is said before the first such interval has passed.
    """

    def __init__(self, label: str, total: int, unit: str = "records", log: Log | None = None, every: float = 5.0):
        self.label, self.total, self.unit, self.log, self.every = label, total, unit, log, every
        self.done = 0
        self._start = self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int = 1) -> None:
        """`count` more items are finished; may be called from any thread."""
        with self._lock:
            self.done += count
            now = time.monotonic()
            if self.log is None or now - self._last < self.every:
                return
            self._last = now
            rate = self.done / (now - self._start)
            left = (self.total - self.done) / rate if rate else 0.0
        self.log(
            f"{self.label}: {self.done:,} of {self.total:,} {self.unit} ({rate:,.0f}/s, {max(left, 0):,.0f} s left)"
        )
