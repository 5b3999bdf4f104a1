"""A ZeRO step without Python for each parameter, without thousands of small kernels, without a wait for the device.

DeepSpeed's ZeRO optimizer for stages 1 and 2 treats every gradient by itself: a hook in the backward pass, two or three
copies, a look for NaN and Inf, a norm. For some 560 parameters that is 25 ms of Python and 1,700 kernels per step, and
the device is asked in each parameter group whether the norm is finite. Here a parameter group is one flat tensor from
the end of the backward pass on, and the global norm alone tells whether a step is left out.

In bf16 with PyTorch's fused AdamW the device itself clips and leaves the step out, and Python learns of it one step
later (`pending_norm`): the GPU always has its next work. Otherwise the norm is read once per step, and from there to
the next forward pass the GPU waits for Python, so nothing that can be left out stands there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gather import group_size
from .readback import on_the_way

# torch 2.13 renamed it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def make_lean(optimizer: Any) -> bool:
    """Replace such methods on a ZeRO optimizer of stage 1 or 2 that keeps its state with the weights; True if done.

    The results are the same, but for the order in which a norm is added up. Any other optimizer, or a DeepSpeed with
    other methods, stays as it is.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is not DeepSpeedZeroOptimizer or optimizer.cpu_offload or optimizer.has_moe_layers:
        return False
    judged_by_norm = getattr(optimizer, "check_grad_overflow", False) or optimizer.dtype == torch.float32
    if not getattr(optimizer, "compute_grad_norm", False) or not judged_by_norm:
        return False  # then DeepSpeed does not judge the step by the norm
    if _decides_on_the_device(optimizer):
        optimizer.check_grad_overflow = False
        optimizer.scaled_global_norm = MethodType(_norm_on_the_device, optimizer)
        optimizer.unscale_and_clip_grads = MethodType(_clipped_by_the_optimizer, optimizer)
    else:
        optimizer.has_overflow = MethodType(_overflow_is_in_the_norm, optimizer)
        optimizer.scaled_global_norm = MethodType(_norm, optimizer)
        optimizer.unscale_and_clip_grads = MethodType(_unscale_and_clip, optimizer)
    if all(_are_views(optimizer, group) for group in range(len(optimizer.bit16_groups))):
        optimizer._update_model_bit16_weights = MethodType(_weights_are_views, optimizer)
    if _reduces_after_the_backward_pass(optimizer):
        # They would gather the gradients one by one; with stage 1 nothing else depends on them.
        for hook in optimizer._grad_acc_hooks:
            hook.remove()
        optimizer._grad_acc_hooks.clear()
        optimizer._gradients_are_dropped = False
        optimizer.reduce_gradients = MethodType(_reduce, optimizer)
        optimizer.free_grad_in_param_list = MethodType(_nothing_left, optimizer)
        optimizer.zero_grad = MethodType(_zero_grad, optimizer)
    return True


def pending_norm(optimizer: Any) -> Callable[[], list[float]] | None:
    """What waits for the last step's gradient norm, [norm]: the step was left out if it is not finite.

    None where the optimizer itself has waited for it.
    """
    return getattr(optimizer, "_pending_norm", None)


def leaves_no_gradients(optimizer: Any) -> bool:
    """Whether a backward pass ends with the weights' `.grad` taken away, to be read no more."""
    return hasattr(optimizer, "_gradients_are_dropped")


def _decides_on_the_device(optimizer: Any) -> bool:
    """Whether its AdamW takes a divisor of the gradients, and whether to do nothing, from the device."""
    inner = optimizer.optimizer
    fused = type(inner) is torch.optim.AdamW and all(group["fused"] for group in inner.param_groups)
    return fused and optimizer.dtype == torch.bfloat16


def _are_views(optimizer: Any, group: int) -> bool:
    """Whether the model's weights lie in the flat buffer that a step updates."""
    flat = optimizer.bit16_groups_flat[group]
    end = flat.data_ptr() + flat.numel() * flat.element_size()
    return all(flat.data_ptr() <= parameter.data_ptr() < end for parameter in optimizer.bit16_groups[group])


def _weights_are_views(_optimizer: Any, _group: int) -> None:
    """Nothing to do: DeepSpeed would make each weight a view of the flat buffer anew, while the GPU has no work."""


def _reduces_after_the_backward_pass(optimizer: Any) -> bool:
    """Whether this is stage 1 without settings beyond its defaults: the mean over the ranks of the weights' `.grad`."""
    return (
        hasattr(optimizer, "reduce_gradients")
        and hasattr(optimizer, "_get_preflattened_grad_partition")
        and not optimizer.partition_gradients
        and not optimizer.overlap_comm
        and not optimizer.use_grad_accum_attribute
        and optimizer.communication_data_type == optimizer.dtype
        and optimizer.reduce_scatter
        and optimizer.gradient_average
        and optimizer.sequence_parallel_size == 1
        and optimizer.model_parallel_world_size == 1
        and not any(any(padding) for padding in optimizer.round_robin_bit16_padding)
        and "muon" not in type(optimizer.optimizer).__name__.lower()
    )


