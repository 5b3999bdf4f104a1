"""How speed and memory change with the number of GPUs.

    python benchmarks/scaling.py --measured                  B/32, batch 512 per GPU, on 1, 2, 4, 8 GPUs, as a table
    python benchmarks/scaling.py                             the memory alone, predicted, without a GPU

--measured starts the real job on 1, 2, 4, ... GPUs, as many as there are, and at the most of them once with each ZeRO
stage, stage 3 without compiling. Efficiency is the speed per GPU beside that of one GPU. The share of communication is
the time of NCCL's kernels (gloo's operations on CPUs) in three traced steps of rank 0, waiting for slower ranks
included; with overlap_comm it runs beside other kernels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path

import torch
from job import ROOT, JobFailed, Settings, measure, predicted
from pictures import make_pair
from train_step import machine

from rwkv_clip.training.config import read_config
from rwkv_clip.training.config_keys import STAGE_3_KEYS

STAGES = (1, 2, 3)
HEADER = (
    "| GPUs | ZeRO | img/s | img/s per GPU | efficiency | communication | torch's peak per GPU (predicted) "
    "| masters, moments per GPU |\n|---|---|---|---|---|---|---|---|"
)


def with_stage(config: Path, stage: int, folder: Path) -> Path:
    """A copy of a DeepSpeed JSON with another ZeRO stage, without what does not go with it: `compile` with stage 3."""
    values = read_config(config)
    section = values.get("zero_optimization", {})
    kept = {key: value for key, value in section.items() if stage == 3 or key not in STAGE_3_KEYS}
    values["zero_optimization"] = kept | {"stage": stage}
    if stage == 3:
        values.pop("compile", None)
    path = folder / f"{config.stem}_stage{stage}.json"
    path.write_text(json.dumps(values))
    return path


def jobs(most: int) -> list[tuple[int, int]]:
    """(GPUs, ZeRO stage): 1, 2, 4, ... with stage 1, and the most of them with each other stage."""
    counts = [count for count in (2**power for power in range(10)) if count <= most]
    return [(count, 1) for count in counts] + [(counts[-1], stage) for stage in STAGES if stage != 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", action="store_true", help="run the jobs")
    parser.add_argument("--gpus", type=int, help="most to use (default: all; CPU ranks without a GPU)")
    parser.add_argument("--model", default="RWKV-CLIP-B-32")
    parser.add_argument("--batch-size", type=int, default=512, help="pairs per GPU (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "zero1_bf16.json")
    parser.add_argument("--data", type=Path, help="packed data set, made up there if missing (JPEGs of 500 x 375)")
    parser.add_argument("--records", type=int, default=24576, help="made-up records (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=20, help="steps not counted (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps counted (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps per interval (default: %(default)s)")
    parser.add_argument("--port", type=int, default=29521)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one job (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()

    most = args.gpus or (max(torch.cuda.device_count(), 1) if args.measured else 8)
    print(f"{args.model}, batch {args.batch_size} per GPU, {args.config.name}, up to {most} x {machine()}, ", end="")
    print(f"torch {torch.__version__}, {datetime.date.today()}\n{HEADER}", flush=True)
    results, alone, status = [], None, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = args.data or folder / "made-up"
        if args.measured and not data.exists() and not data.with_name(data.name + ".rec").exists():
            make_pair(data, max(args.records, args.batch_size * most))
        for gpus, stage in jobs(most):
            config = with_stage(args.config, stage, folder)
            plan = predicted(args.model, config, args.batch_size, gpus)
            figures: dict = {}
            if args.measured:
                settings = Settings(args.model, config, args.batch_size, data, gpus, args.warm_up, args.steps)
                settings.log_every, settings.port, settings.timeout = args.log_every, args.port, args.timeout
                try:
                    figures = measure(settings, folder / f"run_{gpus}_{stage}")
                except JobFailed as error:
                    print(f"{gpus} GPUs, ZeRO-{stage}: {error}", file=sys.stderr, flush=True)
                    status = 1
                    continue
                if gpus == 1:
                    alone = figures["samples_per_second"]
            print(line(gpus, stage, figures, plan, alone), flush=True)
            results.append({"gpus": gpus, "stage": stage, "figures": figures, "plan": plan})
            if args.json:
                args.json.write_text(json.dumps({"machine": machine(), "rows": results}, indent=1) + "\n")
    return status


def line(gpus: int, stage: int, figures: dict, plan: dict, alone: float | None) -> str:
    """One row in Markdown."""
    speed, peak = figures.get("samples_per_second"), plan["peak"] / 2**30
    measured = (
        [
            f"{speed:,.0f}",
            f"{speed / gpus:,.0f}",
            f"{100 * speed / gpus / alone:.1f} %" if alone else "",
            f"{figures.get('communication_pct', float('nan')):.1f} %",
            f"{figures['torch_peak_gib']:.2f} GiB ({peak:.2f})",
        ]
        if figures
        else ["", "", "", "", f"({peak:.2f} GiB)"]
    )
    return f"| {gpus} | {stage} | {' | '.join(measured)} | {plan['masters_and_moments'] / 2**30:.2f} GiB |"


if __name__ == "__main__":
    sys.exit(main())
