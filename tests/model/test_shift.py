"""Token shifts against loops over tokens and channels, written from the published description."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_clip.model.shift import shift_image, shift_text

TOWARDS = {0: (0, -1), 1: (0, 1), 2: (-1, 0), 3: (1, 0)}
"""Quarter of a head's channels -> (row, column) step to the neighbour that it takes."""


def image_by_loops(x: Tensor, rows: int, columns: int, num_heads: int) -> Tensor:
    head_size = x.shape[2] // num_heads
    out = torch.zeros_like(x)
    for row in range(rows):
        for column in range(columns):
            for channel in range(x.shape[2]):
                down, right = TOWARDS[channel % head_size // (head_size // 4)]
                if 0 <= row + down < rows and 0 <= column + right < columns:
                    source = (row + down) * columns + column + right
                    out[:, row * columns + column, channel] = x[:, source, channel]
    return out


def text_by_loops(x: Tensor, num_heads: int) -> Tensor:
    head_size = x.shape[2] // num_heads
    out = torch.zeros_like(x)
    for token in range(x.shape[1]):
        for channel in range(x.shape[2]):
            source = token - 1 if channel % head_size < head_size // 2 else token + 1
            if 0 <= source < x.shape[1]:
                out[:, token, channel] = x[:, source, channel]
    return out


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (1, 1), (1, 5), (6, 2)])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_image_shift_takes_each_quarter_of_a_head_from_its_side(rows: int, columns: int, num_heads: int) -> None:
    x = torch.randn(2, rows * columns, 8 * num_heads)
    assert torch.equal(shift_image(x, (rows, columns), num_heads, False), image_by_loops(x, rows, columns, num_heads))


def test_the_class_token_stays_and_gives_nothing_to_the_patches() -> None:
    x = torch.randn(2, 13, 8)
    shifted = shift_image(x, (3, 4), 1, True)
    assert torch.equal(shifted[:, -1], x[:, -1])
    assert torch.equal(shifted[:, :-1], image_by_loops(x[:, :-1], 3, 4, 1))


@pytest.mark.parametrize("length", [1, 2, 7])
def test_text_shift_takes_half_a_head_from_each_side(length: int) -> None:
    x = torch.randn(2, length, 24)
    assert torch.equal(shift_text(x, None, 3), text_by_loops(x, 3))


def test_gradients_of_the_shifts_are_exact() -> None:
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: shift_image(x, (2, 3), 2, False), x)
    assert torch.autograd.gradcheck(lambda x: shift_image(x, (5, 1), 1, True), x)
    assert torch.autograd.gradcheck(lambda x: shift_text(x, None, 2), x)
