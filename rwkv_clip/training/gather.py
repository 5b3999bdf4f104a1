"""Small collectives over the data-parallel group that also work in one process without torch.distributed."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in `group` (None: the default group); 1 when torch.distributed is not initialized."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in `group`; 0 when torch.distributed is not initialized."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def gather_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's `tensor` [...], stacked by rank: [W, ...], without gradient. Shapes must agree between ranks."""
    world_size = group_size(group)
    if world_size == 1:
        return tensor.detach().unsqueeze(0)
    gathered = tensor.new_empty((world_size, *tensor.shape))
    _all_gather(gathered.view(-1), tensor.detach().contiguous().view(-1), group=group)
    return gathered


def mean_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Mean of `tensor` over the ranks, without gradient and without waiting for the device."""
    world_size = group_size(group)
    mean = tensor.detach().clone()
    if world_size > 1:
        dist.all_reduce(mean, group=group)
        mean /= world_size
    return mean
