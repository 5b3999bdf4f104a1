"""WKV6 on the CPU: the C++ op and plain torch against the readable oracle, forward + backward in float32.

    python benchmarks/wkv6_cpu.py [--threads 2] [--json]

Columns: milliseconds of the fastest of several runs, how many times faster than the oracle the op is, and the largest
relative error of y and of the gradients against the oracle in float64. The oracle is a loop over tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rwkv_clip.ops import prepare, wkv6, wkv6_reference
from rwkv_clip.ops.wkv6_torch import wkv6_torch_backward, wkv6_torch_forward

# B, T, H, N: image and text of B-32, image of B-16, image and text of Nano.
SHAPES = ((8, 49, 8, 80), (8, 77, 10, 64), (2, 196, 8, 80), (64, 36, 3, 32), (64, 40, 3, 32))


class PlainTorch(torch.autograd.Function):
    """What serves where there is no compiler."""

    @staticmethod
    def forward(ctx, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return wkv6_torch_forward(*inputs)

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, ...]:
        return wkv6_torch_backward(*ctx.saved_tensors, grad_y)


def inputs_of(shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    r, k, v, w, gy = (torch.randn(shape, generator=generator) for _ in range(5))
    return [r, k, v, w - 2, torch.randn(shape[2:], generator=generator)], gy


def results(function: Callable, inputs: list[Tensor], gy: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, gy))


def milliseconds(function: Callable, inputs: list[Tensor], gy: Tensor, seconds: float = 2.0) -> float:
    """The fastest of as many forward + backward passes as fit in `seconds`, at least three."""
    times = []
    results(function, inputs, gy)
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        results(function, inputs, gy)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def measure(shape: tuple[int, ...]) -> dict:
    inputs, gy = inputs_of(shape)
    exact = results(wkv6_reference, [x.double() for x in inputs], gy.double())
    found = results(wkv6, inputs, gy)
    op, plain, oracle = (milliseconds(function, inputs, gy) for function in (wkv6, PlainTorch.apply, wkv6_reference))
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))
    return {"shape": shape, "op_ms": op, "torch_ms": plain, "oracle_ms": oracle, "speedup": oracle / op, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    assert prepare("cpu") == "cpu", "the C++ op cannot be built here: see `rwkv-clip report`"
    if not args.json:
        instructions = torch.ops.rwkv_clip.wkv6_cpu_instruction_set()
        print(f"{args.threads} threads, {instructions}, torch {torch.__version__}")
        print(f"{'B, T, H, N':>16} {'op ms':>9} {'torch ms':>9} {'oracle ms':>9} {'speed-up':>9} {'error':>9}")
    for shape in SHAPES:
        row = measure(shape)
        if args.json:
            print(json.dumps({"threads": args.threads, **row}))
        else:
            times = f"{row['op_ms']:9.2f} {row['torch_ms']:9.1f} {row['oracle_ms']:9.1f}"
            print(f"{', '.join(map(str, shape)):>16} {times} {row['speedup']:8.0f}x {row['error']:9.1e}")


if __name__ == "__main__":
    main()
