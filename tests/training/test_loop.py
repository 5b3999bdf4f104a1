"""What the loop does with the values of an interval."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rwkv_clip.training import loop
from rwkv_clip.training.checkpoint import Position
from rwkv_clip.training.distributed import CommonError
from rwkv_clip.training.left_out import LeftOutSteps
from rwkv_clip.training.spikes import LossSpikes

SUMMARY = {
    "samples_per_second": 1.0,
    "samples_per_second_per_gpu": 1.0,
    "data_wait_pct": 0.0,
    "max_memory_gib": 1.0,
    "step_seconds": 1.0,
}


class Interval:
    """Rows of losses, given once."""

    def __init__(self, losses: list[float]) -> None:
        common = {"logit_scale": 14.3, "image_to_text_accuracy": 0.5, "text_to_image_accuracy": 0.5}
        self.rows = [(step, {"loss": loss, "learning_rate": 1e-3, **common}) for step, loss in enumerate(losses, 1)]
        self.is_empty = False

    def close(self):
        self.is_empty = True
        return SimpleNamespace(read=lambda: (self.rows, dict(SUMMARY)))


def loop_of(losses: list[float], written: dict, is_first: bool = True) -> loop.Loop:
    """A loop after steps of these losses, whose metrics go to `written`."""
    engine = SimpleNamespace(train_batch_size=lambda: 8, skipped_steps=0, fp16_enabled=lambda: False)
    parts = SimpleNamespace(
        engine=engine,
        world=SimpleNamespace(is_first=is_first, device=torch.device("cpu"), world_size=1),
        loader=SimpleNamespace(steps_per_epoch=100, work_ahead=lambda: None),
        checkpoints=SimpleNamespace(saved_step=None, finish=lambda: None),
        interval=Interval(losses),
        spikes=LossSpikes(),
        left_out=LeftOutSteps(),
        metrics=SimpleNamespace(write=lambda step, values: written.update({step: values}), flush=lambda: None),
    )
    args = SimpleNamespace(epochs=1)
    return loop.Loop(parts, args, Position(step=len(losses), samples=8 * len(losses)), evaluation_due=False)


def outcome(applied: bool, is_pending: bool = True):
    """What a step's result knows of it, whose asking waits for the device."""
    return SimpleNamespace(outcome=SimpleNamespace(is_pending=is_pending), applied=applied)


