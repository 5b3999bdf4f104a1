"""The ops of ops/lerp.py against plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv_clip.model.shift import ImageShift, TextShift
from rwkv_clip.ops import lerp

CASES = {
    # batch, tokens, heads, channels per head, patches per row (None: text), class token
    "image": (3, 12, 2, 80, 4, False),
    "image, one row": (2, 5, 2, 16, 5, False),
    "image, one column": (2, 5, 1, 32, 1, False),
    "image, one patch": (19, 1, 2, 16, 1, False),
    "image, class token": (2, 13, 2, 80, 4, True),
    "text": (3, 7, 4, 8, None, False),
    "text, one token": (5, 1, 2, 64, None, False),
    "text, more than one part": (7, 77, 4, 40, None, False),
}


def largest_error(case: str, dtype: torch.dtype, device: str) -> float:
    """Of all outputs and gradients of both functions: the largest relative error."""
    batch, tokens, heads, size, columns, cls = CASES[case]
    width = heads * size
    shift = TextShift(heads) if columns is None else ImageShift(heads, cls)
    grid = None if columns is None else ((tokens - cls) // columns, columns)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    x, c_x, c = draw(batch, tokens, width), draw(width), draw(5, width)
    w1, w2 = draw(width, 160, scale=width**-0.5), draw(5, 32, width, scale=0.3)
    directions = [draw(batch, tokens, width) for _ in range(5)]
    layout = shift.layout(x, grid)

    def mixed(x: Tensor, c_x: Tensor, w1: Tensor, w2: Tensor, c: Tensor) -> Sequence[Tensor]:
        difference = shift(x, grid) - x
        hidden = torch.tanh((x + difference * c_x).flatten(0, 1) @ w1).view(-1, 5, 32).transpose(0, 1)
        return [x + difference * share for share in (hidden @ w2).view(5, *x.shape) + c[:, None, None]]

    def interpolated(x: Tensor, c: Tensor) -> Sequence[Tensor]:
        return [x + (shift(x, grid) - x) * value for value in c]

    errors = _errors(
        lambda *v: lerp.time_mix_inputs(*v[:4], v[4].unbind(), layout), mixed, [x, c_x, w1, w2, c], directions
    )
    for count in (1, 2):
        errors += _errors(
            lambda x, c: lerp.lerp(x, c.unbind(), layout), interpolated, [x, c[:count]], directions[:count]
        )
    return max(errors)


def _errors(found: Callable, exact: Callable, inputs: list[Tensor], directions: list[Tensor]) -> list[float]:
    first = _results(found, [value.detach().requires_grad_() for value in inputs], directions)
    second = _results(
        exact,
        [value.detach().double().requires_grad_() for value in inputs],
        [value.double() for value in directions],
    )
    for a, b in zip(first, second, strict=True):
        assert a.shape == b.shape and a.dtype == inputs[0].dtype, (a.shape, b.shape, a.dtype)
    return [((a.double() - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in zip(first, second, strict=True)]


def _results(function: Callable, inputs: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    outputs = function(*inputs)
    return [*outputs, *torch.autograd.grad(outputs, inputs, directions)]
