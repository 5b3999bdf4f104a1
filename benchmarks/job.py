"""Starts the real training job for a benchmark, and reads its figures from what the job itself writes."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Settings:
    """What to run and how long."""

    model: str
    config: Path
    batch_size: int
    data: Path
    gpus: int = 1
    warm_up: int = 20
    steps: int = 60
    """On fresh batches, and half as many on replayed ones after them."""
    log_every: int = 10
    port: int = 29511
    timeout: float = 600.0
    peer: bool = False
    flags: list[str] = field(default_factory=list)
    """More flags of launch/train.py."""

    @property
    def replay_after(self) -> int:
        return self.warm_up + self.steps

    @property
    def profile_from(self) -> int:
        """First of three traced steps: after the replayed ones that are timed, whose first interval is not counted."""
        return self.replay_after + self.log_every + self.steps // 2 + 1


class JobFailed(Exception):
    """The job ended with an error or took too long; the text is the end of its output."""


def measure(settings: Settings, run: Path) -> dict[str, float | dict]:
    """Run the job into the folder `run`; its figures by name (see `read`)."""
    memory = ProcessMemory(gpu_ids(settings.gpus))
    memory.start()
    began = time.time()
    try:
        _run(settings, run)
    finally:
        process_peak = memory.stop()
    figures = read(settings, run, began)
    figures["job_s"] = time.time() - began
    if process_peak:
        figures["process_peak_gib"] = process_peak
    return figures


def _run(settings: Settings, run: Path) -> None:
    from rwkv_clip.data.dataset import open_dataset

    steps = settings.profile_from + 2
    # A small data set gives fewer steps per epoch than are to be measured.
    steps_per_epoch = min(steps, len(open_dataset(settings.data)) // (settings.batch_size * settings.gpus))
    if steps_per_epoch < 1:
        raise JobFailed(
            f"{settings.data} holds fewer records than one batch of {settings.batch_size} x {settings.gpus}"
        )
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    if os.environ.get("CUDA_VISIBLE_DEVICES"):  # which the launcher overlooks beside --num_gpus
        command += ["--include", "localhost:" + ",".join(gpu_ids(settings.gpus))]
    else:
        command += ["--num_gpus", str(settings.gpus)]
    command += ["--master_port", str(settings.port), str(ROOT / "benchmarks" / "measured_train.py")]
    command += ["--model", settings.model, "--train-data", str(settings.data), "--output", str(run)]
    command += ["--deepspeed_config", str(settings.config), "--batch-size", str(settings.batch_size)]
    command += ["--max-steps-per-epoch", str(steps_per_epoch), "--epochs", str(math.ceil(steps / steps_per_epoch))]
    # Made-up pairs have nothing to teach: a rate worth training with only drives fp16 beyond its range.
    command += ["--lr", "1e-5", "--save-every", "1000000", "--log-every", str(settings.log_every)]
    command += ["--profile", f"{settings.profile_from}:{settings.profile_from + 3}", *settings.flags]
    environment = dict(os.environ, RWKV_CLIP_REPLAY_AFTER=str(settings.replay_after), PYTHONUNBUFFERED="1")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    if settings.peer:
        environment["RWKV_CLIP_PEER"] = str(_peer_file(run))
    # Into a file, which is there to read when the job hangs.
    output = run.with_name(run.name + ".out")
    with open(output, "w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(settings.timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if status != 0:
        reason = f"took more than {settings.timeout:.0f} s" if status is None else f"failed with status {status}"
        raise JobFailed(f"the job {reason}; the end of {output}:\n{output.read_text(errors='replace')[-4000:]}")


def predicted(model: str, config: Path, batch_size: int, gpus: int) -> dict:
    """What `rwkv-clip plan` says."""
    from rwkv_clip.training.forecast import add_arguments, forecast

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--model", model, "--config", str(config), "--batch", str(batch_size), "--gpus", str(gpus)]
    return forecast(parser.parse_args(words))


def _peer_file(run: Path) -> Path:
    return run.with_name(run.name + ".peer.json")


def read(settings: Settings, run: Path, began: float) -> dict[str, float | dict]:
    """The figures of a job that has ended.

    Speeds are medians over the log intervals after the warm-up; "data_loss_pct" is 1 - speed on fresh batches / speed
    on replayed ones. began: when the launcher was started, as time.time().
    """
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    intervals = [row for row in rows if "samples_per_second" in row and row["step"] % settings.log_every == 0]
    first = settings.warm_up + settings.log_every
    fresh = [row for row in intervals if first <= row["step"] <= settings.replay_after]
    # The first interval of the replayed steps begins while the pipeline still fills its queues.
    replayed = [
        row for row in intervals if settings.replay_after + settings.log_every < row["step"] < settings.profile_from
    ]
    speed = statistics.median(row["samples_per_second"] for row in fresh)
    figures: dict[str, float | dict] = {
        "samples_per_second": speed,
        "step_ms": 1e3 * statistics.median(row["step_seconds"] for row in fresh),
        "data_wait_pct": statistics.median(row["data_wait_pct"] for row in fresh),
        # Before the batch to replay was put aside.
        "torch_peak_gib": max(row["max_memory_gib"] for row in fresh[:-1] or fresh),
        "final_loss": next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), float("nan")),
        "intervals": len(fresh),
    }
    if replayed:
        best = statistics.median(row["samples_per_second"] for row in replayed)
        figures["replayed_samples_per_second"] = best
        figures["data_loss_pct"] = 100 * (1 - speed / best)
    log = (run / "training.log").read_text()
    figures["start_phases_s"] = start_phases(log, began)
    figures |= kernels(run / "tensorboard")
    if _peer_file(run).is_file():
        figures["peer"] = json.loads(_peer_file(run).read_text())
    return figures


def start_phases(log: str, began: float) -> dict[str, float]:
    """Seconds of each phase from the launcher's start to the end of the first step, as training.log states them."""
    phases = {}
    for line in log.splitlines():
        found = re.match(r"(\S+ \S+)  (.*)", line)
        if not found:
            continue
        moment, text = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").timestamp(), found[2]
        if not phases:
            phases["launcher and imports"] = max(0.0, moment - began)
        timed = re.fullmatch(r"([a-z][^:]*): ([\d.]+) s", text)
        if timed:
            phases[timed[1]] = float(timed[2])
        if re.match(r"epoch 1/\d+ step 1/", text):
            phases["until the first step has ended"] = max(0.0, moment - began)
            break
    return phases


