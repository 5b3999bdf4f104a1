"""The run's weights in fp32, out of a live engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .masters import master_parts

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@torch.no_grad()
def gather_weights(engine: DeepSpeedEngine, frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter's fp32 master, whole, on rank 0's CPU; {} on the others, which must call it too.

    frozen: fp32 weights that have no master.
    """
    parts = master_parts(engine)
    is_first = engine.global_rank == 0
    weights = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            whole = frozen[name]
        else:
            whole = torch.zeros(parameter.numel(), device=parameter.device)
            if name in parts:
                part = parts[name]
                whole[part.start : part.start + part.count] = part.value.to(whole.device)
            if hasattr(parameter, "_hp_mapping") and engine.dp_world_size > 1:
                # Each element comes from one rank and is zero on the others, so the sum is exact.
                dist.all_reduce(whole, group=engine.data_parallel_group)
        if is_first:
            weights[name] = whole.reshape(parameter.shape).cpu()
    return weights
