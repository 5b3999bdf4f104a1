"""Whether the interpolation kernels are right on this GPU: a small case against float64, before they are first used.

A GPU of a kind that nobody has tried them on must make a run slower, not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

CHANNELS, HEAD_SIZE, MOST = 64, 32, 0.03
# (tokens, layout): an image of 3 x 4 patches with a class token, and a text.
CASES = ((13, (4, HEAD_SIZE, 4, True)), (19, (19, HEAD_SIZE, 2, False)))


def kernels_are_right(ops: Mapping[str, Callable], device: torch.device) -> bool:
    """Both ops and their gradients, on random bfloat16 tensors, within what bfloat16 rounds.

    ops: lerp, lerp_backward, ddlerp and ddlerp_backward of lerp.py, as the device computes them.
    """
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return all(_case_is_right(ops, tokens, layout, device) for tokens, layout in CASES)


def _case_is_right(
    ops: Mapping[str, Callable], tokens: int, layout: tuple[int, int, int, bool], device: torch.device
) -> bool:
    shape = (3, tokens, CHANNELS)
    x, *gradients = (torch.randn(shape).bfloat16() for _ in range(6))
    hidden, w2 = torch.randn(3 * tokens, 160).bfloat16(), torch.randn(5, 32, CHANNELS).bfloat16() * 0.2
    c = torch.randn(5, CHANNELS)
    there = [value.to(device) for value in (x, hidden, w2, c)]
    gradients_there = [value.to(device) for value in gradients]
    base, extra, *parts = ops["ddlerp_backward"](*there, gradients_there, *layout)
    gx, g_c1 = ops["lerp_backward"](there[0], there[3][:1], gradients_there[:1], base, extra, *layout)
    two = ops["lerp_backward"](there[0], there[3][:2], gradients_there[:2], None, None, *layout)
    found = [*ops["lerp"](there[0], there[3][:2], *layout), *ops["ddlerp"](*there, *layout), gx, g_c1, *parts, *two]

    leaves = [value.double().requires_grad_() for value in (x, hidden, w2, c)]
    directions = [value.double() for value in gradients]
    with torch.enable_grad():
        mixed, shares = _mixed(*leaves, layout), leaves[3]
        difference = _shifted(leaves[0], layout) - leaves[0]
        one, other = (leaves[0] + difference * shares[i] for i in range(2))
        both = [*mixed, one], [*directions, directions[0]]
        g_x, g_hidden, g_w2 = torch.autograd.grad(*_sums(both), leaves[:3], retain_graph=True)
        (g_c,) = torch.autograd.grad(*_sums((mixed, directions)), shares, retain_graph=True)
        (g_one,) = torch.autograd.grad(*_sums(([one], directions[:1])), shares, retain_graph=True)
        g_two = torch.autograd.grad(*_sums(([one, other], directions[:2])), (leaves[0], shares))
    exact = [one, other, *mixed, g_x, g_one[:1], g_hidden, g_w2, g_c, g_two[0], g_two[1][:2]]
    return all(((a.cpu().double() - b).norm() <= MOST * b.norm()).item() for a, b in zip(found, exact, strict=True))


def _sums(pair: tuple[Sequence[Tensor], Sequence[Tensor]]) -> tuple[Tensor]:
    return (sum((value * direction).sum() for value, direction in zip(*pair, strict=True)),)


def _mixed(x: Tensor, hidden: Tensor, w2: Tensor, c: Tensor, layout: tuple[int, int, int, bool]) -> list[Tensor]:
    shares = torch.bmm(hidden.view(-1, 5, 32).transpose(0, 1), w2).view(5, *x.shape) + c[:, None, None]
    difference = _shifted(x, layout) - x
    return [x + difference * share for share in shares]


def _shifted(x: Tensor, layout: tuple[int, int, int, bool]) -> Tensor:
    """By looking every value up, as no other code of the project does."""
    width, head_size, directions, with_cls_token = layout
    grid = x.shape[1] - with_cls_token
    columns = []
    for channel in range(x.shape[2]):
        down, right = ((0, -1), (0, 1), (-1, 0), (1, 0))[channel % head_size // (head_size // directions)]
        places = [(token // width + down, token % width + right) for token in range(grid)]
        inside = [0 <= row < grid // width and 0 <= column < width for row, column in places]
        sources = [row * width + column if real else 0 for (row, column), real in zip(places, inside, strict=True)]
        taken = x[:, sources, channel] * torch.tensor(inside, dtype=x.dtype)
        columns.append(torch.cat((taken, x[:, grid:, channel]), dim=1))
    return torch.stack(columns, dim=2)
