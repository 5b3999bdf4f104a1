"""The training loop: batches in, optimizer steps, and what is due after each of them.

After a step, in this order: the log, a checkpoint, an evaluation, a stop that was asked for. Everything goes by the
number of optimizer steps, so that a resumed run does the same things at the same steps.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.loader import Batch, Loader
from ..evaluation.table import score_summary
from .batches import IdleClock, MicroBatches
from .checkpoint import Checkpoints, Position
from .distributed import CommonError, World
from .ema import WeightAverage
from .left_out import LeftOutSteps, scale_errors, share_left_out
from .log import duration, logger
from .metrics import ClosedInterval, Interval, MetricWriter
from .optimizer import learning_rates
from .partitioned import whole_weights
from .profile import StepProfiler
from .signals import Agreement, StopRequest
from .spikes import LossSpikes
from .step import StepResult, train_step
from .validation import Evaluator

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# What one rank may ask all others for, by the exchange that goes with each step; the highest wins.
NOTHING, SAVE, STOP = 0, 1, 2


@dataclass
class Parts:
    """What the loop works with."""

    world: World
    engine: DeepSpeedEngine
    loader: Loader
    loss: Callable
    checkpoints: Checkpoints
    describe: Callable[[], dict[str, Any]]
    """What is written into a checkpoint beside the position; all ranks call it."""
    frozen: dict[str, Tensor]
    """fp32 weights of a locked tower, by name."""
    average: WeightAverage | None
    """The averaged weights; evaluations use them where there are any."""
    evaluator: Evaluator
    metrics: MetricWriter | None
    """On rank 0."""
    interval: Interval
    spikes: LossSpikes
    left_out: LeftOutSteps
    profiler: StepProfiler
    stop: StopRequest


class Loop:
    """Trains from a position to the end of the last epoch, or until asked to stop."""

    def __init__(self, parts: Parts, args: argparse.Namespace, position: Position, evaluation_due: bool) -> None:
        self._parts = parts
        self._args = args
        self._start = position
        self.position = position
        self._global_batch = parts.engine.train_batch_size()
        self._steps_per_epoch = parts.loader.steps_per_epoch
        self.total_steps = total_steps(position, args.epochs, self._steps_per_epoch, self._global_batch)
        self._evaluation_due = evaluation_due
        self._agreement = Agreement(parts.world.device)
        self._idle = IdleClock(parts.world.device)
        self._unwritten: ClosedInterval | None = None
        self._unsettled: tuple[int, StepResult, list[int]] | None = None
        """Epoch, result and first records of the last step, until it is known whether it was applied."""
        self._last_save = time.monotonic()

    def run(self) -> bool:
        """True when the run is complete, False when it was stopped. Either way its last step is saved."""
        if self._evaluation_due and not self._evaluate():
            return False
        start = self._start
        for epoch in range(start.epoch, self._args.epochs):
            first_step = start.samples // self._global_batch if epoch == start.epoch else 0
            batches = self._parts.loader.epoch(epoch, first_step)
            for step_of_epoch in range(first_step, self._steps_per_epoch):
                self._parts.profiler.before(self.position.step + 1)
                self._step(epoch, step_of_epoch, batches)
                self._parts.profiler.after(self.position.step)
                if self._after_step():
                    self._save()
                    self._parts.checkpoints.finish()
                    return False
        self._save()
        self._parts.checkpoints.finish()
        lost = share_left_out(self._parts.engine.skipped_steps, self.position.step)
        if lost is not None and self._parts.world.is_first:
            logger.warning("%s", lost)
        return True

    @property
    def average(self) -> WeightAverage | None:
        return self._parts.average

    def close(self) -> None:
        """End the loader's threads and close the metrics' and the profile's files."""
        self._parts.profiler.close()
        self._parts.loader.close()
        if self._parts.metrics is not None:
            self._parts.metrics.close()

    def _step(self, epoch: int, step_of_epoch: int, batches: Iterator[Batch]) -> None:
        parts = self._parts
        micro_batches = MicroBatches(parts.loader, batches, self._idle)
        rates = learning_rates(parts.engine.basic_optimizer.param_groups)
        with scale_errors(self.position.step + 1):
            result = train_step(parts.engine, micro_batches, parts.loss, self._args.accumulation, self._meanwhile)
        ended = step_of_epoch + 1 == self._steps_per_epoch
        self.position = Position(
            step=self.position.step + 1,
            epoch=epoch + 1 if ended else epoch,
            samples=0 if ended else (step_of_epoch + 1) * self._global_batch,
        )
        captions = torch.cat([batch.caption_index for batch in micro_batches])
        parts.interval.add(self.position.step, result, rates, self._idle.seconds(), captions)
        self._unsettled = (epoch, result, micro_batches[0].ids[:3].tolist())
        if parts.average is not None or not result.outcome.is_pending:
            self._settle()
        if parts.average is not None and result.applied:
            parts.average.update()

    def _meanwhile(self) -> None:
        """What is done while the device works on a step's passes."""
        self._parts.loader.work_ahead()
        self._settle()
        self._write_log()

    def _settle(self) -> None:
        """Do what is due if the last step was left out, because a gradient was not finite.

        While the device works on the next step this does not wait for it.
        """
        if self._unsettled is None:
            return
        (epoch, result, first_ids), self._unsettled = self._unsettled, None
        if not result.applied:
            if not result.outcome.is_pending and self._parts.engine.lr_scheduler is not None:
                # The schedule goes on all the same. Of a step whose outcome is pending DeepSpeed has seen to it.
                self._parts.engine.lr_scheduler.step()
            self._leave_out(epoch, first_ids)

    def _step_was_applied(self) -> bool:
        """False for a step that was left out. A save then would only push out one from before the trouble."""
        self._settle()
        return self.position.step not in self._parts.left_out

    def _leave_out(self, epoch: int, first_ids: list[int]) -> None:
        """Count a step that was left out."""
        left_out = self._parts.left_out
        left_out.add(self.position.step, epoch + 1, first_ids)
        if left_out.in_row >= self._args.max_skipped:
            self._log()
            records = ", ".join(self._parts.loader.dataset.describe(i) for i in left_out.first_records)
            raise CommonError(
                f"{left_out.in_row} steps in a row had NaN or Inf gradients, from step {left_out.first_step} of epoch "
                f"{left_out.epoch} on (its first records: {records}); {self._last_good()}. Lower --lr or look at these "
                "records"
            )

    def _last_good(self) -> str:
        self._parts.checkpoints.finish()
        saved = self._parts.checkpoints.saved_step
        return "nothing was saved yet" if saved is None else f"the last good save is of step {saved}"

    def _after_step(self) -> bool:
        """Do what is due; True to stop."""
        args, step = self._args, self.position.step
        epoch_ended, run_ended = self.position.samples == 0, step == self.total_steps
        wish = self._agreement.result()
        self._evaluation_due = self._parts.evaluator.has_work and (
            run_ended or (step % args.eval_every == 0 if args.eval_every else epoch_ended)
        )
        if step % args.log_every == 0 or step == self._start.step + 1 or run_ended:
            # Written in the next step, where the time for it costs none, unless something else is due now.
            self._close_interval()
        save_due = step % args.save_every == 0 if args.save_every else epoch_ended
        if wish >= SAVE or run_ended or (save_due and self._step_was_applied()):
            self._save()
        if self._evaluation_due and not self._evaluate():
            return True
        if wish == STOP:
            return True
        if not run_ended:
            self._agreement.submit(self._wish())
        return False

    def _wish(self) -> int:
        if self._parts.stop.requested:
            return STOP
        if self._parts.checkpoints.has_failed:
            return SAVE  # which raises on all ranks what went wrong
        minutes = (time.monotonic() - self._last_save) / 60
        timed = self._args.save_minutes is not None and self._parts.world.is_first
        return SAVE if timed and minutes >= self._args.save_minutes else NOTHING

    def _close_interval(self) -> None:
        """End the interval that the next log line is about."""
        self._write_log()
        self._unwritten = self._parts.interval.close()

    def _log(self) -> None:
        """Write the steps since the last time, and one line about them."""
        self._write_log()
        if not self._parts.interval.is_empty:
            self._close_interval()
            self._write_log()

    def _write_log(self) -> None:
        """Write the closed interval, if there is one; the position must still be the one where it was closed."""
        if self._unwritten is None:
            return
        self._settle()
        parts, closed, self._unwritten = self._parts, self._unwritten, None
        rows, summary = closed.read()
        for step, values in rows:
            if not math.isfinite(values["loss"]) and step not in parts.left_out:
                raise CommonError(
                    f"the loss of step {step} is {values['loss']} and the weights are lost; {self._last_good()}. Lower "
                    "--lr, or use bf16, where DeepSpeed leaves such steps out"
                )
            spike = parts.spikes.add(values["loss"])
            if spike is not None and parts.world.is_first:
                logger.warning("loss spike at step %d: %s", step, spike)
            values["loss_spikes"] = float(parts.spikes.count)
        if not parts.world.is_first:
            return
        summary["skipped_steps"] = float(parts.engine.skipped_steps)
        if parts.engine.fp16_enabled():
            summary["loss_scale"] = float(parts.engine.optimizer.cur_scale)
        rows[-1][1].update(summary)
        for step, values in rows:
            parts.metrics.write(step, values)
        parts.metrics.flush()
        eta = summary["step_seconds"] * (self.total_steps - self.position.step)
        logger.info("%s", log_line(self.position, self.total_steps, self._args.epochs, rows[-1][1], parts, eta))

    def _save(self) -> None:
        parts = self._parts
        if parts.checkpoints.saved_step == self.position.step:
            return
        self._settle()
        self._log()
        started = time.perf_counter()
        state = parts.describe() | {
            "evaluation_due": self._evaluation_due,
            "loss_spikes": parts.spikes.state(),
            "left_out": parts.left_out.state(),
        }
        parts.checkpoints.save(parts.engine, self.position, state, parts.frozen, parts.average)
        parts.interval.pause(time.perf_counter() - started)
        self._last_save = time.monotonic()

    def _evaluate(self) -> bool:
        """False when a stop request cut it short; a resume does it again."""
        parts = self._parts
        self._settle()
        self._write_log()
        started = time.perf_counter()
        with parts.average.in_the_model() if parts.average is not None else whole_weights(parts.engine):
            values = parts.evaluator.run(parts.engine.module)
        seconds = time.perf_counter() - started
        parts.interval.pause(seconds)
        if values is None:
            return False
        self._evaluation_due = False
        if parts.world.is_first:
            parts.metrics.write(self.position.step, values)
            if parts.evaluator.picture is not None:
                parts.metrics.picture(self.position.step, "retrieved", parts.evaluator.picture)
            parts.metrics.flush()
            logger.info("evaluated step %d in %.1f s: %s", self.position.step, seconds, evaluation_line(values))
        return True


