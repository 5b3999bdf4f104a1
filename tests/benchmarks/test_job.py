"""What the benchmarks read out of a job: speeds, the cost of the data path, phases of the start, kernels."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
import torch

from rwkv_clip import cli

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import job  # noqa: E402
import measured_train  # noqa: E402
import scaling  # noqa: E402
import train_step  # noqa: E402

LOG = """2026-11-29 12:00:10  rwkv-clip 0.1.0: B on 1 x CPU (vm), bf16, ZeRO stage 1
2026-11-29 12:00:40  the image tower's block is compiled: 20.5 s
2026-11-29 12:00:50  building the engine: 39.0 s
2026-11-29 12:00:52  epoch 1/1 step 1/9  loss 3.1
2026-11-29 12:00:59  epoch 1/1 step 2/9  loss 3.1
"""
BEGAN = datetime(2026, 11, 29, 12, 0, 0).timestamp()


@pytest.fixture
def settings(tmp_path: Path) -> job.Settings:
    return job.Settings("m", tmp_path / "c.json", 8, tmp_path, warm_up=10, steps=20, log_every=5)


@pytest.fixture
def run(tmp_path: Path, settings: job.Settings) -> Path:
    """Of a job with 100 pairs/s while it warms up, 200 on fresh batches, 250 on replayed ones."""
    run = tmp_path / "run"
    (run / "tensorboard").mkdir(parents=True)
    rows = []
    for step in range(1, settings.profile_from + 3):
        speed = 100 if step <= 10 else 200 if step <= settings.replay_after else 250
        row = {"step": step, "loss": 1.0}
        if step % 5 == 0:
            memory = 3.0 + (step >= settings.replay_after)
            row |= {
                "samples_per_second": speed,
                "step_seconds": 8 / speed,
                "data_wait_pct": 2,
                "max_memory_gib": memory,
            }
        rows.append(row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "training.log").write_text(LOG)
    events = [("gemm", 0, 60), ("ncclDevKernel_AllReduce", 60, 30), ("gemm", 90, 10)]
    trace = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in events]
    trace.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500})
    (run / "tensorboard" / "steps_1_to_3.pt.trace.json").write_text(json.dumps({"traceEvents": trace}))
    return run


def test_speed_and_memory_are_those_of_the_fresh_batches_after_the_warm_up(settings, run):
    figures = job.read(settings, run, BEGAN)
    assert figures["samples_per_second"] == 200 and figures["step_ms"] == pytest.approx(40)
    assert figures["torch_peak_gib"] == 3.0  # without the batch that is put aside
    assert figures["intervals"] == 4


def test_the_share_lost_to_data_is_the_speed_beside_that_of_replayed_batches(settings, run):
    figures = job.read(settings, run, BEGAN)
    assert figures["replayed_samples_per_second"] == 250
    assert figures["data_loss_pct"] == pytest.approx(20)


def test_the_phases_of_the_start_add_up_to_the_first_step(settings, run):
    phases = job.read(settings, run, BEGAN)["start_phases_s"]
    assert phases == {
        "launcher and imports": 10,
        "the image tower's block is compiled": 20.5,
        "building the engine": 39.0,
        "until the first step has ended": 52,
    }


def test_kernels_are_ranked_and_communication_is_a_share_of_the_traced_time(settings, run):
    figures = job.read(settings, run, BEGAN)
    assert figures["communication_pct"] == pytest.approx(30)
    assert list(figures["top_kernels_pct"].items()) == [("gemm", 70), ("ncclDevKernel_AllReduce", 30)]


def test_a_job_that_is_too_slow_is_ended_with_its_output(settings, run, tmp_path, monkeypatch):
    settings.timeout = 0.5
    monkeypatch.setattr(job, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr("rwkv_clip.data.dataset.open_dataset", lambda path: range(100))
    monkeypatch.setattr(job.sys, "executable", str(tmp_path / "slow"))
    (tmp_path / "slow").write_text("#!/bin/sh\necho stuck in here; sleep 60\n")
    (tmp_path / "slow").chmod(0o755)
    with pytest.raises(job.JobFailed, match=r"(?s)took more than 0 s.*stuck in here|took more than 1 s.*stuck in here"):
        job._run(settings, run)


@dataclass
class Batch:
    images: torch.Tensor
    tokens: torch.Tensor
    caption_index: torch.Tensor


def test_after_its_step_the_loader_repeats_the_batch_before_it_in_every_epoch(monkeypatch):
    from rwkv_clip.data.loader import Loader

    class Fake:
        steps_per_epoch, accumulation_steps = 4, 1

    def epoch(self, number, start_step=0):
        for step in range(start_step, 4):
            value = torch.tensor([10 * number + step])
            yield Batch(value, value, value)
            value.fill_(-1)  # the pipeline takes its memory back

    monkeypatch.setattr(Loader, "epoch", epoch)
    measured_train.replay_after(3)
    given = [[int(batch.images) for batch in Loader.epoch(Fake(), number)] for number in range(2)]
    assert given == [[0, 1, 2, 2], [2, 2, 2, 2]]


def test_every_row_of_the_table_is_a_file_that_exists():
    assert all((BENCHMARKS.parent / "ds_configs" / f"{name}.json").is_file() for _, name, _ in train_step.TABLE)


def test_scaling_runs_powers_of_two_and_each_stage_at_the_most():
    assert scaling.jobs(8) == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 3)]
    assert scaling.jobs(1) == [(1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(("stage", "compiled"), [(1, True), (2, True), (3, False)])
def test_scaling_leaves_out_what_a_stage_cannot_take(tmp_path, stage, compiled):
    path = scaling.with_stage(BENCHMARKS.parent / "ds_configs" / "zero1_bf16_compile.json", stage, tmp_path)
    assert scaling.predicted("RWKV-CLIP-Nano", path, 8, 2)["peak"] > 0  # the JSON is one that training takes
    assert ("compile" in json.loads(path.read_text())) == compiled


def test_a_benchmark_states_what_rwkv_clip_plan_predicts(capsys):
    config = BENCHMARKS.parent / "ds_configs" / "zero1_bf16.json"
    words = ["plan", "--model", "RWKV-CLIP-Nano", "--config", str(config), "--batch", "8", "--gpus", "2", "--json"]
    assert cli.main(words) == 0
    assert job.predicted("RWKV-CLIP-Nano", config, 8, 2) == json.loads(capsys.readouterr().out)
