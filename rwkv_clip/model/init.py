"""Fresh weights, as the published code draws them.

Both towers share the constants of the mixing layers. The low-rank matrices start in a small uniform range. The text
tower then gives every projection an orthogonal matrix with a gain by its role, zeroes the matrices that write to the
residual stream, and scales the group norms by depth; the image tower keeps PyTorch's defaults.

A tower of one layer would divide by zero in the published formula; its ratio is taken as 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TIME_MIX_RANK = 32
TIME_DECAY_RANK = 64


@dataclass(frozen=True)
class LayerPosition:
    """Which layer of how many; the constants depend on it."""

    index: int
    depth: int

    @property
    def rising(self) -> float:
        """0 in the first layer, 1 in the last; 0 if there is only one."""
        return self.index / (self.depth - 1) if self.depth > 1 else 0.0

    @property
    def falling(self) -> float:
        """1 in the first layer, almost 0 in the last."""
        return 1.0 - self.index / self.depth


@dataclass(frozen=True)
class TimeMixInit:
    """What differs between the towers' fresh time mix: bounds of the uniform draws, and the constants' precision."""

    time_maa_w1: float
    time_maa_w2: float
    time_decay_w1: float
    time_decay_w2: float
    bfloat16_constants: bool
    """Round decay and bonus to bfloat16 (still stored as float32): the published text tower creates them so."""

    def constant(self, value: Tensor) -> Tensor:
        return value.bfloat16().float() if self.bfloat16_constants else value


IMAGE_TIME_MIX = TimeMixInit(1e-4, 1e-4, 1e-4, 1e-4, bfloat16_constants=False)
TEXT_TIME_MIX = TimeMixInit(0.0, 1e-2, 0.0, 1e-2, bfloat16_constants=True)


def channel_powers(width: int, exponent: float) -> Tensor:
    """(i / width) ** exponent for every channel i; float32 [1, 1, width]."""
    return torch.pow(torch.arange(width, dtype=torch.float64) / width, exponent).float().view(1, 1, width)


def time_mix_ratios(width: int, layer: LayerPosition) -> dict[str, Tensor]:
    """Constants of the time mix's `time_maa_*` parameters, each float32 [1, 1, width]."""
    slow = channel_powers(width, layer.falling)
    fast = channel_powers(width, 0.5 * layer.falling)
    return {
        "x": 1.0 - slow,
        "w": 1.0 - slow,
        "k": 1.0 - slow,
        "v": 1.0 - (slow + 0.3 * layer.rising),
        "r": 1.0 - fast,
        "g": 1.0 - fast,
    }


def time_decay(width: int, layer: LayerPosition) -> Tensor:
    """Raw decay (the decay is exp(-exp(w))), from -6 in the first channel to -1 in the last; float32 [1, 1, width]."""
    position = torch.arange(width, dtype=torch.float64) / (width - 1)
    return (-6 + 5 * position ** (0.7 + 1.3 * layer.rising)).float().view(1, 1, width)


def time_bonus(num_heads: int, head_size: int, layer: LayerPosition) -> Tensor:
    """Weight of a token's own key and value (`time_faaaa`, the operator's u); float32 [num_heads, head_size]."""
    channel = torch.arange(num_heads * head_size, dtype=torch.float64)
    zigzag = ((channel + 1) % 3 - 1) * 0.1
    bonus = layer.rising * (1 - channel / (len(channel) - 1)) + zigzag
    return bonus.float().view(num_heads, head_size)


def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
    """Uniform in [-bound, bound], zeros if bound is 0; float32."""
    return torch.empty(shape).uniform_(-bound, bound) if bound > 0 else torch.zeros(shape)


def _orthogonal_(weight: Tensor, gain: float) -> None:
    """Orthogonal [out, in]; a matrix with more rows than columns is scaled up by sqrt(out / in)."""
    rows, columns = weight.shape
    nn.init.orthogonal_(weight, gain=gain * math.sqrt(max(1.0, rows / columns)))


@torch.no_grad()
def initialize_text_(tower: nn.Module) -> None:
    """Give a `TextTower` the published weights in place: embedding, projections and group norms."""
    tower.emb.weight.uniform_(-1e-4, 1e-4)
    for index, block in enumerate(tower.blocks):
        _orthogonal_(block.att.receptance.weight, 1.0)
        _orthogonal_(block.att.key.weight, 0.1)
        _orthogonal_(block.att.value.weight, 1.0)
        _orthogonal_(block.att.gate.weight, 0.1)
        _orthogonal_(block.ffn.key.weight, 0.5)
        for linear in (block.att.output, block.ffn.receptance, block.ffn.value):
            linear.weight.zero_()
        block.att.ln_x.weight.fill_(((index + 1) / len(tower.blocks)) ** 0.7)
