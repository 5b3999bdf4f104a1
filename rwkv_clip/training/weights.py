"""The run's weights in fp32, out of a live engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .masters import MasterPart, is_spread, master_parts
from .partitioned import whole_shape

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from .ema import WeightAverage


@torch.no_grad()
def gather_weights(
    engine: DeepSpeedEngine, frozen: Mapping[str, Tensor], average: WeightAverage | None = None
) -> dict[str, Tensor]:
    """Every parameter's fp32 master, whole, on rank 0's CPU; {} on the others, which must call it too.

    frozen: fp32 weights that have no master. average: take its values instead of the masters'.
    """
    parts = master_parts(engine)
    weights = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            whole = frozen[name]
        else:
            part = parts.get(name)
            value = None if part is None else part.value if average is None else average.value(part)
            whole = whole_weight(engine, parameter, part, value)
        if engine.global_rank == 0:
            weights[name] = whole.reshape(whole_shape(parameter)).cpu()
    return weights


def whole_weight(
    engine: DeepSpeedEngine, parameter: nn.Parameter, part: MasterPart | None, value: Tensor | None
) -> Tensor:
    """A parameter's fp32 values, whole and of its shape, on every rank, put together from all ranks' parts.

    part, value: the part [count] that this rank holds; None if it holds none.
    """
    whole = torch.zeros(whole_shape(parameter).numel(), device=parameter.device)
    if part is not None:
        whole[part.start : part.start + part.count] = value.to(whole.device)
    if is_spread(parameter) and engine.dp_world_size > 1:
        # Each element comes from one rank and is zero on the others, so the sum is exact.
        dist.all_reduce(whole, group=engine.data_parallel_group)
    return whole.view(whole_shape(parameter))
