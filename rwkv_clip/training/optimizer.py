"""AdamW and its parameter groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

# Parts of parameter names that are never decayed, whatever their shape: the decay, bonus and token-shift parameters of
# the mixing layers with their low-rank factors, the temperature, and the learned positions and class token.
UNDECAYED = ("time_", "spatial_mix_", "logit_scale", "pos_embed", "cls_token")

ELEMENTS_PER_LOAD = 8
"""bf16 or fp16 numbers in the 16 bytes that a GPU loads at once."""

LR_FACTORS = {
    "--image-lr-factor": "the image tower",
    "--text-lr-factor": "the text tower",
    "--decay-lr-factor": "the decays of the mixing layers (time_decay), on top of their tower's",
}
"""Flags of factors on the learning rate, and what each acts on."""


@dataclass(frozen=True)
class LRFactors:
    """Factors on the learning rate of a tower's parameters, and on top of it of the `time_decay` vectors."""

    image: float = 1.0
    text: float = 1.0
    decay: float = 1.0

    def of(self, name: str) -> tuple[str, float]:
        """(kind, factor) of a parameter: kind "image", "text", "image_time_decay", ..., "" for the temperature's.

        Where nobody asks for other rates, all are of kind "".
        """
        if self == LRFactors():
            return "", 1.0
        tower = next((tower for tower in ("image", "text") if name.startswith(f"{tower}_model.")), "")
        factor = getattr(self, tower) if tower else 1.0
        if self.decay != 1.0 and name.split(".")[-1] == "time_decay":
            return f"{tower}_time_decay".lstrip("_"), factor * self.decay
        return tower, factor


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: on matrices and kernels, not on vectors, norms, biases or UNDECAYED."""
    return parameter.dim() > 1 and not any(part.startswith(UNDECAYED) for part in name.split("."))


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float, factors: LRFactors | None = None
) -> list[dict[str, Any]]:
    """Optimizer groups of the parameters that learn: "decay" and "no_decay", or "image/decay", "text/no_decay", ...

    Each group holds `params`, `lr`, `weight_decay` and `name`. A frozen parameter (requires_grad False) is in no group,
    and there is no group without parameters. factors: of the rates; None for one rate for all.

    The order of `params` is part of a checkpoint: its masters and moments lie in that order, without names.
    """
    factors = factors or LRFactors()
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind, factor = factors.of(name)
        decayed = is_decayed(name, parameter)
        group = groups.setdefault(
            (kind, decayed),
            {
                "name": f"{kind}/{'decay' if decayed else 'no_decay'}".lstrip("/"),
                "params": [],
                "lr": lr * factor,
                "weight_decay": weight_decay if decayed else 0.0,
            },
        )
        group["params"].append(parameter)
    for group in groups.values():
        # DeepSpeed lays a group's bf16 weights end to end in one buffer. Behind the temperature's single element the
        # others would start at odd addresses; compiled kernels load 16 bytes at a time from multiples of 16 alone.
        group["params"].sort(key=lambda parameter: parameter.numel() % ELEMENTS_PER_LOAD != 0)
    # Weight matrices first, as the largest.
    return sorted(groups.values(), key=lambda group: (group["name"].endswith("no_decay"), group["name"]))


def learning_rates(groups: list[dict[str, Any]]) -> dict[str, float]:
    """The present rates of an optimizer's `param_groups` by kind: "learning_rate", or "learning_rate/image", ..."""
    rates = {}
    for group in groups:
        kind = group.get("name", "").rpartition("/")[0]
        rates[f"learning_rate/{kind}" if kind else "learning_rate"] = float(group["lr"])
    return rates


def follow_schedule(scheduler: Any) -> None:
    """Give the next step the rate of this run's own schedule, after a checkpoint was loaded.

    A checkpoint holds the rate that its run had reached, which for a finished one is the schedule's end: a resume with
    more epochs would take a step at that rate before the schedule is asked again. A scheduler of DeepSpeed's
    is left alone.
    """
    if isinstance(scheduler, LambdaLR):
        groups = scheduler.optimizer.param_groups
        for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = rate * factor(scheduler.last_epoch)


def build_optimizer(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.2,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-8,
    factors: LRFactors | None = None,
) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, in one fused kernel per group."""
    groups = parameter_groups(model, lr, weight_decay, factors)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


@torch.no_grad()
def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the optimizer's first step would make, so that a run's first forward pass has what is left.

    Otherwise the first step's passes, in which CUDA graphs are recorded, are measured without the moments: memory seems
    to suffice, or a run ends at its second step. Changes no weight. Does nothing where there is state already, and for
    other optimizers than PyTorch's Adam and AdamW.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    made = optimizer.state or any(parameter.grad is not None for parameter in parameters)
    if made or not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()


def separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each weight a count of steps of its own, where the optimizer wants it.

    DeepSpeed's universal checkpoint leaves it on the CPU, where a fused AdamW on a GPU refuses it, and with ZeRO stage
    3 one for all weights, which the step of each would raise.
    """
    beside = any(optimizer.defaults.get(kind) for kind in ("fused", "capturable"))
    for weight, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(weight.device if beside else "cpu", copy=True)
