"""Speed and memory of encoding with the Python interface.

    python benchmarks/inference.py                           B/32, bf16: encode_image at batch 512 and 1, encode_text
    python benchmarks/inference.py --compile                 the same under torch.compile
    python benchmarks/inference.py --published RWKV-CLIP     beside the published code's encode_image (published.py)

Speed is the median over repetitions, each ended by a wait for the device. Memory is the most that torch held, weights
and input included, and on a GPU what NVML says is in use, CUDA's own context included; each batch size is measured in a
process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import published
import torch
from job import ProcessMemory, gpu_ids
from train_step import machine

from rwkv_clip.errors import UserError
from rwkv_clip.model.config import load_config
from rwkv_clip.training.arguments import COUNT

CASES = (("encode_image", 512), ("encode_text", 512), ("encode_image", 1), ("encode_text", 1))


def encode(model_name: str, method: str, batch: int, compiled: bool, repetitions: int) -> dict[str, float]:
    """Milliseconds per call, samples per second, and GiB."""
    import rwkv_clip

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = ProcessMemory(gpu_ids(1))
    if device.type == "cuda":
        memory.start()
    model = rwkv_clip.create_model(model_name, device=device, dtype=torch.bfloat16).eval()
    image, text = model.config.image, model.config.text
    if method == "encode_image":
        given = torch.randn(batch, 3, image.image_size, image.image_size, device=device)
    else:
        given = torch.randint(1, text.vocab_size, (batch, text.context_length), device=device)
    function = getattr(model, method)
    if compiled:
        function = torch.compile(function)
    times = []
    with torch.inference_mode():
        for _ in range(repetitions + 5):
            started = time.perf_counter()
            function(given, normalize=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    seconds = statistics.median(times[5:])
    figures = {"ms": 1e3 * seconds, "samples_per_second": batch / seconds}
    if device.type == "cuda":
        time.sleep(1)
        figures |= {
            "torch_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "process_peak_gib": memory.stop(),
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="RWKV-CLIP-B-32")
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument("--batch-size", type=COUNT, default=512, help="of the large batches (default: %(default)s)")
    parser.add_argument("--repetitions", type=COUNT, default=50, help="calls that are timed (default: %(default)s)")
    parser.add_argument(
        "--published", type=published.checkout, metavar="FOLDER", help="a checkout of the published code"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    try:
        model = load_config(args.model).name
    except UserError as error:
        parser.error(str(error))
    if args.published and model not in published.CONFIGS:
        parser.error(f"--published knows {' and '.join(published.CONFIGS)}, found --model {args.model}")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    print(f"{args.model}, bf16{', compiled' * args.compile}, {machine()}, torch {torch.__version__}, ", end="")
    print(datetime.date.today())
    print("| call | batch | samples/s | ms | torch's peak | process |\n|---|---|---|---|---|---|", flush=True)
    cases = [(method, encode, (args.model, method), size) for method, size in CASES]
    if args.published:
        cases.insert(1, ("published encode_image, not compiled", published.encode_image, (args.published, model), 512))
    results = []
    for name, function, given, size in cases:
        batch = args.batch_size if size > 1 else 1
        given = (*given, batch, args.compile) if function is encode else (*given, batch)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            figures = pool.apply(function, (*given, args.repetitions))
        results.append({"method": name, "batch": batch, **figures})
        cells = [name, str(batch), f"{figures['samples_per_second']:,.0f}", f"{figures['ms']:.2f}"]
        for key in ("torch_peak_gib", "process_peak_gib"):
            cells.append(f"{figures[key]:.2f} GiB" if key in figures else "")
        print(f"| {' | '.join(cells)} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "model": args.model, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
