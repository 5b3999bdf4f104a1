"""WKV6 on a GPU: the CUDA op beside the readable oracle and the memory floor, then flash-linear-attention if asked for.

    python benchmarks/wkv6.py [--json] [--shapes 512,49,8,80 16,1024,8,80] [--fla [--fla-timeout 300]]

Times are medians of CUDA graph replays over two sets of inputs in turn, in milliseconds; fwd+bwd is the sum of both
passes. The floor is what moving the inputs and outputs once takes at the speed of a device-to-device copy measured in
the same run. Errors are the largest of y and the gradients against the oracle in float64, at batch 2. Peak memory is
what a forward and a backward pass add beside their outputs, as a share of the outputs. The oracle and
flash-linear-attention are called plainly, not from a graph; the latter tries out its kernels' variants first, which
takes minutes, so that it runs last, each shape in a process of its own that is ended after a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from rwkv_clip.errors import UserError
from rwkv_clip.ops import prepare, wkv6_reference

# B, T, H, N: image of B-32, text, image of B-16, and two long sequences.
SHAPES = ((512, 49, 8, 80), (512, 77, 10, 64), (512, 196, 8, 80), (16, 1024, 8, 80), (16, 4096, 8, 80))
DTYPES = {
    "bf16, w fp32": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32": (torch.float32,) * 2,
}
FLA_DTYPES = ("bf16, w fp32", "bf16")
ORACLE_BYTES = 60e9  # that the oracle's states may take under autograd; larger shapes are left out
NAMES = ("y", "gr", "gk", "gv", "gw", "gu")


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, w_dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """r, k, v, w, u, gy on the GPU; w around -3, as in trained models."""
    generator = torch.Generator("cuda").manual_seed(seed)
    r, k, v, w, gy = (torch.randn(shape, generator=generator, device="cuda") for _ in range(5))
    u = torch.randn(shape[2:], generator=generator, device="cuda")
    return r.to(dtype), k.to(dtype), v.to(dtype), (w * 1.5 - 3).to(w_dtype), u, gy.to(dtype)


def forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.rwkv_clip.wkv6(r, k, v, w, u),)


def backward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.rwkv_clip.wkv6_backward(r, k, v, w, u, gy)


def replay_ms(function: Callable[[int], object], calls: int = 4, replays: int = 9) -> float:
    """Median milliseconds of one of `calls` calls (of function(0), function(1), ...) in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            function(i)
    return median_ms(graph.replay, replays) / calls


def median_ms(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bytes_per_ms() -> float:
    """Bytes read and written per millisecond by a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    started = time.monotonic()
    while time.monotonic() - started < 0.5:  # an idle GPU's clocks need a while to rise
        target.copy_(source)
        torch.cuda.synchronize()
    # Not in a graph, whose copies need not take the way of a plain one.
    return 2 * 4 * source.numel() / median_ms(lambda: [target.copy_(source) for _ in range(4)], 20)


def moved_bytes(inputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """Bytes that the forward and the backward pass have to read and write."""
    r, _, _, w, _, _ = inputs
    each, decay = r.numel() * r.element_size(), w.numel() * w.element_size()
    return 4 * each + decay, 7 * each + 2 * decay


def oracle_ms(inputs: tuple[Tensor, ...]) -> float | None:
    """Forward + backward of the oracle; None where its states do not fit."""
    batch, tokens, heads, size = inputs[0].shape
    if 5 * 4 * batch * tokens * heads * size**2 > ORACLE_BYTES:
        return None

    def run() -> None:
        leaves = [x.detach().float().requires_grad_() for x in inputs[:5]]
        torch.autograd.grad(wkv6_reference(*leaves), leaves, inputs[5].float())

    return median_ms(run, 3)


def fla_ms(inputs: tuple[Tensor, ...]) -> float:
    """Forward + backward of flash-linear-attention's chunk_rwkv6 in both directions."""
    from fla.ops.rwkv6 import chunk_rwkv6

    r, k, v, w, u, gy = inputs
    zero = torch.zeros_like(u)

    def run() -> None:
        leaves = [x.detach().requires_grad_() for x in (r, k, v, w, u)]
        log_decay = -torch.exp(leaves[3].float())
        there = chunk_rwkv6(*leaves[:3], log_decay, leaves[4].to(r.dtype), scale=1.0)[0]
        reverse = [x.flip(1) for x in (*leaves[:3], log_decay)]
        back = chunk_rwkv6(*reverse, zero.to(r.dtype), scale=1.0)[0].flip(1)
        torch.autograd.grad(there + back, leaves, gy)

    return median_ms(run, 5)


def send_fla(results: Connection, shape: tuple[int, ...]) -> None:
    """`fla_ms` for each of FLA_DTYPES, as they come. The process that `fla_cells` starts."""
    for label in FLA_DTYPES:
        results.send(fla_ms(make_inputs(shape, *DTYPES[label], seed=0)))


def fla_cells(shape: tuple[int, ...], seconds: float) -> list[float | str]:
    """`fla_ms` for each of FLA_DTYPES; "timeout" for what is not there after so long, "failed" after an error."""
    spawn = multiprocessing.get_context("spawn")  # a fork cannot use the GPU
    results, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=send_fla, args=(sender, shape), daemon=True)
    process.start()
    sender.close()  # so that the end of the process ends `results`
    deadline = time.monotonic() + seconds
    cells: list[float | str] = []
    for _ in FLA_DTYPES:
        try:
            cells.append(results.recv() if results.poll(max(deadline - time.monotonic(), 0)) else "timeout")
        except EOFError:
            cells.append("failed")
    process.kill()
    process.join()
    return cells


