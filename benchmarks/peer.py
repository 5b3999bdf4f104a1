"""open_clip's ViT-B/32 as its users train it: bf16 autocast, fused AdamW, clipping, plain and compiled."""

from __future__ import annotations

import importlib.util
import time

import torch
from torch import Tensor

MISSING = "open_clip is not installed here (pip install open_clip_torch): the comparison is left out"


def is_installed() -> bool:
    return importlib.util.find_spec("open_clip") is not None


def measure(batches: list[tuple[Tensor, Tensor]], warm_up: int = 10, steps: int = 30) -> dict[str, dict[str, float]]:
    """ "eager" and "compiled" -> pairs per second and peak GiB beside what was in use before.

    batches: (images [B, 3, 224, 224], CLIP token ids [B, 77]) on the device.
    """
    device = batches[0][0].device
    return {name: _train(batches, device, name == "compiled", warm_up, steps) for name in ("eager", "compiled")}


def _train(batches, device: torch.device, compiled: bool, warm_up: int, steps: int) -> dict[str, float]:
    import open_clip

    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    model = open_clip.create_model("ViT-B-32", device=device)
    model.train()
    loss_function = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.2, fused=True)
    forward = torch.compile(model) if compiled else model

    def step(number: int) -> None:
        images, tokens = batches[number % len(batches)]
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_function(*forward(images, tokens))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for number in range(warm_up):
        step(number)
    _wait(device)
    started = time.perf_counter()
    for number in range(steps):
        step(number)
    _wait(device)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return {"samples_per_second": steps * len(batches[0][0]) / seconds, "torch_peak_gib": peak / 2**30}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
