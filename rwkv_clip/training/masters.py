"""The fp32 master weights behind a DeepSpeed engine: writing them, bounding the temperature, sharing the precise ones.

In a bf16 or fp16 engine the module holds rounded copies and the optimizer holds fp32 masters, under ZeRO each rank a
part of them. Three things need the masters themselves. DeepSpeed makes them from the rounded copies (an error of 1e-2
for a decay near -6), so the exact weights are written afterwards. The bounds of the temperature hold on the master: a
clamp of the rounded copy would not touch it. And `RWKVCLIP.precise_parameters` act through fp32 buffers, which are
filled from the masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gather import group_size
from .partitioned import held_part, is_partitioned, whole_shape, write

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Attribute of an engine: its module's precise parameters, once found.
_FOUND = "_precise_parameters_found"

LOGIT_SCALE = "logit_scale"
LOGIT_SCALE_BOUNDS = (0.0, math.log(100.0))


@dataclass(frozen=True)
class MasterPart:
    """The part of one parameter's master that this rank's optimizer holds."""

    parameter: nn.Parameter
    start: int
    """First element of the flattened parameter that the part covers."""
    count: int
    owner: Tensor
    """The tensor that the optimizer updates, possibly many masters in one."""
    owner_start: int

    def view(self, tensor: Tensor) -> Tensor:
        """The part's elements [count] of a tensor laid out like `owner`: the master, or an optimizer state."""
        return tensor.detach().view(-1)[self.owner_start : self.owner_start + self.count]

    @property
    def value(self) -> Tensor:
        """The master's elements [count], fp32, sharing memory with the optimizer."""
        return self.view(self.owner)


def master_parts(
    engine: DeepSpeedEngine, parameters: Mapping[str, nn.Parameter] | None = None
) -> dict[str, MasterPart]:
    """This rank's parts of the masters of some named parameters (default: all); one without a part is left out.

    Frozen parameters have no master. Covers ZeRO stages 0 to 3 with each of DeepSpeed's optimizers for them; where the
    optimizer works on the parameters themselves, they are their own masters.
    """
    if parameters is None:
        parameters = dict(engine.module.named_parameters())
    whole = _whole_masters(engine.optimizer)
    groups = engine.basic_optimizer.param_groups
    parts = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        if is_partitioned(parameter):
            start, count = held_part(parameter)
            if count:
                group, first, _ = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
                owner = engine.optimizer.fp32_partitioned_groups_flat[group]
                parts[name] = MasterPart(parameter, start, count, owner, first)
        elif hasattr(parameter, "_hp_mapping"):  # ZeRO stages 1 and 2, BF16_Optimizer
            mapping = parameter._hp_mapping
            if mapping is not None:
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                owner = groups[mapping.param_group_index]["params"][0]
                parts[name] = MasterPart(parameter, here.start, here.numel, owner, there.start)
        else:
            owner, start = whole.get(parameter, (parameter, 0))
            parts[name] = MasterPart(parameter, 0, parameter.numel(), owner, start)
    return parts


def is_spread(parameter: nn.Parameter) -> bool:
    """Whether each rank's optimizer holds a part of the parameter's master alone: ZeRO."""
    return hasattr(parameter, "_hp_mapping") or is_partitioned(parameter)


def _whole_masters(optimizer: Any) -> dict[nn.Parameter, tuple[Tensor, int]]:
    """(owner, first element) by parameter for stage 0 in fp16 or bf16, where each rank holds every master."""
    masters = {}
    if hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            start = 0
            for parameter in parameters:
                masters[parameter] = (flat, start)
                start += parameter.numel()
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        for parameters, copies in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters.update((parameter, (copy, 0)) for parameter, copy in zip(parameters, copies, strict=True))
    return masters


@torch.no_grad()
def set_masters(engine: DeepSpeedEngine, fp32_state: Mapping[str, Tensor]) -> None:
    """Write exact weights into the masters, the module's own copies and its precise buffers.

    fp32_state: by parameter name, the same on every rank; shapes may differ in ones only (a `logit_scale` of []). Call
    it on every rank, right after `deepspeed.initialize`. Raises ValueError for a parameter that is missing or has
    another number of elements.
    """
    parameters = dict(engine.module.named_parameters())
    parts = master_parts(engine, parameters)
    precise = engine.module.precise_parameters()
    for name, parameter in parameters.items():
        if name not in fp32_state:
            raise ValueError(f"no value given for parameter '{name}'")
        value = fp32_state[name].detach().to(parameter.device, torch.float32)
        shape = whole_shape(parameter)
        if value.numel() != shape.numel():
            raise ValueError(f"'{name}' has shape {tuple(shape)}, the value given {tuple(value.shape)}")
        write(parameter, value)
        if name in precise:
            precise[name][1].copy_(value.view_as(precise[name][1]))
        if name in parts:
            part = parts[name]
            part.value.copy_(value.reshape(-1)[part.start : part.start + part.count])
    _undo_first_step(engine)
    sync_precise(engine)


