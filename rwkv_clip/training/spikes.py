"""Loss spikes: steps whose loss stands out from those before it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

WINDOW = 128
"""Steps that a loss is compared with."""
FEWEST = 32
"""Steps to have seen before any can stand out."""
DEVIATIONS = 6.0
RELATIVE = 0.05


class LossSpikes:
    """Marks a step whose loss exceeds the median of the last WINDOW steps by more than DEVIATIONS deviations.

    A deviation is 1.4826 x the median distance from the median (the standard deviation, if losses were normal); unlike
    a mean, neither median follows the spikes themselves. The excess must also be RELATIVE of the median, as in a quiet
    stretch the deviation may be next to nothing. A level that lasts becomes the new median after half a window. Losses
    that are not finite belong to the skipped steps and are passed over.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {"count": 0, "losses": []}
        self.count: int = state["count"]
        """Steps marked so far."""
        self._losses: deque[float] = deque(state["losses"], maxlen=WINDOW)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON; give it to the next run's `LossSpikes`."""
        return {"count": self.count, "losses": list(self._losses)}

    def add(self, loss: float) -> str | None:
        """Take one step's loss in; for a spike, what is said about it."""
        if not math.isfinite(loss):
            return None
        found = None
        if len(self._losses) >= FEWEST:
            median = statistics.median(self._losses)
            deviation = 1.4826 * statistics.median(abs(other - median) for other in self._losses)
            if loss - median > max(DEVIATIONS * deviation, RELATIVE * abs(median)):
                self.count += 1
                found = f"{loss:.4f}, where the last {len(self._losses)} steps have a median of {median:.4f}"
        self._losses.append(loss)
        return found
