"""How a tower runs its blocks, and what is before and behind them: as it is, compiled, or (blocks) checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

CheckpointFunction = Callable[..., Tensor]
"""Called as function(block, *args) in place of block(*args); it keeps the arguments and runs the block again in the
backward pass, with the random state of the first run. Of the non-reentrant kind: `torch.utils.checkpoint.checkpoint`
with `use_reentrant=False`, or DeepSpeed's `non_reentrant_checkpoint`."""


class BlockRunner:
    """Runs the blocks of one tower, in place of calling them.

    Attributes:
        checkpoint_function: used when gradients are recorded; None keeps all activations.
        compiled_forward: the blocks' compiled `forward`, called with the block as its first argument (see compile.py).
            Used when gradients are recorded or the block is in training mode, where shapes stay the same: an
            evaluation with batches of any size must not compile for each of them.
        compiled_ends: likewise the tower's own methods `stem` and `pool`, by name, called with the tower first.
    """

    def __init__(self) -> None:
        self.checkpoint_function: CheckpointFunction | None = None
        self.compiled_forward: Callable[..., Tensor] | None = None
        self.compiled_ends: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {}

    def end(self, tower: nn.Module, name: str, x: Tensor) -> Tensor:
        """tower.stem(x) or tower.pool(x), by name."""
        if name in self.compiled_ends and (torch.is_grad_enabled() or tower.training):
            return self.compiled_ends[name](tower, x)
        return getattr(tower, name)(x)

    def __call__(self, block: nn.Module, *args: Any) -> Tensor:
        """block(*args)."""
        learning = torch.is_grad_enabled()
        forward = block
        if self.compiled_forward is not None and (learning or block.training):
            forward = partial(self.compiled_forward, block)
        if self.checkpoint_function is not None and learning:
            return self.checkpoint_function(forward, *args)
        return forward(*args)
