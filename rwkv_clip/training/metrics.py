"""Metrics: kept on the device between two log lines, then written to `metrics.jsonl` and TensorBoard.

Every optimizer step has its own values; x is always the number of optimizer steps done. Speed, memory and the like
belong to the interval between two lines and stand at its last step.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from .readback import on_the_way
from .step import StepResult


class MetricWriter:
    """Writes values by step, on rank 0 only.

    jsonl: file that gets one JSON object per step, with "step" and the values.
    tensorboard: folder of the event files; None for none.
    after_step: the step that the run goes on from; what an earlier attempt wrote beyond it is dropped.
    others: called with [(tag, value, step)], for DeepSpeed's other monitors.
    """

    def __init__(
        self,
        jsonl: Path,
        tensorboard: Path | None,
        after_step: int = 0,
        others: Callable[[list[tuple[str, float, int]]], Any] | None = None,
    ) -> None:
        self._path = jsonl
        self._others = others
        self._tensorboard = None
        with self._writing():
            self._evaluated = drop_after(jsonl, after_step)
            self._jsonl = open(jsonl, "a", encoding="utf-8")
            if tensorboard is not None:
                from torch.utils.tensorboard import SummaryWriter

                goes_on = tensorboard.is_dir() and any(tensorboard.iterdir())
                self._tensorboard = SummaryWriter(str(tensorboard), purge_step=after_step + 1 if goes_on else None)
                threading.excepthook = _leave_out_tensorboard(threading.excepthook)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self._path
            raise UserError(
                f"cannot write the metrics to {where}: {error.strerror or error}; make room, or make it writable, then "
                "go on with --resume auto"
            ) from error

    def evaluated(self, step: int) -> bool:
        """Whether an earlier attempt wrote evaluation results of a step."""
        return step in self._evaluated

    def write(self, step: int, values: dict[str, float]) -> None:
        """Values of one step by name; names may group with "/"."""
        # JSON knows no NaN; null keeps the line readable everywhere.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._writing():
            self._jsonl.write(json.dumps({"step": step, **finite}) + "\n")
            if self._tensorboard is not None:
                for name, value in values.items():
                    self._tensorboard.add_scalar(name, value, step)
            if self._others is not None:
                self._others([(name, value, step) for name, value in values.items()])

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        """A picture, uint8 [H, W, 3]."""
        if self._tensorboard is not None:
            with self._writing():
                self._tensorboard.add_image(name, pixels, step, dataformats="HWC")

    def flush(self) -> None:
        with self._writing():
            self._jsonl.flush()
            if self._tensorboard is not None:
                self._tensorboard.flush()

    def close(self) -> None:
        with self._writing():
            self._jsonl.close()
            if self._tensorboard is not None:
                self._tensorboard.close()


def _leave_out_tensorboard(hook: Callable) -> Callable:
    """A `threading.excepthook` without the traceback of TensorBoard's thread, whose errors its writer raises again."""

    def show(args: Any) -> None:
        if not type(args.thread).__module__.startswith("tensorboard.") or not isinstance(args.exc_value, OSError):
            hook(args)

    return show


