"""Weights that ZeRO stage 3 divides over the ranks: their shapes, writing them, and having them whole for a while.

Such a parameter is empty between the passes. Each rank holds one of as many equal parts of its flattened elements as
there are ranks, the last ones padded, and DeepSpeed gathers it whenever the module runs that it belongs to. One module
of the model reads another's weights, `TimeMix` those of its `ln_x`: DeepSpeed sees that in the engine's first pass, and
gathers them with the reader from then on. So nothing has to be named to it or kept whole;
`stage3_param_persistence_threshold` keeps small weights whole to save messages.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..model.mixing import ChannelMix, TimeMix

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MIXES = (TimeMix, ChannelMix)
"""What is gathered whole, see `gather_mixes_whole`."""


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether each rank holds a part of the parameter alone: ZeRO stage 3."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The parameter's shape, which `parameter.shape` does not tell while it is empty."""
    return parameter.ds_shape if is_partitioned(parameter) else parameter.shape


def held_part(parameter: nn.Parameter) -> tuple[int, int]:
    """(first element, number of elements) of a flattened partitioned parameter that this rank holds; maybe (_, 0)."""
    size = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


@torch.no_grad()
def write(parameter: nn.Parameter, value: Tensor) -> None:
    """Write a value with the parameter's number of elements, the same on every rank, into what this rank holds of it.

    No collective. Between the passes alone.
    """
    if is_partitioned(parameter):
        start, count = held_part(parameter)
        parameter.ds_tensor[:count].copy_(value.reshape(-1)[start : start + count])
        if parameter.numel() != parameter.ds_numel:
            return  # empty; a small one may be kept whole beside its part
    parameter.copy_(value.view_as(parameter))


def gather_mixes_whole(model: nn.Module) -> None:
    """Let DeepSpeed gather a mixing layer's weights together and let go of them together. Before it makes the engine.

    Else it would do so for each of their 5 and 3 modules. DeepSpeed takes the gradients of such a group when that of
    the group's input arrives, so all its weights must be used between its input and its output: a block's are not, as
    the tower itself runs `ln0`; nor are those of layers that are computed again in the backward pass.
    """
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, list(MIXES))


def keep_recomputed(engine: DeepSpeedEngine) -> None:
    """Let a block that is computed again keep its weights until its backward pass is done with them.

    Activation checkpointing runs a block's forward pass once more in the middle of its backward pass. DeepSpeed's hooks
    let go of each module's weights at the end of any forward pass, in this case just before their gradients arrive,
    which then find no place; those at the end of the backward pass let go of them anyway.
    """
    if not hasattr(engine.optimizer, "parameter_offload"):
        return
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    release = coordinator.release_sub_module

    def release_unless_recomputed(submodule: nn.Module, forward: bool = False) -> None:
        if not forward or torch._C._current_graph_task_id() == -1:  # outside of a backward pass
            release(submodule, forward=forward)

    coordinator.release_sub_module = release_unless_recomputed


def whole_weights(engine: DeepSpeedEngine) -> contextlib.AbstractContextManager:
    """The module has all its weights inside, and any rank may run it or methods of it without the others.

    Every rank must enter it. What is written into partitioned weights inside is forgotten at the end.
    """
    if not any(is_partitioned(parameter) for parameter in engine.module.parameters()):
        return contextlib.nullcontext()
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    # It takes the hooks away as well: they would let go of each weight after its first use.
    return unwrap_model_for_generation(engine)
