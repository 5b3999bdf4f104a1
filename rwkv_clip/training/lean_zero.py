"""The end of a ZeRO step without hundreds of small kernels and without waiting for the device again and again.

DeepSpeed's ZeRO optimizer for stages 1 and 2 looks at every gradient by itself for NaN and Inf, takes the norm of every
one by itself, and asks the device in each parameter group whether the norm is finite: 6,000 small kernels per step for
some 560 parameters. The global norm alone tells all of it; here it is one fused kernel, read once. From there to the
next forward pass the GPU waits for Python, so nothing that can be left out stands there.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def make_lean(optimizer: Any) -> bool:
    """Replace such methods on a ZeRO optimizer of stage 1 or 2 that keeps its state on the GPU; True if done.

    The results are the same. Any other optimizer, or a DeepSpeed with other methods, stays as it is.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is not DeepSpeedZeroOptimizer or optimizer.cpu_offload or optimizer.has_moe_layers:
        return False
    if not getattr(optimizer, "compute_grad_norm", False) or not getattr(optimizer, "check_grad_overflow", False):
        return False  # then DeepSpeed does not judge the step by the norm
    optimizer.has_overflow = MethodType(_overflow_is_in_the_norm, optimizer)
    optimizer.get_grad_norm_direct = MethodType(_norm, optimizer)
    optimizer.unscale_and_clip_grads = MethodType(_unscale_and_clip, optimizer)
    if all(_are_views(optimizer, group) for group in range(len(optimizer.bit16_groups))):
        optimizer._update_model_bit16_weights = MethodType(_weights_are_views, optimizer)
    return True


def _are_views(optimizer: Any, group: int) -> bool:
    """Whether the model's weights lie in the flat buffer that a step updates."""
    flat = optimizer.bit16_groups_flat[group]
    end = flat.data_ptr() + flat.numel() * flat.element_size()
    return all(flat.data_ptr() <= parameter.data_ptr() < end for parameter in optimizer.bit16_groups[group])


def _weights_are_views(_optimizer: Any, _group: int) -> None:
    """Nothing to do: DeepSpeed would make each weight a view of the flat buffer anew, while the GPU has no work."""


def _overflow_is_in_the_norm(_optimizer: Any, partition_gradients: bool = True) -> bool:
    """False: right after it, `step` takes the global norm and leaves the step out when it is not finite."""
    return False


def _norm(optimizer: Any, gradients: list[Tensor], params: list[nn.Parameter], norm_type: float = 2) -> Tensor:
    """L2 norm of all ranks' parts of one group's gradients, fp32 []; -1 if it is not finite, as DeepSpeed has it."""
    if norm_type != 2:
        raise ValueError(f"only the L2 norm is taken here, not {norm_type}")
    # The last rank's partition ends with padding, which is zero.
    norms = torch._foreach_norm([gradient.detach() for gradient in gradients], 2, dtype=torch.float32)
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=optimizer.device)
    dist.all_reduce(total, group=optimizer.dp_process_group)
    return torch.where(total.isfinite(), total.sqrt(), -1.0)


def _unscale_and_clip(optimizer: Any, gradients: list[Tensor | list[Tensor]], total_norm: Tensor) -> None:
    """Divide by the loss scale and clip to the largest norm, on the device alone. total_norm: scaled, finite."""
    scale = optimizer.loss_scale
    if optimizer.clip_grad > 0.0:
        scale = ((total_norm / scale + 1e-6) / optimizer.clip_grad).clamp(min=1.0) * scale
    elif scale == 1.0:
        return
    for gradient in gradients:
        for part in gradient if isinstance(gradient, list) else [gradient]:
            part.data.mul_(1.0 / scale)
