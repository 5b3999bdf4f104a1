"""What the loop does with the values of an interval."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rwkv_clip.training import loop
from rwkv_clip.training.checkpoint import Position
from rwkv_clip.training.distributed import CommonError
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
        return self.rows, dict(SUMMARY)


def logged(losses: list[float], monkeypatch: pytest.MonkeyPatch, is_first: bool = True):
    """(warnings, {step: values written}, state of the spikes, the last line)."""
    warnings, lines, written = [], [], {}
    monkeypatch.setattr(loop.logger, "warning", lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr(loop.logger, "info", lambda text, *args: lines.append(text % args))
    engine = SimpleNamespace(train_batch_size=lambda: 8, skipped_steps=0, fp16_enabled=lambda: False)
    parts = SimpleNamespace(
        engine=engine,
        world=SimpleNamespace(is_first=is_first, device=torch.device("cpu"), world_size=1),
        loader=SimpleNamespace(steps_per_epoch=100),
        checkpoints=SimpleNamespace(saved_step=None, finish=lambda: None),
        interval=Interval(losses),
        spikes=LossSpikes(),
        metrics=SimpleNamespace(write=lambda step, values: written.update({step: values}), flush=lambda: None),
    )
    args = SimpleNamespace(epochs=1)
    loop.Loop(parts, args, Position(step=len(losses), samples=8 * len(losses)), evaluation_due=False)._log()
    return warnings, written, parts.spikes.state(), lines


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
