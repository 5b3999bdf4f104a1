"""Triton kernels of lerp.py: token shift and interpolation in one pass over memory.

Written by hand because a compiler reads the shifted neighbour value by value, once for each direction, and stores the
five low-rank shares; here the neighbour's address is computed, so loads stay wide, and the shares never leave the chip.
All arithmetic is in float32 inside. Sums over tokens are taken in a fixed order, so two runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RANK = 32
"""Rank of each share, which tensor cores take as one operand."""
BLOCK_TOKENS, BLOCK_CHANNELS = 16, 128
CHUNKS = 256
"""Parts of the tokens whose sums are added up in the end."""


@triton.jit
def _neighbour(
    rows, columns, T: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr,
    DIRECTIONS: tl.constexpr, OPPOSITE: tl.constexpr,
):  # fmt: skip
    """(tokens from each element to its neighbour, whether there is one), both [tokens, channels]."""
    token = (rows % T)[:, None]
    group = ((columns % HEAD) // (HEAD // DIRECTIONS))[None, :]
    if OPPOSITE:
        group = group ^ 1
    column = token % WIDTH
    step = tl.where(group == 0, -1, 1)
    inside = tl.where(group == 0, column > 0, column < WIDTH - 1)
    if DIRECTIONS == 4:
        step = tl.where(group < 2, step, tl.where(group == 2, -WIDTH, WIDTH))
        inside = tl.where(group < 2, inside, tl.where(group == 2, token >= WIDTH, token < GRID - WIDTH))
    if GRID < T:  # the class token is its own neighbour
        step = tl.where(token < GRID, step, 0)
        inside = inside | (token >= GRID)
    return step, inside


@triton.jit
def _lerp_kernel(
    x_ptr, c_ptr, y0_ptr, y1_ptr, rows_total, C: tl.constexpr, COUNT: tl.constexpr,
    T: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, DIRECTIONS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = (rows < rows_total)[:, None] & (columns < C)[None, :]
    at = rows.to(tl.int64)[:, None] * C + columns[None, :]
    step, inside = _neighbour(rows, columns, T, GRID, WIDTH, HEAD, DIRECTIONS, False)
    x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
    d = tl.load(x_ptr + at + step * C, mask & inside, 0.0).to(tl.float32) - x
    c0 = tl.load(c_ptr + columns, columns < C, 0.0).to(tl.float32)[None, :]
    tl.store(y0_ptr + at, x + d * c0, mask)
    if COUNT == 2:
        c1 = tl.load(c_ptr + C + columns, columns < C, 0.0).to(tl.float32)[None, :]
        tl.store(y1_ptr + at, x + d * c1, mask)


@triton.jit
def _lerp_backward_kernel(
    x_ptr, c_ptr, g0_ptr, g1_ptr, base_ptr, extra_ptr, gx_ptr, gc_ptr, rows_total, C: tl.constexpr,
    COUNT: tl.constexpr, EXTRA: tl.constexpr,
    T: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, DIRECTIONS: tl.constexpr,
    BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """gx, and this chunk's sums of the gradients of c.

    EXTRA: base is added to gx, and extra to the gradient of the difference between the neighbour and the token.
    """
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    real = columns < C
    c0 = tl.load(c_ptr + columns, real, 0.0).to(tl.float32)[None, :]
    sum0 = tl.zeros([BM, BN], tl.float32)
    if COUNT == 2:
        c1 = tl.load(c_ptr + C + columns, real, 0.0).to(tl.float32)[None, :]
        sum1 = tl.zeros([BM, BN], tl.float32)
    chunk = tl.program_id(1)
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BM + tl.arange(0, BM)
        mask = (rows < rows_total)[:, None] & real[None, :]
        at = rows.to(tl.int64)[:, None] * C + columns[None, :]
        step, inside = _neighbour(rows, columns, T, GRID, WIDTH, HEAD, DIRECTIONS, False)
        back_step, back_inside = _neighbour(rows, columns, T, GRID, WIDTH, HEAD, DIRECTIONS, True)
        back_inside = mask & back_inside
        back = at + back_step * C
        x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
        d = tl.load(x_ptr + at + step * C, mask & inside, 0.0).to(tl.float32) - x
        g0 = tl.load(g0_ptr + at, mask, 0.0).to(tl.float32)
        sum0 += g0 * d
        gd = g0 * c0
        gd_back = tl.load(g0_ptr + back, back_inside, 0.0).to(tl.float32) * c0
        gx = g0
        if COUNT == 2:
            g1 = tl.load(g1_ptr + at, mask, 0.0).to(tl.float32)
            sum1 += g1 * d
            gd += g1 * c1
            gd_back += tl.load(g1_ptr + back, back_inside, 0.0).to(tl.float32) * c1
            gx += g1
        if EXTRA:
            gx += tl.load(base_ptr + at, mask, 0.0).to(tl.float32)
            gd += tl.load(extra_ptr + at, mask, 0.0).to(tl.float32)
            gd_back += tl.load(extra_ptr + back, back_inside, 0.0).to(tl.float32)
        tl.store(gx_ptr + at, gx + (gd_back - gd), mask)
    tl.store(gc_ptr + (chunk * COUNT) * C + columns, tl.sum(sum0, 0), real)
    if COUNT == 2:
        tl.store(gc_ptr + (chunk * COUNT + 1) * C + columns, tl.sum(sum1, 0), real)


@triton.jit
def _share(hidden_ptr, w2_ptr, c_ptr, INDEX: tl.constexpr, rows, columns, row_mask, real, C: tl.constexpr):
    """Share INDEX of the neighbours, float32 [tokens, channels]: a constant and a low-rank product."""
    ranks = tl.arange(0, 32)
    hidden = tl.load(
        hidden_ptr + rows.to(tl.int64)[:, None] * 160 + (INDEX * 32 + ranks)[None, :], row_mask[:, None], 0.0
    )
    w2 = tl.load(w2_ptr + (INDEX * 32 + ranks)[:, None] * C + columns[None, :], real[None, :], 0.0)
    c = tl.load(c_ptr + INDEX * C + columns, real, 0.0).to(tl.float32)
    return tl.dot(hidden, w2, input_precision="ieee") + c[None, :]


@triton.jit
def _ddlerp_kernel(
    x_ptr, hidden_ptr, w2_ptr, c_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, y4_ptr, rows_total, C: tl.constexpr,
    T: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, DIRECTIONS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    row_mask, real = rows < rows_total, columns < C
    mask = row_mask[:, None] & real[None, :]
    at = rows.to(tl.int64)[:, None] * C + columns[None, :]
    step, inside = _neighbour(rows, columns, T, GRID, WIDTH, HEAD, DIRECTIONS, False)
    x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
    d = tl.load(x_ptr + at + step * C, mask & inside, 0.0).to(tl.float32) - x
    tl.store(y0_ptr + at, x + d * _share(hidden_ptr, w2_ptr, c_ptr, 0, rows, columns, row_mask, real, C), mask)
    tl.store(y1_ptr + at, x + d * _share(hidden_ptr, w2_ptr, c_ptr, 1, rows, columns, row_mask, real, C), mask)
    tl.store(y2_ptr + at, x + d * _share(hidden_ptr, w2_ptr, c_ptr, 2, rows, columns, row_mask, real, C), mask)
    tl.store(y3_ptr + at, x + d * _share(hidden_ptr, w2_ptr, c_ptr, 3, rows, columns, row_mask, real, C), mask)
    tl.store(y4_ptr + at, x + d * _share(hidden_ptr, w2_ptr, c_ptr, 4, rows, columns, row_mask, real, C), mask)


@triton.jit
def _one_gradient(g_ptr, hidden, w2_ptr, c_ptr, INDEX: tl.constexpr, at, columns, mask, real, d, C: tl.constexpr):
    """(g, its share of the difference's gradient, gradient of the hidden values from these channels)."""
    ranks = tl.arange(0, 32)
    w2 = tl.load(w2_ptr + (INDEX * 32 + ranks)[:, None] * C + columns[None, :], real[None, :], 0.0)
    c = tl.load(c_ptr + INDEX * C + columns, real, 0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask, 0.0).to(tl.float32)
    share = tl.dot(hidden, w2, input_precision="ieee") + c[None, :]
    g_hidden = tl.dot((g * d).to(w2.dtype), tl.trans(w2), input_precision="ieee")
    return g, g * share, g_hidden


@triton.jit
def _hidden(hidden_ptr, INDEX: tl.constexpr, rows, row_mask):
    at = rows.to(tl.int64)[:, None] * 160 + (INDEX * 32 + tl.arange(0, 32))[None, :]
    return tl.load(hidden_ptr + at, row_mask[:, None], 0.0)


@triton.jit
def _ddlerp_tokens_kernel(
    x_ptr, hidden_ptr, w2_ptr, c_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr, g4_ptr,
    base_ptr, extra_ptr, gh_ptr, rows_total, C: tl.constexpr,
    T: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, DIRECTIONS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What does not sum over tokens: base and extra (see `_lerp_backward_kernel`), and the hidden values' gradient."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_mask = rows < rows_total
    row_at = rows.to(tl.int64)[:, None] * C
    h0 = _hidden(hidden_ptr, 0, rows, row_mask)
    h1 = _hidden(hidden_ptr, 1, rows, row_mask)
    h2 = _hidden(hidden_ptr, 2, rows, row_mask)
    h3 = _hidden(hidden_ptr, 3, rows, row_mask)
    h4 = _hidden(hidden_ptr, 4, rows, row_mask)
    s0 = tl.zeros([BM, 32], tl.float32)
    s1 = tl.zeros([BM, 32], tl.float32)
    s2 = tl.zeros([BM, 32], tl.float32)
    s3 = tl.zeros([BM, 32], tl.float32)
    s4 = tl.zeros([BM, 32], tl.float32)
    for first in range(0, C, BN):
        columns = first + tl.arange(0, BN)
        real = columns < C
        mask = row_mask[:, None] & real[None, :]
        at = row_at + columns[None, :]
        step, inside = _neighbour(rows, columns, T, GRID, WIDTH, HEAD, DIRECTIONS, False)
        x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
        d = tl.load(x_ptr + at + step * C, mask & inside, 0.0).to(tl.float32) - x
        base, extra, part = _one_gradient(g0_ptr, h0, w2_ptr, c_ptr, 0, at, columns, mask, real, d, C)
        s0 += part
        g, weighted, part = _one_gradient(g1_ptr, h1, w2_ptr, c_ptr, 1, at, columns, mask, real, d, C)
        base += g
        extra += weighted
        s1 += part
        g, weighted, part = _one_gradient(g2_ptr, h2, w2_ptr, c_ptr, 2, at, columns, mask, real, d, C)
        base += g
        extra += weighted
        s2 += part
        g, weighted, part = _one_gradient(g3_ptr, h3, w2_ptr, c_ptr, 3, at, columns, mask, real, d, C)
        base += g
        extra += weighted
        s3 += part
        g, weighted, part = _one_gradient(g4_ptr, h4, w2_ptr, c_ptr, 4, at, columns, mask, real, d, C)
        base += g
        extra += weighted
        s4 += part
        tl.store(base_ptr + at, base, mask)
        tl.store(extra_ptr + at, extra, mask)
    h_at = rows.to(tl.int64)[:, None] * 160 + tl.arange(0, 32)[None, :]
    tl.store(gh_ptr + h_at, s0, row_mask[:, None])
    tl.store(gh_ptr + h_at + 32, s1, row_mask[:, None])
    tl.store(gh_ptr + h_at + 64, s2, row_mask[:, None])
    tl.store(gh_ptr + h_at + 96, s3, row_mask[:, None])
    tl.store(gh_ptr + h_at + 128, s4, row_mask[:, None])


@triton.jit
def _ddlerp_weights_kernel(
    x_ptr, hidden_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr, g4_ptr, gw_ptr, gc_ptr, rows_total, C: tl.constexpr,
    T: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, DIRECTIONS: tl.constexpr,
    BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """This chunk's sums over tokens: gradients of w2 and c."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    real = columns < C
    w0 = tl.zeros([32, BN], tl.float32)
    w1 = tl.zeros([32, BN], tl.float32)
    w2 = tl.zeros([32, BN], tl.float32)
    w3 = tl.zeros([32, BN], tl.float32)
    w4 = tl.zeros([32, BN], tl.float32)
    c0 = tl.zeros([BN], tl.float32)
    c1 = tl.zeros([BN], tl.float32)
    c2 = tl.zeros([BN], tl.float32)
    c3 = tl.zeros([BN], tl.float32)
    c4 = tl.zeros([BN], tl.float32)
    chunk = tl.program_id(1)
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BM + tl.arange(0, BM)
        row_mask = rows < rows_total
        mask = row_mask[:, None] & real[None, :]
        at = rows.to(tl.int64)[:, None] * C + columns[None, :]
        step, inside = _neighbour(rows, columns, T, GRID, WIDTH, HEAD, DIRECTIONS, False)
        x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
        d = tl.load(x_ptr + at + step * C, mask & inside, 0.0).to(tl.float32) - x
        product = tl.load(g0_ptr + at, mask, 0.0).to(tl.float32) * d
        h = tl.trans(_hidden(hidden_ptr, 0, rows, row_mask))
        w0 += tl.dot(h, product.to(h.dtype), input_precision="ieee")
        c0 += tl.sum(product, 0)
        product = tl.load(g1_ptr + at, mask, 0.0).to(tl.float32) * d
        h = tl.trans(_hidden(hidden_ptr, 1, rows, row_mask))
        w1 += tl.dot(h, product.to(h.dtype), input_precision="ieee")
        c1 += tl.sum(product, 0)
        product = tl.load(g2_ptr + at, mask, 0.0).to(tl.float32) * d
        h = tl.trans(_hidden(hidden_ptr, 2, rows, row_mask))
        w2 += tl.dot(h, product.to(h.dtype), input_precision="ieee")
        c2 += tl.sum(product, 0)
        product = tl.load(g3_ptr + at, mask, 0.0).to(tl.float32) * d
        h = tl.trans(_hidden(hidden_ptr, 3, rows, row_mask))
        w3 += tl.dot(h, product.to(h.dtype), input_precision="ieee")
        c3 += tl.sum(product, 0)
        product = tl.load(g4_ptr + at, mask, 0.0).to(tl.float32) * d
        h = tl.trans(_hidden(hidden_ptr, 4, rows, row_mask))
        w4 += tl.dot(h, product.to(h.dtype), input_precision="ieee")
        c4 += tl.sum(product, 0)
    w_at = gw_ptr + chunk * 160 * C + tl.arange(0, 32)[:, None] * C + columns[None, :]
    tl.store(w_at, w0, real[None, :])
    tl.store(w_at + 32 * C, w1, real[None, :])
    tl.store(w_at + 64 * C, w2, real[None, :])
    tl.store(w_at + 96 * C, w3, real[None, :])
    tl.store(w_at + 128 * C, w4, real[None, :])
    c_at = gc_ptr + chunk * 5 * C + columns
    tl.store(c_at, c0, real)
    tl.store(c_at + C, c1, real)
    tl.store(c_at + 2 * C, c2, real)
    tl.store(c_at + 3 * C, c3, real)
    tl.store(c_at + 4 * C, c4, real)


def _sizes(x: Tensor, layout: tuple[int, int, int, bool]) -> dict[str, int]:
    """Constants of every kernel. layout: as in `rwkv_clip::lerp`."""
    tokens, channels = x.shape[1:]
    width, head_size, directions, with_cls_token = layout
    grid = tokens - with_cls_token
    return {"C": channels, "T": tokens, "GRID": grid, "WIDTH": width, "HEAD": head_size, "DIRECTIONS": directions}


def _rows(x: Tensor) -> int:
    return x.shape[0] * x.shape[1]


def _chunks(rows: int, block: int, most: int) -> tuple[int, int]:
    """(parts of the tokens, at most `most`; blocks of each)."""
    blocks = triton.cdiv(max(rows, 1), block)
    each = triton.cdiv(blocks, most)
    return triton.cdiv(blocks, each), each


def lerp(x: Tensor, c: Tensor, *layout: int) -> list[Tensor]:
    """`rwkv_clip::lerp`."""
    x, c = x.contiguous(), c.contiguous()
    results = [torch.empty_like(x) for _ in c]
    rows = _rows(x)
    if rows == 0:
        return results
    grid = (triton.cdiv(x.shape[2], BLOCK_CHANNELS), triton.cdiv(rows, BLOCK_TOKENS))
    with torch.cuda.device_of(x):
        _lerp_kernel[grid](
            x, c, results[0], results[-1], rows,
            COUNT=len(c), BM=BLOCK_TOKENS, BN=BLOCK_CHANNELS, **_sizes(x, layout),
        )  # fmt: skip
    return results


def lerp_backward(
    x: Tensor, c: Tensor, gradients: list[Tensor], base: Tensor | None, extra: Tensor | None, *layout: int
) -> tuple[Tensor, Tensor]:
    """`rwkv_clip::lerp_backward`."""
    x, c, gradients = x.contiguous(), c.contiguous(), [gradient.contiguous() for gradient in gradients]
    gx, rows = torch.empty_like(x), _rows(x)
    chunks, blocks = _chunks(rows, BLOCK_TOKENS, CHUNKS)
    sums = x.new_zeros((chunks, *c.shape), dtype=torch.float32)
    if rows:
        with torch.cuda.device_of(x):
            _lerp_backward_kernel[(triton.cdiv(x.shape[2], BLOCK_CHANNELS), chunks)](
                x, c, gradients[0], gradients[-1],
                x if base is None else base.contiguous(), x if extra is None else extra.contiguous(), gx, sums, rows,
                COUNT=len(c), EXTRA=base is not None, BLOCKS=blocks, BM=BLOCK_TOKENS, BN=BLOCK_CHANNELS,
                **_sizes(x, layout),
            )  # fmt: skip
    return gx, sums.sum(0).to(c.dtype)


DDLERP = {"BM": 64, "BN": 128, "num_warps": 8}
TOKENS = {"BM": 32, "BN": 64, "num_warps": 4}
WEIGHTS = {"BM": 64, "BN": 64, "num_warps": 4}
WEIGHT_CHUNKS = 53


def ddlerp(x: Tensor, hidden: Tensor, w2: Tensor, c: Tensor, *layout: int) -> list[Tensor]:
    """`rwkv_clip::ddlerp`."""
    x, hidden, w2, c = (tensor.contiguous() for tensor in (x, hidden, w2, c))
    results = [torch.empty_like(x) for _ in c]
    rows = _rows(x)
    if rows:
        grid = (triton.cdiv(x.shape[2], DDLERP["BN"]), triton.cdiv(rows, DDLERP["BM"]))
        with torch.cuda.device_of(x):
            _ddlerp_kernel[grid](x, hidden, w2, c, *results, rows, **DDLERP, **_sizes(x, layout))
    return results


def ddlerp_backward(
    x: Tensor, hidden: Tensor, w2: Tensor, c: Tensor, gradients: list[Tensor], *layout: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`rwkv_clip::ddlerp_backward`."""
    x, hidden, w2, c = (tensor.contiguous() for tensor in (x, hidden, w2, c))
    gradients = [gradient.contiguous() for gradient in gradients]
    base, extra, g_hidden, rows = torch.empty_like(x), torch.empty_like(x), torch.empty_like(hidden), _rows(x)
    chunks, blocks = _chunks(rows, WEIGHTS["BM"], WEIGHT_CHUNKS)
    w2_sums = x.new_zeros((chunks, *w2.shape), dtype=torch.float32)
    c_sums = x.new_zeros((chunks, *c.shape), dtype=torch.float32)
    if rows:
        sizes = _sizes(x, layout)
        with torch.cuda.device_of(x):
            _ddlerp_tokens_kernel[(triton.cdiv(rows, TOKENS["BM"]),)](
                x, hidden, w2, c, *gradients, base, extra, g_hidden, rows, **TOKENS, **sizes
            )
            _ddlerp_weights_kernel[(triton.cdiv(x.shape[2], WEIGHTS["BN"]), chunks)](
                x, hidden, *gradients, w2_sums, c_sums, rows, BLOCKS=blocks, **WEIGHTS, **sizes
            )
    return base, extra, g_hidden, w2_sums.sum(0).to(w2.dtype), c_sums.sum(0).to(c.dtype)