def _undo_first_step(engine: DeepSpeedEngine) -> None:
    """DeepSpeed's stage 0 in fp16 and bf16 makes the optimizer take a step on zero gradients, to allocate its state.

    It decays the weights, which `set_masters` puts right, and would halve the first real update.
    """
    if _whole_masters(engine.optimizer):
        for state in engine.basic_optimizer.state.values():
            for value in state.values():
                value.zero_()


@torch.no_grad()
def sync_precise(engine: DeepSpeedEngine) -> None:
    """Bound the temperature's master and bring the module's precise buffers up to the masters.

    Call it on every rank after each optimizer step and after a load. In a bf16 or fp16 engine under ZeRO, and with
    stage 3 in any, that is one all-reduce of a few thousand numbers, otherwise no collective; nothing waits for the
    device.
    """
    if not hasattr(engine, _FOUND):  # finding them walks through all modules
        setattr(engine, _FOUND, engine.module.precise_parameters())
    precise = {
        name: (parameter, buffer)
        for name, (parameter, buffer) in getattr(engine, _FOUND).items()
        if parameter.requires_grad  # a frozen one keeps the value that was loaded
    }
    if not precise:
        return
    parts = master_parts(engine, {name: parameter for name, (parameter, _) in precise.items()})
    _bound_logit_scale(engine, parts)
    buffers = [buffer for _, buffer in precise.values()]
    if all(parameter.dtype == torch.float32 and not is_partitioned(parameter) for parameter, _ in precise.values()):
        if LOGIT_SCALE in precise:
            precise[LOGIT_SCALE][0].clamp_(*LOGIT_SCALE_BOUNDS)
        values = [parameter for parameter, _ in precise.values()]
    else:
        values = _whole_values(engine, precise, parts)
        if LOGIT_SCALE in precise:
            write(precise[LOGIT_SCALE][0], values[list(precise).index(LOGIT_SCALE)])
    torch._foreach_copy_(buffers, [value.view_as(buffer) for value, buffer in zip(values, buffers, strict=True)])


def _whole_values(
    engine: DeepSpeedEngine, precise: Mapping[str, tuple[nn.Parameter, Tensor]], parts: Mapping[str, MasterPart]
) -> list[Tensor]:
    """The masters of the precise parameters on every rank, flat and fp32, put together from all ranks' parts."""
    sizes = [buffer.numel() for _, buffer in precise.values()]
    device = next(iter(precise.values()))[1].device
    shared = torch.zeros(sum(sizes), device=device)
    values = list(shared.split(sizes))
    held = [(value, parts[name]) for name, value in zip(precise, values, strict=True) if name in parts]
    if held:
        places = [value[part.start : part.start + part.count] for value, part in held]
        torch._foreach_copy_(places, [part.value for _, part in held])
    if any(is_spread(parameter) for parameter, _ in precise.values()) and group_size(engine.data_parallel_group) > 1:
        # Each element comes from one rank and is zero on the others, so the sum is exact.
        dist.all_reduce(shared, group=engine.data_parallel_group)
    return values


def _bound_logit_scale(engine: DeepSpeedEngine, parts: Mapping[str, MasterPart]) -> None:
    """Clamp the master to LOGIT_SCALE_BOUNDS and drop the momentum that pushes it beyond.

    Without the second, Adam's running mean keeps the master at the bound for several steps after the gradient turned.
    """
    if LOGIT_SCALE not in parts:
        return
    low, high = LOGIT_SCALE_BOUNDS
    part = parts[LOGIT_SCALE]
    momentum = engine.basic_optimizer.state.get(part.owner, {}).get("exp_avg")
    if momentum is not None:
        momentum = part.view(momentum)
        # The step goes against the momentum: a negative one raises the master.
        momentum.copy_(torch.where(part.value >= high, momentum.clamp(min=0), momentum))
        momentum.copy_(torch.where(part.value <= low, momentum.clamp(max=0), momentum))
    part.value.clamp_(low, high)