def logged(losses: list[float], monkeypatch: pytest.MonkeyPatch, is_first: bool = True):
    """(warnings, {step: values written}, state of the spikes, the log's lines)."""
    warnings, lines, written = [], [], {}
    monkeypatch.setattr(loop.logger, "warning", lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr(loop.logger, "info", lambda text, *args: lines.append(text % args))
    job = loop_of(losses, written, is_first)
    job._log()
    return warnings, written, job._parts.spikes.state(), lines


def test_an_interval_is_written_once_while_the_device_works_on_the_next_step_or_before_a_save() -> None:
    fed, written = [], {}
    job = loop_of([2.0, 1.5], written)
    job._parts.loader.work_ahead = lambda: fed.append(dict(written))
    job._close_interval()
    assert not written
    job._meanwhile()
    # Feeding comes first: a decoder that waits costs more than a late line.
    assert fed == [{}] and list(written) == [1, 2]
    written.clear()
    job._meanwhile()
    job._log()
    assert not written
    job = loop_of([2.0], written)
    job._close_interval()
    job._log()
    assert list(written) == [1]


def test_a_loss_spike_is_marked_in_the_log_and_counted_from_its_step_on(monkeypatch) -> None:
    losses = [2.0] * 40 + [3.0] + [2.0] * 3
    warnings, written, state, lines = logged(losses, monkeypatch)
    assert len(warnings) == 1 and warnings[0].startswith("loss spike at step 41: 3.0000, where")
    assert [written[step]["loss_spikes"] for step in (40, 41, 44)] == [0, 1, 1]
    assert "1 loss spike " in lines[-1]
    # A rank that writes nothing keeps the same count for the checkpoint.
    silent, nothing, other, _ = logged(losses, monkeypatch, is_first=False)
    assert not silent and not nothing and other == state


def test_a_loss_that_is_lost_ends_the_run_in_one_line(monkeypatch) -> None:
    with pytest.raises(CommonError, match="loss of step 3 is nan .* nothing was saved yet"):
        logged([2.0, 2.0, float("nan")], monkeypatch)


def job_with_schedule() -> tuple[loop.Loop, list[str]]:
    """(a loop, what it asks the schedule for)."""
    job, asked = loop_of([2.0], {}), []
    job._parts.engine.lr_scheduler = SimpleNamespace(step=lambda: asked.append("step"))
    job._parts.loader.dataset = SimpleNamespace(describe=lambda number: f"record {number}")
    job._args.max_skipped = 2
    return job, asked


def test_a_step_that_the_device_left_out_is_counted_while_the_next_one_runs() -> None:
    job, asked = job_with_schedule()
    left_out = job._parts.left_out
    job._unsettled = (0, outcome(applied=False), [7])
    job._meanwhile()
    assert left_out.in_row == 1 and 1 in left_out and not asked  # DeepSpeed took it as applied, and asked the schedule
    job._meanwhile()
    assert left_out.in_row == 1
    job.position = Position(step=2, samples=16)
    job._unsettled = (0, outcome(applied=True), [7])
    job._meanwhile()
    assert left_out.in_row == 1 and 2 not in left_out


def test_the_schedule_goes_on_after_a_step_that_deepspeed_left_out() -> None:
    job, asked = job_with_schedule()
    job._unsettled = (0, outcome(applied=False, is_pending=False), [7])
    job._settle()
    assert 1 in job._parts.left_out and asked == ["step"]


def test_a_save_and_an_evaluation_ask_first_whether_the_last_step_was_left_out() -> None:
    for due in (lambda job: job._save(), lambda job: job._evaluate()):
        job, _ = job_with_schedule()
        job.position = Position(step=101, epoch=1, samples=8)
        job._parts.left_out.add(100, epoch=1, first_records=[5, 6])
        job._unsettled = (1, outcome(applied=False), [7])
        # Where the row began, with the epoch as the log counts it: step 100 was the last of epoch 1.
        with pytest.raises(
            CommonError,
            match=r"2 steps in a row .* from step 100 of epoch 1 on \(its first records: record 5, record 6\)",
        ):
            due(job)


def test_the_epoch_of_the_error_is_that_of_the_log_s_line(monkeypatch) -> None:
    _, _, _, lines = logged([2.0], monkeypatch)
    job, _ = job_with_schedule()
    job._args.max_skipped = 1
    job._unsettled = (0, outcome(applied=False), [7])
    with pytest.raises(CommonError, match="from step 1 of epoch 1 on"):
        job._settle()
    assert lines[0].startswith("epoch 1/1 step 1/")


def test_a_save_keeps_the_row_of_steps_that_it_was_made_in() -> None:
    job, _ = job_with_schedule()
    saved = []
    job._parts.checkpoints.save = lambda engine, position, state, *_: saved.append(state)
    job._parts.describe, job._parts.frozen, job._parts.average = dict, {}, None
    job._parts.interval.pause = lambda seconds: None
    job._unsettled = (0, outcome(applied=False), [7])
    job._save()
    resumed, _ = job_with_schedule()
    resumed._parts.left_out = LeftOutSteps(saved[0]["left_out"])
    resumed.position = Position(step=2, samples=16)
    resumed._unsettled = (0, outcome(applied=False), [8])
    with pytest.raises(
        CommonError, match=r"2 steps in a row .* from step 1 of epoch 1 on \(its first records: record 7\)"
    ):
        resumed._settle()