def drop_after(jsonl: Path, step: int) -> set[int]:
    """Remove lines of later steps, and a last line that was cut short, from a metrics file that exists.

    Returns the steps that have a line of evaluation results, which has no loss.
    """
    if not jsonl.exists():
        return set()
    kept, evaluated = [], set()
    with open(jsonl, encoding="utf-8") as file:
        for line in file:
            try:
                values = json.loads(line)
                if values["step"] <= step:
                    kept.append(line)
                    if "loss" not in values:
                        evaluated.add(values["step"])
            except (ValueError, KeyError, TypeError):
                continue
    temporary = jsonl.with_name(jsonl.name + ".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(jsonl)
    return evaluated


class Interval:
    """Collects steps until the next log line, without waiting for the device."""

    def __init__(self, device: torch.device, samples_per_step: int, world_size: int, captions: Sequence[str]) -> None:
        self._device = device
        self._samples_per_step = samples_per_step
        self._world_size = world_size
        self._captions = list(captions) if len(captions) > 1 else []
        self._reset()

    def _reset(self) -> None:
        self._steps: list[tuple[int, dict[str, Tensor | float]]] = []
        self._caption_sums = torch.zeros(2, len(self._captions), device=self._device)
        self._wait = 0.0
        self._paused = 0.0
        self._started = time.perf_counter()

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def pause(self, seconds: float) -> None:
        """Leave out time that was spent on a save or an evaluation."""
        self._paused += seconds

    def add(
        self,
        step: int,
        result: StepResult,
        rates: dict[str, float],
        wait: float,
        caption_index: Tensor,
    ) -> None:
        """One optimizer step.

        rates: learning rates by name. wait: seconds spent waiting for the batch.
        caption_index: int64 [pairs of this rank], which caption each pair used.
        """
        values = {
            "loss": result.loss,
            "image_to_text_accuracy": result.image_to_text_accuracy,
            "text_to_image_accuracy": result.text_to_image_accuracy,
            "logit_scale": result.logit_scale,
            "logit_bias": result.logit_bias,
            "gradient_norm": result.gradient_norm,
        }
        # CLIP's loss has no bias, and without ZeRO in fp32 DeepSpeed gives no norm.
        self._steps.append((step, {name: value for name, value in values.items() if value is not None} | rates))
        self._wait += wait
        if self._captions:
            ones = torch.ones_like(result.row_losses)
            self._caption_sums.index_add_(1, caption_index, torch.stack([result.row_losses.nan_to_num(), ones]))

    def close(self) -> ClosedInterval:
        """The steps so far, to be read whenever the device has come so far; the next interval begins.

        All ranks must call it together. Nothing waits for the device.
        """
        seconds = max(time.perf_counter() - self._started - self._paused, 1e-9)
        worst = torch.tensor([self._wait / seconds, peak_memory_gib(self._device)])
        if self._world_size > 1:
            worst = (worst.pin_memory() if self._device.type == "cuda" else worst).to(self._device, non_blocking=True)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if self._captions:
                dist.all_reduce(self._caption_sums)
        values = [value for _, row in self._steps for value in row.values() if isinstance(value, Tensor)]
        # An offloaded optimizer's gradient norm is on the host.
        one_by_one = [value.to(self._device, torch.float32, non_blocking=True).reshape(()) for value in values]
        numbers = torch.cat([torch.stack(one_by_one), self._caption_sums.view(-1)])
        speed = len(self._steps) * self._samples_per_step / seconds
        summary = {
            "samples_per_second": speed,
            "samples_per_second_per_gpu": speed / self._world_size,
            "step_seconds": seconds / len(self._steps),
        }
        closed = ClosedInterval(self._steps, summary, self._captions, on_the_way(numbers), on_the_way(worst))
        self._reset()
        return closed


@dataclass(frozen=True)
class ClosedInterval:
    """Steps between two log lines whose values may still be computed."""

    _steps: list[tuple[int, dict[str, Tensor | float]]]
    _summary: dict[str, float]
    _captions: list[str]
    _numbers: Callable[[], list[float]]
    """All tensors of the steps in order, then the sums of losses by caption, then their counts."""
    _worst: Callable[[], list[float]]
    """Share of waiting and GiB of memory, of the rank with most."""

    def read(self) -> tuple[list[tuple[int, dict[str, float]]], dict[str, float]]:
        """Values of each step, and of the interval. This waits for the device, if it is not beyond the last step."""
        numbers = iter(self._numbers())
        rows = [
            (step, {name: next(numbers) if isinstance(value, Tensor) else value for name, value in row.items()})
            for step, row in self._steps
        ]
        wait_share, memory = self._worst()
        summary = self._summary | {"data_wait_pct": 100 * min(wait_share, 1.0), "max_memory_gib": memory}
        sums_and_counts = list(numbers)
        half = len(self._captions)
        for name, total, count in zip(self._captions, sums_and_counts[:half], sums_and_counts[half:], strict=True):
            if count:
                summary[f"loss_by_caption/{name}"] = total / count
        return rows, summary


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that the process held: torch's on a GPU, resident memory on the CPU. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
