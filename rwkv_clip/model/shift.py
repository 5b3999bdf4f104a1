"""Token shifts: each token sees its neighbours', one group of channels per direction; zeros come in at the borders.

Within every head the channels are split in equal groups, as in the published model: images use four (from the left,
from the right, from above, from below), texts two (from the token before, from the token after).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.lerp import Layout

Directions = tuple[tuple[int, int], ...]
"""Per group of channels: the axis, and 1 to take the neighbour before or -1 to take the one after."""
IMAGE_DIRECTIONS: Directions = ((2, 1), (2, -1), (1, 1), (1, -1))
TEXT_DIRECTIONS: Directions = ((1, 1), (1, -1))


class ImageShift:
    """The four-way shift of one tower: called as shift(x, grid)."""

    def __init__(self, num_heads: int, with_cls_token: bool) -> None:
        self.num_heads, self.with_cls_token = num_heads, with_cls_token

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return shift_image(x, grid, self.num_heads, self.with_cls_token)

    def layout(self, x: Tensor, grid: tuple[int, int]) -> Layout:
        """For the ops of ops/lerp.py."""
        return grid[1], x.shape[2] // self.num_heads, len(IMAGE_DIRECTIONS), self.with_cls_token


class TextShift:
    """The two-way shift of one tower: called as shift(x, None)."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def __call__(self, x: Tensor, grid: None) -> Tensor:
        return shift_text(x, grid, self.num_heads)

    def layout(self, x: Tensor, grid: None) -> Layout:
        """For the ops of ops/lerp.py."""
        return x.shape[1], x.shape[2] // self.num_heads, len(TEXT_DIRECTIONS), False


def shift_image(x: Tensor, grid: tuple[int, int], num_heads: int, with_cls_token: bool) -> Tensor:
    """Four-way 2-D shift by one patch: (B, T, C) -> (B, T, C).

    Args:
        x: [B, rows * columns (+ 1), C]; C / num_heads is a multiple of 4. The class token, if any, is the last token
            and stays as it is.
        grid: rows and columns of patches.
    """
    if with_cls_token:
        return torch.cat((shift_image(x[:, :-1], grid, num_heads, False), x[:, -1:]), dim=1)
    groups = x.unflatten(2, (num_heads, 4, -1)).unflatten(1, grid)  # [B, rows, columns, H, 4, N / 4]
    return _Shift.apply(groups, IMAGE_DIRECTIONS).view(x.shape)


def shift_text(x: Tensor, grid: None, num_heads: int) -> Tensor:
    """Two-way 1-D shift by one token: (B, T, C) -> (B, T, C); C / num_heads is even, `grid` is not used."""
    groups = x.unflatten(2, (num_heads, 2, -1))  # [B, T, H, 2, N / 2]
    return _Shift.apply(groups, TEXT_DIRECTIONS).view(x.shape)


class _Shift(torch.autograd.Function):
    """Shift of groups [B, ..., H, groups, channels]; its gradient is the shift in the opposite directions.

    Written out because autograd's own gradient of the slices fills and adds a whole tensor for each of them.
    """

    @staticmethod
    def forward(ctx: Any, groups: Tensor, directions: Directions) -> Tensor:
        ctx.directions = directions
        return _shift_groups(groups, directions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        opposite = tuple((axis, -step) for axis, step in ctx.directions)
        return _shift_groups(gradient, opposite), None


def _shift_groups(groups: Tensor, directions: Directions) -> Tensor:
    # Pads and a stack, not slice assignments: a compiler turns them into one read per element inside its consumers.
    shifted = []
    for group, (axis, step) in zip(groups.unbind(-2), directions, strict=True):
        inner = group.shape[axis] - 1
        border = (1, 0) if step > 0 else (0, 1)
        later_axes = (0, 0) * (group.ndim - 1 - axis)
        shifted.append(F.pad(group.narrow(axis, border[1], inner), later_axes + border))
    return torch.stack(shifted, dim=-2)
