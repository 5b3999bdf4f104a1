"""Speed and memory of the real training job, measured from its own metrics.

    python benchmarks/train_step.py --table --data FOLDER                 every row of the README's table, as Markdown
    python benchmarks/train_step.py                                       B/32, batch 512, made-up JPEGs, the GPU
    python benchmarks/train_step.py --config ds_configs/zero1_bf16_checkpointing.json --batch-size 4096
    python benchmarks/train_step.py --peer open_clip --json out.json      beside open_clip's ViT-B/32

Starts `deepspeed` as a user does: engine, loss, optimizer, clipping, logging and the data path from JPEGs in shards are
all on. Speed is the median over the log intervals after the warm-up. The same run then trains on batches that it kept:
the difference is what the data path costs. FLOP/s count the matrix products of the model (forward once, backward
twice), not the operator or element-wise work; the peak beside it is a product of 8192 x 8192 bf16 matrices measured
first, on the same machine. Memory is torch's max_memory_allocated of the fullest GPU, what `rwkv-clip plan` predicts
for it, and what NVML says is in use.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import peer
import torch
from job import ROOT, JobFailed, Settings, measure, predicted
from pictures import make_pair

from rwkv_clip.model.config import ModelConfig, load_config

# (model, file in ds_configs/, batch size) of each row of the README's table.
TABLE = [
    ("RWKV-CLIP-B-32", "zero1_bf16", 512),
    ("RWKV-CLIP-B-32", "zero1_bf16_compile", 512),
    ("RWKV-CLIP-B-32", "zero1_bf16_selective", 512),
    ("RWKV-CLIP-B-32", "zero1_bf16_checkpointing", 512),
    ("RWKV-CLIP-B-32", "zero1_bf16_checkpointing", 4096),
    ("RWKV-CLIP-B-32", "zero1_bf16_compile", 256),
    ("RWKV-CLIP-B-32", "zero1_bf16_checkpointing", 2048),
    ("RWKV-CLIP-B-16", "zero1_bf16_compile", 512),
    ("RWKV-CLIP-B-32", "zero2_bf16", 512),
    ("RWKV-CLIP-B-32", "zero3_bf16", 512),
    ("RWKV-CLIP-B-32", "zero1_bf16_offload", 512),
    ("RWKV-CLIP-B-32", "zero1_bf16_profile", 512),
    ("RWKV-CLIP-B-32", "zero1_fp16", 512),
    ("RWKV-CLIP-B-32", "fp32", 512),
]


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
    """Best of a few bf16 products of 8192 x 8192 random matrices, FLOP/s; None without a GPU.

    In a process of its own, whose CUDA context is gone when the job is measured.
    """
    if not torch.cuda.is_available():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_flops)


def _peak_flops() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * 8192**3 / min(times)


def machine() -> str:
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return f"{len(os.sched_getaffinity(0))} CPU cores"
    return torch.cuda.get_device_name(0)


def row(args: argparse.Namespace, folder: Path, data: Path, peak: float | None) -> dict:
    """All figures of one job."""
    settings = Settings(
        model=args.model,
        config=args.config,
        batch_size=args.batch_size,
        data=data,
        gpus=args.gpus,
        warm_up=args.warm_up,
        steps=args.steps,
        log_every=args.log_every,
        port=args.port,
        timeout=args.timeout,
        peer=args.peer is not None and peer.is_installed(),
        flags=args.flags,
    )
    figures = measure(settings, folder / f"run_{args.config.stem}_{args.batch_size}_{args.model}")
    figures["predicted_peak_gib"] = predicted(args.model, args.config, args.batch_size, args.gpus)["peak"] / 2**30
    flops = 3 * matrix_flops_per_pair(load_config(args.model)) * figures["samples_per_second"] / args.gpus
    figures["tflops_per_gpu"] = flops / 1e12
    if peak:
        figures["share_of_peak_pct"] = 100 * flops / peak
        figures["peak_tflops"] = peak / 1e12
    return figures


def report(figures: dict, indent: str = "  ") -> None:
    """Print figures, those that hold others indented below their name."""
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            report(value, indent + "    ")
        else:
            print(f"{indent}{name:30s} {value:12,.3f}")


def table_line(args: argparse.Namespace, figures: dict) -> str:
    """One row of the table in Markdown."""
    name = args.model.removeprefix("RWKV-CLIP-")
    unknown = float("nan")
    start = figures["start_phases_s"].get("until the first step has ended", unknown)
    process = figures.get("process_peak_gib", unknown)
    lost, share = figures.get("data_loss_pct", unknown), figures.get("share_of_peak_pct", unknown)
    return (
        f"| {name}, {args.batch_size}, `{args.config.name}` | {figures['samples_per_second']:,.0f} img/s | "
        f"{figures['step_ms']:.1f} ms | {figures['torch_peak_gib']:.1f} GiB ({process:.1f}) | "
        f"{figures['predicted_peak_gib']:.1f} GiB | {figures['data_wait_pct']:.1f} % | "
        f"{lost:.1f} % | {share:.0f} % | {start:.0f} s |"
    )


HEADER = (
    "| model, batch, file | speed | step | torch's peak (process) | predicted | data wait | lost to data "
    "| of the matrix peak | start to first step |\n|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="measure every row of the README's table")
    parser.add_argument("--only", default="", help="with --table: rows whose name contains this, such as B-16 or fp16")
    parser.add_argument("--model", default="RWKV-CLIP-B-32")
    parser.add_argument("--batch-size", type=int, default=512, help="pairs per GPU (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "zero1_bf16.json")
    parser.add_argument("--data", type=Path, help="packed data set, made up there if missing (JPEGs of 500 x 375)")
    parser.add_argument("--records", type=int, default=24576, help="made-up records (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=20, help="steps not counted (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps counted (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps per interval (default: %(default)s)")
    parser.add_argument("--peer", choices=("open_clip",), help="measure it as well, on the same batches")
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one job (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("flags", nargs="*", help="after --: more flags for launch/train.py")
    args = parser.parse_args()

    if args.peer and not peer.is_installed():
        print(peer.MISSING, flush=True)
    rows = [(args.model, args.config, args.batch_size)]
    if args.table:
        rows = [(model, ROOT / "ds_configs" / f"{name}.json", batch) for model, name, batch in TABLE]
        rows = [row for row in rows if args.only in f"{row[0]} {row[1].stem} {row[2]}"]
    peak, status, results = peak_flops(), 0, []
    print(f"{args.gpus} x {machine()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = args.data or folder / "made-up"
        if not data.exists() and not data.with_name(data.name + ".rec").exists():
            most = max(batch for _, _, batch in rows)
            make_pair(data, max(args.records, most * args.gpus))
        if args.table:
            print(HEADER, flush=True)
        for args.model, args.config, args.batch_size in rows:
            name = f"{args.model}, batch {args.batch_size} per GPU, {args.config.name}"
            try:
                figures = row(args, folder, data, peak)
            except JobFailed as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                status = 1
                continue
            results.append({"name": name, "figures": figures})
            if args.table:
                print(table_line(args, figures), flush=True)
            else:
                print(name)
                report(figures)
            if args.json:  # after every row, as the next one may take the time that is left
                facts = {"machine": f"{args.gpus} x {machine()}", "torch": torch.__version__}
                facts |= {"date": str(datetime.date.today()), "flags": args.flags}
                args.json.write_text(json.dumps({"settings": facts, "rows": results}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
