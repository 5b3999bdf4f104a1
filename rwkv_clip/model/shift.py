"""Token shifts: each token sees its neighbours', one group of channels per direction; zeros come in at the borders.

Within every head the channels are split in equal groups, as in the published model: images use four (from the left,
from the right, from above, from below), texts two (from the token before, from the token after).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def shift_image(x: Tensor, grid: tuple[int, int], num_heads: int, with_cls_token: bool) -> Tensor:
    """Four-way 2-D shift by one patch: (B, T, C) -> (B, T, C).

    Args:
        x: [B, rows * columns (+ 1), C]; C / num_heads is a multiple of 4. The class token, if any, is the last token
            and stays as it is.
        grid: rows and columns of patches.
    """
    rows, columns = grid
    patches = x[:, :-1] if with_cls_token else x
    quarters = patches.unflatten(2, (num_heads, 4, -1)).unflatten(1, (rows, columns))  # [B, rows, cols, H, 4, N / 4]
    from_left, from_right, from_above, from_below = quarters.unbind(4)
    shifted = torch.stack(
        (
            F.pad(from_left[:, :, :-1], (0, 0, 0, 0, 1, 0)),
            F.pad(from_right[:, :, 1:], (0, 0, 0, 0, 0, 1)),
            F.pad(from_above[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)),
            F.pad(from_below[:, 1:], (0, 0, 0, 0, 0, 0, 0, 1)),
        ),
        dim=4,
    ).reshape(patches.shape)
    return torch.cat((shifted, x[:, -1:]), dim=1) if with_cls_token else shifted


def shift_text(x: Tensor, grid: tuple[int, int] | None, num_heads: int) -> Tensor:
    """Two-way 1-D shift by one token: (B, T, C) -> (B, T, C); C / num_heads is even, `grid` is not used."""
    halves = x.unflatten(2, (num_heads, 2, -1))  # [B, T, H, 2, N / 2]
    from_before, from_after = halves.unbind(3)
    shifted = (F.pad(from_before[:, :-1], (0, 0, 0, 0, 1, 0)), F.pad(from_after[:, 1:], (0, 0, 0, 0, 0, 1)))
    return torch.stack(shifted, dim=3).reshape(x.shape)
