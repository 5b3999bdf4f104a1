"""The two mixing layers that both towers are made of: time mix (between tokens) and channel mix (within a token).

Shapes: B batch, T tokens, C width, H heads, N head size = C / H. Source: RWKV-6 (Peng et al. 2024, section 4) with the
bidirectional operator and the token shifts of RWKV-CLIP (Gu et al. 2024).

The code is written for few passes over memory: the mixed inputs come from kernels where those fit (ops/lerp.py),
elsewhere from one batched product and one multiply-add, and every element-wise chain is left to one compiler-visible
expression.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops import lerp
from .init import (
    TIME_DECAY_RANK,
    TIME_MIX_RANK,
    LayerPosition,
    TimeMixInit,
    channel_powers,
    time_bonus,
    time_decay,
    time_mix_ratios,
    uniform,
)
from .precise import PreciseModule, precise_value
from .shift import ImageShift, TextShift

Grid = tuple[int, int] | None
"""Rows and columns of patches; None for text."""
Shift = ImageShift | TextShift
"""A token shift, (B, T, C) -> (B, T, C)."""


class TimeMix(PreciseModule):
    """Mixes tokens with the bidirectional WKV6 operator: (B, T, C) -> (B, T, C).

    Each of w, k, v, r, g is projected from its own blend of the token and its shifted neighbours; the share of the
    neighbours depends on the data through a low-rank network. The decay w and the bonus u reach the operator in
    float32, whatever the weights' dtype.

    Args:
        width: C.
        num_heads: H.
        layer: position in the tower, which the fresh values depend on.
        fresh: how the tower draws fresh values.
        shift: the token shift.
        eps: of the group norm over each head's output.
    """

    def __init__(
        self, width: int, num_heads: int, layer: LayerPosition, fresh: TimeMixInit, shift: Shift, eps: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.shift = shift
        for name, ratio in time_mix_ratios(width, layer).items():
            self.register_parameter(f"time_maa_{name}", nn.Parameter(ratio))
        self.time_maa_w1 = nn.Parameter(uniform((width, 5 * TIME_MIX_RANK), fresh.time_maa_w1))
        self.time_maa_w2 = nn.Parameter(uniform((5, TIME_MIX_RANK, width), fresh.time_maa_w2))
        self.register_precise("time_decay", fresh.constant(time_decay(width, layer)))
        self.time_decay_w1 = nn.Parameter(uniform((width, TIME_DECAY_RANK), fresh.time_decay_w1))
        self.time_decay_w2 = nn.Parameter(uniform((TIME_DECAY_RANK, width), fresh.time_decay_w2))
        self.register_precise("time_faaaa", fresh.constant(time_bonus(num_heads, width // num_heads, layer)))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.ln_x = nn.GroupNorm(num_heads, width, eps=eps)

    def forward(self, x: Tensor, grid: Grid = None) -> Tensor:
        xw, xk, xv, xr, xg = self.mixed_inputs(x, grid)
        heads = (self.num_heads, -1)
        r = self.receptance(xr).unflatten(2, heads)
        k = self.key(xk).unflatten(2, heads)
        v = self.value(xv).unflatten(2, heads)
        change = torch.tanh(xw @ self.time_decay_w1) @ self.time_decay_w2
        w = precise_value(self.time_decay, self.time_decay_fp32) + change.float()
        u = precise_value(self.time_faaaa, self.time_faaaa_fp32)
        y = ops.wkv6(r, k, v, w.unflatten(2, heads), u)
        return self.output(self.normalized_heads(y) * F.silu(self.gate(xg)))

    def normalized_heads(self, y: Tensor) -> Tensor:
        """Group norm over each head: (B, T, H, N) -> (B, T, C).

        As a layer norm over N with the weights applied after it, whose gradient is far cheaper than that of
        PyTorch's group norm where there is one value per channel and group.
        """
        y = F.layer_norm(y, y.shape[3:], eps=self.ln_x.eps).flatten(2)
        return torch.addcmul(self.ln_x.bias, y, self.ln_x.weight)

    def mixed_inputs(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """Inputs of the w, k, v, r and g projections, each (B, T, C)."""
        constants = (self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g)
        layout = self.shift.layout(x, grid)
        if lerp.usable(x, layout):
            weights = (self.time_maa_w1, self.time_maa_w2)
            return lerp.time_mix_inputs(x, self.time_maa_x, *weights, constants, layout)
        difference = self.shift(x, grid) - x
        hidden = torch.tanh(torch.addcmul(x, difference, self.time_maa_x) @ self.time_maa_w1)
        hidden = hidden.view(-1, 5, TIME_MIX_RANK).transpose(0, 1)
        ratios = torch.bmm(hidden, self.time_maa_w2).unbind(0)  # each [B * T, C]
        return tuple(
            torch.addcmul(x, difference, constant + ratio.view(x.shape))
            for constant, ratio in zip(constants, ratios, strict=True)
        )


def _roots_are_slow(x: Tensor) -> bool:
    """On a CPU PyTorch's square root takes ten times as long for zeros, which half of a ReLU's outputs are."""
    return x.device.type == "cpu"


class SquaredReLU(torch.autograd.Function):
    """relu(x) ** 2, which keeps its output for the backward pass.

    The product behind it needs that one in any case, so x need not be kept or read again.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        root = torch.relu(x)
        y = torch.square(root)
        ctx.keeps_root = _roots_are_slow(x)
        ctx.save_for_backward(root if ctx.keeps_root else y)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        root = kept if ctx.keeps_root else torch.sqrt(kept)
        return torch.addcmul(gradient.new_zeros(()), root, gradient, value=2)  # one pass


