"""The averaged weights of a run in its checkpoint folders: files `ema_00000.pt`, one per rank that holds a part.

Each file holds {"updates": int, "parts": {name: {"shape": [...], "start": int, "values": float32 [n]}}}: elements
`start` to `start + n` of the flattened parameter. So they are read without an engine and by any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .tensor_file import read_tensors

PATTERN = "ema_*.pt"
FINAL_WEIGHTS = "weights_ema.pt"
"""In a run folder: the averaged weights that a finished run ended with, in the published format."""


def file_name(rank: int) -> str:
    return f"ema_{rank:05d}.pt"


def shards(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """The content of each file of a checkpoint folder; none for a run without averaged weights."""
    for path in sorted(checkpoint.glob(PATTERN)):
        yield read_tensors(path, "give an earlier checkpoint")


def read_averaged(checkpoint: Path) -> dict[str, Tensor]:
    """Averaged float32 weights by name out of one checkpoint folder; {} for a run without them.

    Raises:
        UserError: a damaged file, or one that is missing.
    """
    weights: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    for shard in shards(checkpoint):
        for name, part in shard["parts"].items():
            whole = weights.setdefault(name, torch.zeros(part["shape"]))
            values = part["values"]
            whole.view(-1)[part["start"] : part["start"] + len(values)] = values
            seen[name] = seen.get(name, 0) + len(values)
    for name, whole in weights.items():
        if seen[name] != math.prod(whole.shape):
            raise UserError(f"{checkpoint}: part of the averaged weights ({name!r}) is missing; give an earlier one")
    return weights
