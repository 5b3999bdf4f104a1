"""A trace of some steps of the run, for TensorBoard or Perfetto."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from .log import logger


def step_range(text: str) -> tuple[int, int]:
    """START:STOP of --profile as numbers: the steps START to STOP - 1 are traced; for argparse."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and 0 < int(start) < int(stop)):
        raise argparse.ArgumentTypeError(
            f"expected START:STOP, two step numbers with 1 <= START < STOP, found '{text}'"
        )
    return int(start), int(stop)


class StepProfiler:
    """Traces the steps first to last - 1 of rank 0, counted as in the log, into one file.

    folder: gets NAME.pt.trace.json, which TensorBoard's profiler plugin, https://ui.perfetto.dev and chrome://tracing
    open. None traces nothing.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None, device: torch.device) -> None:
        self._steps = steps if folder is not None else None
        self._folder = folder
        self._device = device
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Call it before each step."""
        if self._steps is None or step != self._steps[0]:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._wait()
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def after(self, step: int) -> None:
        """Call it after each step."""
        if self._profiler is not None and step == self._steps[1] - 1:
            self.close()

    def close(self) -> None:
        """Write what was traced, also when the run ends before the last step of the range."""
        if self._profiler is None:
            return
        self._wait()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        first, end = self._steps
        path = self._folder / f"steps_{first}_to_{end - 1}.pt.trace.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name("." + path.name)
        profiler.export_chrome_trace(str(temporary))
        os.replace(temporary, path)
        logger.info("profile: %s (open it in TensorBoard or https://ui.perfetto.dev)", path)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
