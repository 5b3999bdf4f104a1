"""The public WKV6 operator: `rwkv_clip::wkv6` and `rwkv_clip::wkv6_backward` as PyTorch custom ops.

    y = rwkv_clip.ops.wkv6(r, k, v, w, u)

Which code computes them (CUDA op, C++ op, plain torch) is decided in implementation.py when they are first called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .implementation import implementation

MAX_HEAD_SIZE = 128

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda", "meta")

_TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define("rwkv_clip::wkv6", "(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u) -> Tensor", tags=_TAGS)
torch.library.define(
    "rwkv_clip::wkv6_backward",
    "(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor grad_y) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Bidirectional WKV6 (see `wkv6_reference` for the formula): every token attends to all tokens, in linear memory.

    Args:
        r, k, v: [B, T, H, N], one dtype of float32, bfloat16, float16. T ≥ 1; N a multiple of 4, at most 128; B and H
            may be 0. Any strides; those with a contiguous last dimension are read in place.
        w: [B, T, H, N], raw decay (decay = exp(−exp(w)) per token and channel), r's dtype or float32. Keep it in
            float32: bfloat16 near −6 is wrong by 1.6 % of exp(w).
        u: [H, N], weight of a token's own key, r's dtype or float32.

    Returns:
        y: [B, T, H, N] contiguous, r's dtype; float32 inside. Differentiable in all five inputs (once), each gradient
        in its input's dtype. Deterministic.

    Raises:
        ValueError: anything else, with the value found.
        rwkv_clip.errors.UserError: CUDA tensors, and the CUDA op cannot be built here.

    Example:
        >>> r, k, v, w = torch.randn(4, 2, 49, 8, 80).unbind()
        >>> rwkv_clip.ops.wkv6(r, k, v, w, torch.zeros(8, 80)).shape
        torch.Size([2, 49, 8, 80])
    """
    _check(r, k, v, w, u)
    return torch.ops.rwkv_clip.wkv6(r, k, v, w, u)


def _check(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> None:
    """Raise ValueError unless the inputs are as `wkv6` documents them."""
    if r.dim() != 4:
        raise ValueError(f"wkv6: r must be [B, T, H, N], got shape {tuple(r.shape)}")
    if r.dtype not in _DTYPES:
        raise ValueError(f"wkv6: r must be float32, bfloat16 or float16, got {r.dtype}")
    if r.device.type not in _DEVICES:
        raise ValueError(f"wkv6: r must be on the CPU or a CUDA device, got {r.device}")
    tokens, heads, size = r.shape[1:]
    if tokens < 1:
        raise ValueError(f"wkv6: T must be at least 1, got shape {tuple(r.shape)}")
    if size < 4 or size % 4 or size > MAX_HEAD_SIZE:
        raise ValueError(f"wkv6: the head size N must be a multiple of 4 up to {MAX_HEAD_SIZE}, got {size}")
    for name, x in (("k", k), ("v", v), ("w", w)):
        if x.shape != r.shape:
            raise ValueError(f"wkv6: {name} must have r's shape {tuple(r.shape)}, got {tuple(x.shape)}")
    if u.dim() != 2 or u.shape[0] != heads or u.shape[1] != size:
        raise ValueError(f"wkv6: u must be [H, N] = {(heads, size)}, got {tuple(u.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != r.dtype:
            raise ValueError(f"wkv6: {name} must have r's dtype {r.dtype}, got {x.dtype}")
    for name, x in (("w", w), ("u", u)):
        if x.dtype != r.dtype and x.dtype != torch.float32:
            raise ValueError(f"wkv6: {name} must have r's dtype {r.dtype} or float32, got {x.dtype}")
    for name, x in (("k", k), ("v", v), ("w", w), ("u", u)):
        if x.device != r.device:
            raise ValueError(f"wkv6: {name} must be on r's device {r.device}, got {x.device}")


@torch.library.impl("rwkv_clip::wkv6", ("cpu", "cuda"))
def _forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return implementation(r.device.type).forward(r, k, v, w, u)


@torch.library.impl("rwkv_clip::wkv6_backward", ("cpu", "cuda"))
def _backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return implementation(r.device.type).backward(r, k, v, w, u, grad_y)


@torch.library.register_fake("rwkv_clip::wkv6")
def _fake_forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return r.new_empty(r.shape)


@torch.library.register_fake("rwkv_clip::wkv6_backward")
def _fake_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gr, gk, gv, gw, gu = (x.new_empty(x.shape) for x in (r, k, v, w, u))
    return gr, gk, gv, gw, gu


def _save_inputs(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad_y: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.rwkv_clip.wkv6_backward(*ctx.saved_tensors, grad_y)


def _no_second_derivative(ctx, *gradients: Tensor) -> None:
    raise NotImplementedError("wkv6 has no second derivative; use rwkv_clip.ops.wkv6_reference for one")


torch.library.register_autograd("rwkv_clip::wkv6", _gradients, setup_context=_save_inputs)
torch.library.register_autograd("rwkv_clip::wkv6_backward", _no_second_derivative)
