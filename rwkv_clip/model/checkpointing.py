"""Activation checkpointing of a tower's blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CheckpointFunction = Callable[..., Tensor]
"""Called as function(block, *args) in place of block(*args); it keeps the arguments and runs the block again in the
backward pass, with the random state of the first run. Of the non-reentrant kind: `torch.utils.checkpoint.checkpoint`
with `use_reentrant=False`, or DeepSpeed's `non_reentrant_checkpoint`."""


def run_block(function: CheckpointFunction | None, block: nn.Module, *args: Any) -> Tensor:
    """block(*args), through `function` when one is set and gradients are recorded."""
    if function is None or not torch.is_grad_enabled():
        return block(*args)
    return function(block, *args)
