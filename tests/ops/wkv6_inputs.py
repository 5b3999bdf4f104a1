"""Inputs, oracle results and comparison for the tests of WKV6."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rwkv_clip.ops import wkv6, wkv6_reference

NAMES = ("r", "k", "v", "w", "u")


def recorded(path: Path) -> dict[str, Tensor]:
    """A file of the recorded float64 results: r, k, v, w, u, gy, y, gr, gk, gv, gw, gu."""
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def random_inputs(
    shape: tuple[int, int, int, int], w: Tensor | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """r, k, v, gy of `dtype`, w [B, T, H, N] and u [H, N] of float32. Without `w`, uniform in -8 ... 3."""
    generator = torch.Generator().manual_seed(seed)
    r, k, v, gy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    if w is None:
        w = torch.rand(shape, generator=generator) * 11 - 8
    return {"r": r, "k": k, "v": v, "w": w, "u": torch.randn(shape[2:], generator=generator), "gy": gy}


def results(inputs: dict[str, Tensor], device: str, function=wkv6) -> dict[str, Tensor]:
    """y, gr, gk, gv, gw, gu of `function` on `device`."""
    leaves = [inputs[name].detach().to(device).requires_grad_() for name in NAMES]
    y = function(*leaves)
    gradients = torch.autograd.grad(y, leaves, inputs["gy"].to(device), allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **{f"g{name}": gradient for name, gradient in zip(NAMES, gradients, strict=True)}}


def oracle(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same from the readable oracle in float64."""
    return results({name: x.double() for name, x in inputs.items()}, "cpu", wkv6_reference)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖; infinite when a value is not finite, or when zeros are wanted and not found."""
    found, wanted = found.detach().cpu().double(), wanted.double()
    if not found.isfinite().all():
        return float("inf")
    difference, size = (found - wanted).norm().item(), wanted.norm().item()
    return difference / size if size else (float("inf") if difference else 0.0)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], y: float, gradients: float) -> None:
    """Each of y, gr, gk, gv, gw, gu within its relative error; the message names all of them."""
    errors = {name: relative_error(found[name], wanted[name]) for name in ("y", *(f"g{name}" for name in NAMES))}
    too_large = [name for name, error in errors.items() if not error <= (y if name == "y" else gradients)]
    assert not too_large, f"{too_large} beyond {y} (y) or {gradients} (gradients): {errors}"