def kernels(folder: Path) -> dict[str, float | dict]:
    """Of the traced steps: the kernels (operations on a CPU) that take most time, and the share of communication."""
    traces = list(folder.glob("steps_*.trace.json"))
    if not traces:
        return {}
    events = json.loads(traces[0].read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    chosen = [event for event in events if event.get("cat") == "kernel"]
    chosen = chosen or [event for event in events if event.get("cat") == "cpu_op"]
    if not chosen:
        return {}
    wall = max(event["ts"] + event["dur"] for event in chosen) - min(event["ts"] for event in chosen)
    times: Counter = Counter()
    for event in chosen:
        times[event["name"]] += event["dur"]
    communication = sum(time for name, time in times.items() if re.match(r"nccl|gloo:|c10d::", name))
    top = {name[:100]: 100 * time / wall for name, time in times.most_common(12)}
    return {"communication_pct": 100 * communication / wall, "top_kernels_pct": top}


def gpu_ids(count: int) -> list[str]:
    """The first `count` of the GPUs that CUDA_VISIBLE_DEVICES names, or of all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


class ProcessMemory(threading.Thread):
    """Highest memory in use on any of these GPUs as NVML reports it, in GiB, while it runs; 0 without a GPU."""

    def __init__(self, gpus: list[str]) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self._ids = ",".join(gpus)
        self._done = threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", f"--id={self._ids}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._done.wait(0.5):
            try:
                answer = subprocess.run(command, capture_output=True, text=True)
            except OSError:
                return
            for word in answer.stdout.split() if answer.returncode == 0 else []:
                if word.isdigit():
                    self.peak = max(self.peak, int(word) / 1024)

    def stop(self) -> float:
        self._done.set()
        self.join()
        return self.peak
