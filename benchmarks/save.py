"""What a save costs: how long training waits for the copy, and how long the thread then writes.

    python benchmarks/save.py                                  B/32 on one rank, ZeRO-1 bf16, this machine's device
    python benchmarks/save.py --model RWKV-CLIP-B-16 --folder /mnt/runs --repeat 10

One rank holds all of the optimizer's state; with W ranks each copies and writes 1/W of it. The folder decides what disk
is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from rwkv_clip import create_model
from rwkv_clip.training.distributed import choose_device, meet, share_cores, start_collectives
from rwkv_clip.training.launcher import find_place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="RWKV-CLIP-B-32", help="model name or JSON file")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--repeat", type=int, default=5, help="saves to measure (default 5)")
    args = parser.parse_args()
    place = find_place()
    device = choose_device(place)
    share_cores(place)
    world = meet(place, device, 50, "save")
    place.export()
    start_collectives(world)

    import deepspeed

    from rwkv_clip.training.checkpoint import Checkpoints, Position
    from rwkv_clip.training.optimizer import build_optimizer

    model = create_model(args.model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(model, 1e-4, 0.2), config=config)
    engine.backward(sum(parameter.float().sum() for parameter in engine.module.parameters()))
    engine.step()  # so that there are moments
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpoints = Checkpoints(world, Path(folder), keep_last=1, keep_every=None)
        waits, writes = [], []
        for step in range(1, args.repeat + 1):
            started = time.perf_counter()
            checkpoints.save(engine, Position(step), {"world_size": 1}, {})
            copied = time.perf_counter()
            checkpoints.finish()
            waits.append(copied - started)
            writes.append(time.perf_counter() - copied)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    print(f"{args.model} on {device}: {size / 2**30:.2f} GiB a save")
    print(f"training waits {statistics.median(waits):.2f} s, the thread writes {statistics.median(writes):.2f} s more")


if __name__ == "__main__":
    main()
    os._exit(0)
