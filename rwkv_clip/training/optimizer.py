"""AdamW and its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Parts of parameter names that are never decayed, whatever their shape: the decay, bonus and token-shift parameters of
# the mixing layers with their low-rank factors, the temperature, and the learned positions and class token.
UNDECAYED = ("time_", "spatial_mix_", "logit_scale", "pos_embed", "cls_token")


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: on matrices and kernels, not on vectors, norms, biases or UNDECAYED."""
    return parameter.dim() > 1 and not any(part.startswith(UNDECAYED) for part in name.split("."))


def parameter_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups "decay" and "no_decay" of the parameters that learn; a group without parameters is left out.

    Each group holds `params`, `lr`, `weight_decay` and `name`. A frozen parameter (requires_grad False) is in no group.
    """
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[is_decayed(name, parameter)].append(parameter)
    return [
        {
            "name": "decay" if decayed else "no_decay",
            "params": parameters,
            "lr": lr,
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for decayed, parameters in groups.items()
        if parameters
    ]


def build_optimizer(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.2,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, in one fused kernel per group."""
    return torch.optim.AdamW(parameter_groups(model, lr, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)