def largest_error(shape: tuple[int, ...], dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[float, str]:
    """The largest relative error and the result that has it, at batch 2 (1 for long sequences)."""
    batch = min(shape[0], 2 if shape[1] < 1000 else 1)
    heads = shape[2] if shape[1] < 1000 else 2
    inputs = make_inputs((batch, shape[1], heads, shape[3]), dtype, w_dtype, seed=7)
    leaves = [x.detach().double().requires_grad_() for x in inputs[:5]]
    y = wkv6_reference(*leaves)
    exact = (y.detach(), *torch.autograd.grad(y, leaves, inputs[5].double()))
    found = (*forward(*inputs), *backward(*inputs))
    errors = ((a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True))
    return max((error.item(), name) for error, name in zip(errors, NAMES, strict=True))


def extra_memory(inputs: tuple[Tensor, ...]) -> float:
    """Peak memory of both passes beside their outputs, as a share of the outputs' memory."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = (*forward(*inputs), *backward(*inputs))
    size = sum(x.numel() * x.element_size() for x in outputs)
    return (torch.cuda.max_memory_allocated() - before - size) / size


def measure(shape: tuple[int, ...], label: str, bytes_per_ms: float) -> dict:
    dtype, w_dtype = DTYPES[label]
    sets = tuple(make_inputs(shape, dtype, w_dtype, seed) for seed in range(2))
    forward_bytes, backward_bytes = moved_bytes(sets[0])
    forward_ms = replay_ms(lambda i: forward(*sets[i % 2]))
    backward_ms = replay_ms(lambda i: backward(*sets[i % 2]))
    error, error_of = largest_error(shape, dtype, w_dtype)
    return {
        "shape": shape,
        "dtype": label,
        "forward_ms": forward_ms,
        "both_ms": forward_ms + backward_ms,
        "forward_floor_ms": forward_bytes / bytes_per_ms,
        "both_floor_ms": (forward_bytes + backward_bytes) / bytes_per_ms,
        "extra_memory": extra_memory(sets[0]),
        "oracle_ms": oracle_ms(sets[0]),
        "error": error,
        "error_of": error_of,
    }


def cell(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else "-".rjust(int(form.split(".")[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--shapes", nargs="+", metavar="B,T,H,N", help="instead of the models' and two long ones")
    parser.add_argument("--fla", action="store_true", help="flash-linear-attention at the end")
    parser.add_argument("--fla-timeout", type=float, default=300, metavar="SECONDS", help="for one shape (%(default)s)")
    args = parser.parse_args()
    if args.fla and importlib.util.find_spec("fla") is None:
        raise SystemExit("wkv6.py: --fla needs flash-linear-attention: pip install flash-linear-attention")
    shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes] if args.shapes else SHAPES
    try:
        prepare("cuda")
    except UserError as error:
        raise SystemExit(f"wkv6.py: {error}") from None
    bytes_per_ms = copy_bytes_per_ms()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_s": bytes_per_ms / 1e9}
    if not args.json:
        print(f"{machine['device']}, torch {machine['torch']}, copy {machine['copy_tb_s']:.2f} TB/s")
        heads = (
            "B, T, H, N",
            "dtype",
            "fwd",
            "floor",
            "fwd+bwd",
            "floor",
            "oracle",
            "speed-up",
            "error",
            "of",
            "memory",
        )
        print("{:>16} {:>12} {:>7} {:>7} {:>8} {:>7} {:>8} {:>8} {:>8} {:>3} {:>7}".format(*heads))
    for shape in shapes:
        for label in DTYPES:
            row = measure(shape, label, bytes_per_ms)
            if args.json:
                print(json.dumps({**machine, **row}), flush=True)
                continue
            speed_up = row["oracle_ms"] and row["oracle_ms"] / row["both_ms"]
            print(
                f"{', '.join(map(str, shape)):>16} {label:>12} {row['forward_ms']:7.3f} {row['forward_floor_ms']:7.3f} "
                f"{row['both_ms']:8.3f} {row['both_floor_ms']:7.3f} {cell(row['oracle_ms'], '8.1f')} "
                f"{cell(speed_up, '8.0f')} {row['error']:8.1e} {row['error_of']:>3} {row['extra_memory']:7.1%}",
                flush=True,
            )
    torch.cuda.empty_cache()
    for shape in shapes if args.fla else ():
        for label, found in zip(FLA_DTYPES, fla_cells(shape, args.fla_timeout), strict=True):
            if args.json:
                print(json.dumps({**machine, "shape": shape, "dtype": label, "fla_ms": found}), flush=True)
            else:
                text = found if isinstance(found, str) else f"{found:.2f}"
                print(f"{', '.join(map(str, shape)):>16} {label:>12} flash-linear-attention {text:>8}", flush=True)


if __name__ == "__main__":
    main()