class _Flat:
    """One group's gradients in this rank's partition, in the form that DeepSpeed's step takes as it is.

    By index it gives those of one parameter of the partition, for DeepSpeed's `safe_get_full_grad`.
    """

    def __init__(self, partition: Tensor, parameters: list[nn.Parameter]) -> None:
        self.flat_partition = partition
        self._parameters = parameters

    def __getitem__(self, index: int) -> Tensor:
        place = self._parameters[index]._hp_mapping.hp_fragment_address
        return self.flat_partition.narrow(0, place.start, place.numel)


@torch.no_grad()
def _reduce(optimizer: Any, **_: Any) -> None:
    """Turn the weights' `.grad` into the mean over the ranks of this rank's partition, fp32, group by group.

    The arithmetic is DeepSpeed's: in the dtype of the weights, divided before they are summed. A reduce-scatter moves
    half of what its all-reduce does.
    """
    group = optimizer.dp_process_group
    world_size = group_size(group)
    for number, parameters in enumerate(optimizer.round_robin_bit16_groups):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # Laid out like the flat weights, padding at the end included.
        flat = optimizer.flatten_dense_tensors_aligned(gradients, world_size * optimizer.nccl_start_alignment_factor)
        del gradients
        for parameter in parameters:
            parameter.grad = None
        if world_size > 1:
            flat = _sum_of_parts(flat.div_(world_size), world_size, group)
        master = optimizer.single_partition_of_fp32_groups[number]
        optimizer.averaged_gradients[number] = _Flat(flat.to(master.dtype), optimizer.params_in_partition[number])
    optimizer._gradients_are_dropped = True


def _sum_of_parts(flat: Tensor, world_size: int, group: dist.ProcessGroup) -> Tensor:
    """Of the equal parts of `flat`, this rank's one, added up over the ranks."""
    if flat.device.type == "cpu":  # gloo's reduce-scatter takes twice as long
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat, group=group)
        return parts.view(world_size, -1).sum(dim=0)
    part = flat.new_empty(flat.numel() // world_size)
    _reduce_scatter(part, flat, group=group)
    return part


def _overflow_is_in_the_norm(_optimizer: Any, partition_gradients: bool = True) -> bool:
    """False: right after it, `step` takes the global norm and leaves the step out when it is not finite."""
    return False


def _squares(optimizer: Any) -> Tensor:
    """Sum of the squares of all gradients of all ranks, fp32 [], on the device."""
    # The last rank's partition ends with padding, which is zero.
    groups = optimizer.averaged_gradients.values()
    gradients = [part for group in groups for part in ([group.flat_partition] if isinstance(group, _Flat) else group)]
    total = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()
    if group_size(optimizer.dp_process_group) > 1:
        dist.all_reduce(total, group=optimizer.dp_process_group)
    return total


def _norm(optimizer: Any, norm_type: float = 2) -> float:
    """L2 norm of all gradients of all ranks, inf if it is not finite: the one number of a step that is waited for."""
    if norm_type != 2:
        raise ValueError(f"only the L2 norm is taken here, not {norm_type}")
    squares = _squares(optimizer).item()
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


def _unscale_and_clip(optimizer: Any, gradients: list[Tensor | list[Tensor]], total_norm: float) -> None:
    """Divide by the loss scale and clip to the largest norm. total_norm: scaled, finite."""
    scale = optimizer.loss_scale
    if optimizer.clip_grad > 0.0:
        scale *= max((total_norm / scale + 1e-6) / optimizer.clip_grad, 1.0)
    if scale == 1.0:
        return
    for gradient in gradients:
        for part in gradient if isinstance(gradient, list) else [gradient]:
            part.data.mul_(1.0 / scale)


@torch.no_grad()
def _norm_on_the_device(optimizer: Any, norm_type: float = 2) -> Tensor:
    """As `_norm`, fp32 [] on the device, and what the AdamW steps that follow need of it."""
    if norm_type != 2:
        raise ValueError(f"only the L2 norm is taken here, not {norm_type}")
    norm = _squares(optimizer).sqrt().nan_to_num_(nan=math.inf, posinf=math.inf)
    # The fused kernel's own arguments for what torch.amp.GradScaler leaves to it.
    optimizer.optimizer.found_inf = norm.isinf().float()
    if optimizer.clip_grad > 0.0:
        optimizer.optimizer.grad_scale = ((norm + 1e-6) / optimizer.clip_grad).clamp_(min=1.0)
    optimizer._pending_norm = on_the_way(norm.view(1))
    return norm


def _clipped_by_the_optimizer(_optimizer: Any, _gradients: list[Tensor], _total_norm: Tensor) -> None:
    """Nothing to do: AdamW divides by `grad_scale` as it reads the gradients."""


def _nothing_left(_optimizer: Any, _parameters: list[nn.Parameter]) -> None:
    """Nothing to do: `_reduce` has dropped the weights' gradients."""


def _zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """Drop all gradients; right after a step there are none, and to look for them costs a third of a millisecond."""
    if optimizer._gradients_are_dropped:
        optimizer._gradients_are_dropped = False
    else:
        type(optimizer).zero_grad(optimizer, set_to_none)
