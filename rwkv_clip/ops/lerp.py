"""Token shift and interpolation as PyTorch custom ops: one pass over memory where PyTorch makes many.

    lerp:    y_i = x + (shift(x) - x) * c_i
    ddlerp:  y_i = x + (shift(x) - x) * (c_i + hidden_i @ w2_i), i = w, k, v, r, g

ddlerp is the data-dependent interpolation of RWKV-6 (Peng et al., "Eagle and Finch", 2024, equations 11 to 14), with
the published towers' shifts. The kernels are in csrc/lerp_cuda.cu and csrc/lerp_cpu.cpp; where `usable` says no,
mixing.py computes the same in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .implementation import implementation

Layout = tuple[int, int, int, bool]
"""Of the shift: patches per row (for text, tokens), channels per head, directions (4 or 2), class token at the end."""

DTYPES = {"cuda": torch.bfloat16, "meta": torch.bfloat16, "cpu": torch.float32}
"""What the kernels of a device take. The meta device stands for a GPU, whose memory is worked out on it."""

_LAYOUT = "int width, int head_size, int directions, bool with_cls_token"
_TAGS = (torch.Tag.pt2_compliant_tag,)
for _schema in (
    f"lerp(Tensor x, Tensor c, {_LAYOUT}) -> Tensor[]",
    f"lerp_backward(Tensor x, Tensor c, Tensor[] gradients, Tensor? base, Tensor? extra, {_LAYOUT}) "
    "-> (Tensor, Tensor)",
    f"ddlerp(Tensor x, Tensor hidden, Tensor w2, Tensor c, {_LAYOUT}) -> Tensor[]",
    f"ddlerp_backward(Tensor x, Tensor hidden, Tensor w2, Tensor c, Tensor[] gradients, {_LAYOUT}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    torch.library.define("rwkv_clip::" + _schema.split("(")[0], _schema[_schema.index("(") :], tags=_TAGS)


def usable(x: Tensor, layout: Layout) -> bool:
    """Whether the kernels take x [B, T, C]: bfloat16 on a GPU of compute capability 8.0 or newer, on which they were
    found right, or float32 on a CPU that the C++ op was built for; C a multiple of 32, and four channels in a row that
    share a neighbour.
    """
    _, head_size, directions, _ = layout
    device = x.device.type
    fits = x.dtype == DTYPES.get(device) and x.shape[2] % 32 == 0 and x.shape[2] <= 4096
    fits = fits and head_size % (4 * directions) == 0
    return fits and (device == "meta" or _kernels_work(device))


@torch.compiler.assume_constant_result
def _kernels_work(device_type: str) -> bool:
    return bool(implementation(device_type).interpolations)


def _on_a_device(name: str) -> Callable:
    def run(x: Tensor, *args: object) -> object:
        return implementation(x.device.type).interpolations[name](x, *args)

    return run


for _name in ("lerp", "lerp_backward", "ddlerp", "ddlerp_backward"):
    torch.library.impl(f"rwkv_clip::{_name}", ("cpu", "cuda"))(_on_a_device(_name))


@torch.library.register_fake("rwkv_clip::lerp")
def _fake_lerp(x: Tensor, c: Tensor, *layout: int) -> list[Tensor]:
    return [x.new_empty(x.shape) for _ in range(c.shape[0])]


@torch.library.register_fake("rwkv_clip::lerp_backward")
def _fake_lerp_backward(x: Tensor, c: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), c.new_empty(c.shape)


@torch.library.register_fake("rwkv_clip::ddlerp")
def _fake_ddlerp(x: Tensor, hidden: Tensor, w2: Tensor, c: Tensor, *layout: int) -> list[Tensor]:
    return [x.new_empty(x.shape) for _ in range(5)]


@torch.library.register_fake("rwkv_clip::ddlerp_backward")
def _fake_ddlerp_backward(
    x: Tensor, hidden: Tensor, w2: Tensor, c: Tensor, *_others: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = (x, x, hidden, w2, c)
    base, extra, g_hidden, g_w2, g_c = (tensor.new_empty(tensor.shape) for tensor in shapes)
    return base, extra, g_hidden, g_w2, g_c


class _Lerp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, c: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, c)
        ctx.layout = layout
        return tuple(torch.ops.rwkv_clip.lerp(x, c, *layout))

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, c = ctx.saved_tensors
        gx, gc = torch.ops.rwkv_clip.lerp_backward(x, c, gradients, None, None, *ctx.layout)
        return gx, gc, None


class _TimeMixInputs(torch.autograd.Function):
    """One function for both interpolations: the gradients that meet at x are added on the way through memory."""

    @staticmethod
    def forward(ctx, x: Tensor, c_x: Tensor, w1: Tensor, w2: Tensor, c: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        (mixed,) = torch.ops.rwkv_clip.lerp(x, c_x, *layout)
        hidden = torch.tanh(mixed.flatten(0, 1) @ w1).to(x.dtype)  # autocast may have rounded it
        ctx.save_for_backward(x, c_x, mixed, hidden, w1, w2, c)
        ctx.layout = layout
        return tuple(torch.ops.rwkv_clip.ddlerp(x, hidden, w2, c, *layout))

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, c_x, mixed, hidden, w1, w2, c = ctx.saved_tensors
        base, extra, g_hidden, g_w2, g_c = torch.ops.rwkv_clip.ddlerp_backward(x, hidden, w2, c, gradients, *ctx.layout)
        g_product = torch.ops.aten.tanh_backward(g_hidden, hidden)
        g_w1 = mixed.flatten(0, 1).T @ g_product
        g_mixed = (g_product @ w1.T).view(x.shape)
        gx, g_c_x = torch.ops.rwkv_clip.lerp_backward(x, c_x, [g_mixed], base, extra, *ctx.layout)
        return gx, g_c_x, g_w1, g_w2, g_c, None


def lerp(x: Tensor, c: Sequence[Tensor], layout: Layout) -> tuple[Tensor, ...]:
    """x + (shift(x) - x) * c for each c: (B, T, C) -> as many (B, T, C). c: one or two of C values each."""
    return _Lerp.apply(x, torch.stack([value.flatten().float() for value in c]), layout)


def time_mix_inputs(
    x: Tensor, c_x: Tensor, w1: Tensor, w2: Tensor, c: Sequence[Tensor], layout: Layout
) -> tuple[Tensor, ...]:
    """The five inputs of a time mix: (B, T, C) -> five (B, T, C).

    Args:
        x: [B, T, C].
        c_x: C values, the share for the hidden values' own input.
        w1: [C, 5 * 32] into the hidden values.
        w2: [5, 32, C] out of them.
        c: five of C values, the shares' constant parts.
        layout: of the shift.
    """
    constants = torch.stack([value.flatten().float() for value in c])
    return _TimeMixInputs.apply(x, c_x.reshape(1, -1).float(), w1, w2, constants, layout)
