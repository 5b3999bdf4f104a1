"""Speed and memory of the real training job, measured from its own metrics.

    python benchmarks/train_step.py                                 B/32, batch 512, made-up JPEGs, the GPU
    python benchmarks/train_step.py --model RWKV-CLIP-B-16 --data data/mine --json out.json
    python benchmarks/train_step.py --config ds_configs/zero1_bf16_checkpointing.json --batch-size 4096
    python benchmarks/train_step.py --gpus 8

Starts `deepspeed launch/train.py` as a user does: engine, loss, optimizer, clipping, logging and the data path from
JPEGs in shards are all on. Speed is the median over the log intervals after the warm-up. FLOP/s count the matrix
products of the model (forward once, backward twice), not the operator or element-wise work; the peak beside it is a
product of 8192 x 8192 bf16 matrices measured first, on the same machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from pictures import make_pair

from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.model.config import ModelConfig, load_config

ROOT = Path(__file__).resolve().parents[1]


def matrix_flops_per_pair(config: ModelConfig) -> float:
    """FLOPs of all matrix products in one forward pass of one image and one caption."""

    def tower(tokens: int, width: int, depth: int, hidden: int) -> float:
        mixing = 5 * width * width + width * (2 * 5 * 32 + 2 * 64)
        channels = width * width + 2 * width * hidden
        return 2.0 * tokens * depth * (mixing + channels)

    image, text = config.image, config.text
    patches = (image.image_size // image.patch_size) ** 2
    patch_embed = 2.0 * patches * 3 * image.patch_size**2 * image.width
    return (
        patch_embed
        + tower(patches, image.width, image.depth, image.hidden_rate * image.width)
        + tower(text.context_length, text.width, text.depth, text.ffn_width)
    )


def peak_flops() -> float | None:
    """Best of a few bf16 products of 8192 x 8192 random matrices, FLOP/s; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    del a, b
    torch.cuda.empty_cache()
    return 2 * 8192**3 / min(times)


class ProcessMemory(threading.Thread):
    """Highest memory in use on GPU 0 as nvidia-smi reports it, in GiB, while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self._done = threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._done.wait(0.5):
            answer = subprocess.run(command, capture_output=True, text=True)
            if answer.returncode == 0 and answer.stdout.strip().isdigit():
                self.peak = max(self.peak, int(answer.stdout) / 1024)

    def stop(self) -> float:
        self._done.set()
        self.join()
        return self.peak


def run_job(args: argparse.Namespace, data: Path, run: Path) -> None:
    steps = args.warm_up + args.steps
    # A small data set gives fewer steps per epoch than are to be measured.
    steps_per_epoch = min(steps, len(open_dataset(data)) // (args.batch_size * args.gpus))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(args.gpus)]
    command += ["--master_port", str(args.port), str(ROOT / "launch" / "train.py")]
    command += ["--model", args.model, "--train-data", str(data), "--output", str(run)]
    command += ["--deepspeed_config", str(args.config), "--batch-size", str(args.batch_size), "--grad-clip", "1.0"]
    command += ["--max-steps-per-epoch", str(steps_per_epoch), "--epochs", str(math.ceil(steps / steps_per_epoch))]
    command += ["--save-every", "1000000"]
    command += ["--log-every", str(args.log_every), *args.flags]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"the job failed with status {done.returncode}:\n{done.stdout[-6000:]}")


def read_job(run: Path, warm_up: int, log_every: int) -> dict[str, float]:
    """Medians over the intervals after the warm-up, and what the log says of the start."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    intervals = [row for row in rows if "samples_per_second" in row and row["step"] >= warm_up + log_every]
    log = (run / "training.log").read_text()
    start = re.search(r"training begins ([\d.]+) s", log)
    return {
        "samples_per_second": statistics.median(row["samples_per_second"] for row in intervals),
        "step_ms": 1e3 * statistics.median(row["step_seconds"] for row in intervals),
        "data_wait_pct": statistics.median(row["data_wait_pct"] for row in intervals),
        "torch_peak_gib": max(row["max_memory_gib"] for row in intervals),
        "start_s": float(start[1]) if start else float("nan"),
        "final_loss": rows[-1].get("loss", float("nan")),
        "intervals": len(intervals),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="RWKV-CLIP-B-32")
    parser.add_argument("--batch-size", type=int, default=512, help="pairs per GPU (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "zero1_bf16.json")
    parser.add_argument("--data", type=Path, help="packed data set; default: made-up JPEGs of 500 x 375")
    parser.add_argument("--records", type=int, default=24576, help="made-up records (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=20, help="steps not counted (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps counted (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps per interval (default: %(default)s)")
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("flags", nargs="*", help="after --: more flags for launch/train.py")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    peak = peak_flops()
    with tempfile.TemporaryDirectory() as folder:
        data = args.data
        if data is None:
            data = Path(folder) / "made-up"
            needed = args.batch_size * args.gpus
            make_pair(data, max(args.records, needed))
        memory = ProcessMemory()
        if gpu:
            memory.start()
        began = time.monotonic()
        run_job(args, data, Path(folder) / "run")
        figures = read_job(Path(folder) / "run", args.warm_up, args.log_every)
        figures["job_s"] = time.monotonic() - began
        if gpu:
            figures["process_peak_gib"] = memory.stop()
    flops = 3 * matrix_flops_per_pair(load_config(args.model)) * figures["samples_per_second"] / args.gpus
    figures["tflops_per_gpu"] = flops / 1e12
    if peak:
        figures["share_of_peak"] = flops / peak
        figures["peak_tflops"] = peak / 1e12
    machine = f"{args.gpus} x {torch.cuda.get_device_name(0)}" if gpu else "CPU"
    print(
        f"{args.model}, batch {args.batch_size} per GPU, {args.config.name}, {machine}, torch {torch.__version__}, "
        f"{datetime.date.today()}"
    )
    for name, value in figures.items():
        print(f"  {name:20s} {value:12,.3f}")
    if args.json:
        facts = {name: str(value) for name, value in vars(args).items() if name != "json"}
        facts |= {"machine": machine, "torch": torch.__version__, "date": str(datetime.date.today())}
        args.json.write_text(json.dumps({"settings": facts, "figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