class ChannelMix(nn.Module):
    """Mixes channels with a gated squared-ReLU network: (B, T, C) -> (B, T, C).

    The two subclasses differ in how the published towers store the shares of a token and its shifted neighbours.

    Args:
        width: C.
        hidden_width: width of the squared ReLU.
        shift: the token shift.
    """

    def __init__(self, width: int, hidden_width: int, shift: Shift) -> None:
        super().__init__()
        self.shift = shift
        self.key = nn.Linear(width, hidden_width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(hidden_width, width, bias=False)

    def neighbours_shares(self) -> tuple[Tensor, Tensor]:
        """Share of the shifted neighbours in the inputs of the key and receptance projections, float32 [1, 1, C]."""
        raise NotImplementedError

    def mixed_inputs(self, x: Tensor, shifted: Tensor) -> tuple[Tensor, Tensor]:
        """These inputs, each (B, T, C)."""
        raise NotImplementedError

    def forward(self, x: Tensor, grid: Grid = None) -> Tensor:
        layout = self.shift.layout(x, grid)
        if lerp.usable(x, layout):
            xk, xr = lerp.lerp(x, self.neighbours_shares(), layout)
        else:
            xk, xr = self.mixed_inputs(x, self.shift(x, grid))
        value = self.value(SquaredReLU.apply(self.key(xk)))
        return torch.sigmoid(self.receptance(xr)) * value


class ImageChannelMix(ChannelMix):
    """`spatial_mix_*` is the token's own share, the rest its neighbours'."""

    def __init__(self, width: int, hidden_width: int, layer: LayerPosition, shift: Shift) -> None:
        super().__init__(width, hidden_width, shift)
        self.spatial_mix_k = nn.Parameter(channel_powers(width, layer.falling))
        self.spatial_mix_r = nn.Parameter(channel_powers(width, layer.falling))

    def neighbours_shares(self) -> tuple[Tensor, Tensor]:
        return 1 - self.spatial_mix_k.float(), 1 - self.spatial_mix_r.float()

    def mixed_inputs(self, x: Tensor, shifted: Tensor) -> tuple[Tensor, Tensor]:
        xk = torch.addcmul(shifted * (1 - self.spatial_mix_k), x, self.spatial_mix_k)
        xr = torch.addcmul(shifted * (1 - self.spatial_mix_r), x, self.spatial_mix_r)
        return xk, xr


class TextChannelMix(ChannelMix):
    """`time_maa_*` is the neighbours' share, added as a difference."""

    def __init__(self, width: int, hidden_width: int, layer: LayerPosition, shift: Shift) -> None:
        super().__init__(width, hidden_width, shift)
        self.time_maa_k = nn.Parameter(1.0 - channel_powers(width, layer.falling))
        self.time_maa_r = nn.Parameter(1.0 - channel_powers(width, layer.falling))

    def neighbours_shares(self) -> tuple[Tensor, Tensor]:
        return self.time_maa_k.float(), self.time_maa_r.float()

    def mixed_inputs(self, x: Tensor, shifted: Tensor) -> tuple[Tensor, Tensor]:
        difference = shifted - x
        return torch.addcmul(x, difference, self.time_maa_k), torch.addcmul(x, difference, self.time_maa_r)