def total_steps(position: Position, epochs: int, steps_per_epoch: int, global_batch: int) -> int:
    """Optimizer steps of the whole run, seen from a position in it."""
    return position.step + (epochs - position.epoch) * steps_per_epoch - position.samples // global_batch


def evaluation_line(values: dict[str, float]) -> str:
    """What the log says of an evaluation; all its values go to the metrics."""
    loss = [f"{name} {value:.4g}" for name, value in values.items() if name.startswith("validation/")]
    return "  ".join([*loss, score_summary(values)]).rstrip()


def log_line(position: Position, steps: int, epochs: int, values: dict[str, float], parts: Parts, eta: float) -> str:
    """One readable line about an interval; `values` are those of its last step."""
    ended = position.samples == 0
    pieces = [
        f"epoch {position.epoch if ended else position.epoch + 1}/{epochs} step {position.step:,}/{steps:,}",
        f"loss {values['loss']:.4f}",
        f"lr {values['learning_rate']:.2e}",
        f"logit scale {values['logit_scale']:.2f}",
    ]
    if "gradient_norm" in values:
        pieces.append(f"grad norm {values['gradient_norm']:.2f}")
    pieces += [
        f"accuracy i-t {values['image_to_text_accuracy']:.1%} t-i {values['text_to_image_accuracy']:.1%}",
        f"{values['samples_per_second']:,.0f} samples/s"
        + (f" ({values['samples_per_second_per_gpu']:,.0f}/GPU)" if parts.world.world_size > 1 else ""),
        f"data wait {values['data_wait_pct']:.1f} %",
        f"{values['max_memory_gib']:.2f} GiB",
    ]
    if values["skipped_steps"]:
        pieces.append(f"{values['skipped_steps']:.0f} skipped")
    if values["loss_spikes"]:
        pieces.append(f"{values['loss_spikes']:.0f} loss spike{'s' * (values['loss_spikes'] > 1)}")
    pieces.append(f"ETA {duration(eta)}")
    return "  ".join(pieces)
