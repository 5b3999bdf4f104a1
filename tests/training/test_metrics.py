import json
import logging
import math
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rwkv_clip.errors import UserError
from rwkv_clip.training.log import duration, log_to_file
from rwkv_clip.training.metrics import Interval, MetricWriter, drop_after
from rwkv_clip.training.step import StepResult

CPU = torch.device("cpu")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def result(loss: float, rows=(1.0, 2.0, 3.0), norm: float | torch.Tensor | None = None) -> StepResult:
    numbers = (torch.tensor(loss), torch.tensor(0.25), torch.tensor(0.5), torch.tensor(rows), torch.tensor(14.29))
    return StepResult(*numbers, outcome=None, gradient_norm=norm)


def test_each_step_keeps_its_own_values_and_the_interval_its_speed():
    interval = Interval(CPU, samples_per_step=6, world_size=2, captions=["one"])
    interval._world_size = 1  # no group to reduce over
    for step, norm in ((1, 0.5), (2, torch.tensor(0.25))):
        values = result(float(step), norm=norm)
        interval.add(step, values, {"learning_rate": step / 10}, 0.0, torch.zeros(3, dtype=torch.int64))
    rows, summary = interval.close().read()
    assert [(step, row["loss"], row["learning_rate"]) for step, row in rows] == [(1, 1.0, 0.1), (2, 2.0, 0.2)]
    assert rows[0][1]["logit_scale"] == pytest.approx(14.29) and [row["gradient_norm"] for _, row in rows] == [
        0.5,
        0.25,
    ]
    assert summary["samples_per_second"] == pytest.approx(6 / summary["step_seconds"])
    assert interval.is_empty


def test_the_loss_is_kept_by_caption():
    interval = Interval(CPU, 3, 1, ["raw", "synthetic", "generated"])
    for _ in range(2):
        interval.add(1, result(1.0, rows=(1.0, 2.0, 4.0)), {}, 0.0, torch.tensor([0, 2, 2]))
    _, summary = interval.close().read()
    assert summary["loss_by_caption/raw"] == 1.0 and summary["loss_by_caption/generated"] == 3.0
    assert "loss_by_caption/synthetic" not in summary


def test_the_share_of_waiting_is_of_the_time_that_was_not_paused(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rwkv_clip.training.metrics.time.perf_counter", lambda: clock[0])
    interval = Interval(CPU, 3, 1, [])
    interval.add(1, result(1.0), {}, wait=1.0, caption_index=torch.zeros(3, dtype=torch.int64))
    interval.pause(6.0)
    clock[0] = 10.0
    _, summary = interval.close().read()
    assert summary["data_wait_pct"] == pytest.approx(25) and summary["step_seconds"] == pytest.approx(4)


def test_a_norm_that_deepspeed_does_not_give_is_left_out():
    interval = Interval(CPU, 3, 1, [])
    interval.add(1, result(1.0), {}, 0.0, torch.zeros(3, dtype=torch.int64))
    assert "gradient_norm" not in interval.close().read()[0][0][1]


def test_values_go_to_both_files_and_nan_is_null(tmp_path):
    writer = MetricWriter(tmp_path / "metrics.jsonl", tmp_path / "tb")
    writer.write(1, {"loss": 2.0, "gradient_norm": math.nan})
    writer.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0, "gradient_norm": None}]
    assert len(list((tmp_path / "tb").iterdir())) == 1


def test_G1_a_resume_drops_what_was_written_beyond_it(tmp_path):
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tb"
    first = MetricWriter(path, folder)
    for step in range(1, 16):
        first.write(step, {"loss": 1.0})
    first.close()
    second = MetricWriter(path, folder, after_step=10)
    for step in range(11, 21):
        second.write(step, {"loss": 2.0})
    second.close()
    assert [line["step"] for line in lines(path)] == list(range(1, 21))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, 1.0 if step <= 10 else 2.0) for step in range(1, 21)
    ]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    drop_after(path, 5)
    assert [line["step"] for line in lines(path)] == [1]


def test_an_evaluation_that_was_written_is_known_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 4, "loss": 1.0}\n{"step": 4, "validation/loss": 1.5}\n{"step": 8, "loss": 1.0}\n')
    writer = MetricWriter(path, None, after_step=8)
    assert writer.evaluated(4) and not writer.evaluated(8)
    writer.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (12, "12 s"), (423, "7 min 3 s"), (18720, "5 h 12 min"), (273600, "3 d 4 h")]
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("with_tensorboard", [True, False])
def test_metrics_on_a_full_disk_end_in_one_line(tmp_path, capsys, monkeypatch, with_tensorboard):
    writer = MetricWriter(tmp_path / "metrics.jsonl", tmp_path / "tb" if with_tensorboard else None)
    if with_tensorboard:

        def full(*_):
            raise OSError(28, "No space left on device")

        from tensorboard.summary.writer.record_writer import RecordWriter

        monkeypatch.setattr(RecordWriter, "write", full)
    else:
        writer._jsonl.close()
        writer._jsonl = open("/dev/full", "a")
    with pytest.raises(UserError, match="No space left on device; make room"):
        for step in range(100):
            writer.write(step, {"loss": 1.0})
            writer.flush()
            time.sleep(0.01)
    assert "Traceback" not in capsys.readouterr().err


def test_a_log_file_on_a_full_disk_stops_nothing(capsys):
    package = logging.getLogger("rwkv_clip")
    before = list(package.handlers)
    try:
        log_to_file("/dev/full")
        package.warning("a line")
    finally:
        package.handlers[:] = before
    assert "Traceback" not in capsys.readouterr().err
