"""Token shift with interpolation on a GPU: the op's four calls at the models' shapes, beside a copy.

    python benchmarks/lerp.py

Times are medians of CUDA graph replays over two sets of inputs in turn, in microseconds. Passes count how often a
tensor of x's size is read or written at the least; TB/s is what that makes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from wkv6 import copy_bytes_per_ms, replay_ms

from rwkv_clip.ops import lerp, prepare

SHAPES = {
    "B-32 image": ((512, 49, 640), (7, 80, 4, False)),
    "text": ((512, 77, 640), (77, 64, 2, False)),
    "B-16 image": ((512, 196, 640), (14, 80, 4, False)),
}


OPS = torch.ops.rwkv_clip
# Passes over memory at the least, and the call.
CALLS = {
    "lerp, one result": (2, lambda s, layout: OPS.lerp(s["x"], s["c"][:1], *layout)),
    "lerp, two results": (3, lambda s, layout: OPS.lerp(s["x"], s["c"][:2], *layout)),
    "its backward, one and more": (
        5,
        lambda s, layout: OPS.lerp_backward(s["x"], s["c"][:1], s["g"][:1], s["base"], s["extra"], *layout),
    ),
    "its backward, two": (4, lambda s, layout: OPS.lerp_backward(s["x"], s["c"][:2], s["g"][:2], None, None, *layout)),
    "ddlerp": (6.25, lambda s, layout: OPS.ddlerp(s["x"], s["hidden"], s["w2"], s["c"], *layout)),
    "its backward": (
        14.75,
        lambda s, layout: OPS.ddlerp_backward(s["x"], s["hidden"], s["w2"], s["c"], s["g"], *layout),
    ),
}


def make_inputs(shape: tuple[int, int, int], seed: int) -> dict:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device="cuda").bfloat16()

    batch, tokens, width = shape
    hidden, w2 = torch.tanh(draw(batch * tokens, 160)), draw(5, 32, width) * 0.1
    gradients, base, extra = [draw(*shape) for _ in range(5)], draw(*shape), draw(*shape)
    c = torch.randn(5, width, generator=generator, device="cuda")
    return {"x": draw(*shape), "hidden": hidden, "w2": w2, "c": c, "g": gradients, "base": base, "extra": extra}


def microseconds(call: Callable, shape: tuple[int, int, int], layout: lerp.Layout) -> float:
    sets = [make_inputs(shape, seed) for seed in range(2)]
    return 1e3 * replay_ms(lambda i: call(sets[i % 2], layout))


def main() -> int:
    if not torch.cuda.is_available():
        print("lerp.py: no GPU here", file=sys.stderr)
        return 1
    prepare("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy_bytes_per_ms() / 1e9:.2f} TB/s")
    print(f"{'shape':>12} {'call':>28} {'us':>8} {'passes':>7} {'TB/s':>6}")
    for name, (shape, layout) in SHAPES.items():
        for call, (passes, function) in CALLS.items():
            us = microseconds(function, shape, layout)
            rate = passes * 2 * math.prod(shape) / us / 1e6
            print(f"{name:>12} {call:>28} {us:8.1f} {passes:7} {rate:6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
