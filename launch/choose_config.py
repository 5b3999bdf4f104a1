"""Print the DeepSpeed JSON that suits this machine: bf16 where it is fast, otherwise fp16 on a GPU and fp32 on a CPU.

Many CPUs have bf16 instructions missing or slow, so a short matrix product decides there.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[1] / "ds_configs"


def seconds(dtype: torch.dtype) -> float:
    """Best time of a few products of the size that RWKV-CLIP-Nano has."""
    a, b = torch.randn(8192, 96).to(dtype), torch.randn(96, 384).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    if torch.cuda.is_available():
        name = "zero1_bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "zero1_fp16"
    else:
        name = "zero1_bf16" if seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else "fp32"
    print(FOLDER / f"{name}.json")


if __name__ == "__main__":
    main()
